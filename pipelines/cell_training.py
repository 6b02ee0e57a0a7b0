"""How a stage trains a cell: locked, resumed, told to the ledger, exported. The stage says what is trained and how.

A finished cell is copied to `output`, not trained again. Killed at any moment and started again, a training goes on
from its last checkpoint to the same weights, bit for bit on a CPU, in the same run of the ledger.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from models import build_model, save_model
from models.configuration import require
from models.families import FAMILIES
from pipelines.checkpoints import Cell
from pipelines.config import DistillConfig, PipelineConfig, PretrainConfig, StageError
from pipelines.data import BatchLoader, TokenData
from pipelines.files import atomic_path, write_json
from pipelines.identity import code_digest, commit, fingerprint
from pipelines.role import ALONE, Role

if TYPE_CHECKING:
    from models.lightning.training import Training
    from pipelines.ledger import Run
    from pipelines.training import Recorder, StopSignal

METRICS = "metrics.json"
COLUMNS = {  # loss.csv -> the ledger's name
    "train_loss": "train/loss",
    "validation_loss": "validation/loss",
    "learning_rate": "train/lr",
    "gradient_norm": "train/gradient_norm",
}
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")  # not all 0: one process among several


class CellTraining(ABC):
    """One training of `config.model` on `data`."""

    stage: ClassVar[str]  # also the name of its section in the configuration

    def __init__(self, config: PipelineConfig, data: TokenData) -> None:
        self.config, self.data = config, data

    @property
    def section(self) -> PretrainConfig | DistillConfig:
        return getattr(self.config, self.stage)

    @abstractmethod
    def module(self, first_step: int) -> Training:
        """What Lightning trains, `first_step` optimizer steps of it taken already."""

    def science(self) -> dict[str, Any]:
        """What the weights depend on besides seed, model, section, data and code."""
        return {}

    def families(self) -> list[str]:
        """Model families whose code runs."""
        return [self.config.model.family]

    @abstractmethod
    def flops_per_token(self) -> float:
        """FLOPs per token of one step, as executed."""

    def measures(self, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """More for `metrics.json`, from the weights after the last step."""
        return {}

    def files(self, weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """More files of the result, by name."""
        return {}

    def require_fit(self) -> None:
        """Raise `ConfigError` unless model, data and devices fit together."""
        section, execution = self.section, self.config.execution
        self.data.require_vocab(self.config.model.vocab_size)
        self.data.training_windows(section.context, section.batch_size)
        self.data.held_out_windows(section.context, section.validation_tokens)
        devices = execution.devices * execution.nodes
        require(
            section.batch_size % (devices * section.accumulate) == 0,
            f"{self.stage}.batch_size={section.batch_size} must be a multiple of execution.devices * execution.nodes * "
            f"{self.stage}.accumulate = {devices * section.accumulate}",
        )
        require(
            execution.accelerator != "gpu" or torch.cuda.is_available(),
            "execution.accelerator=gpu: torch finds no GPU here; use auto or cpu",
        )

    def identity(self) -> dict[str, str]:
        """The digests that say what is trained: `fingerprint`, and in it `data_digest` and `code_digest`."""
        config = self.config
        code = code_digest([f"pipelines.{self.stage}", *(FAMILIES[family] for family in self.families())])
        science = {
            "stage": self.stage,
            "seed": config.seed,
            "family": config.model.family,
            "model": asdict(config.model),
            self.stage: asdict(self.section),
            "precision": config.execution.resolved_precision,
            "data": self.data.digest,
            "code": code,
            **self.science(),
        }
        return {"fingerprint": fingerprint(science), "data_digest": self.data.digest, "code_digest": code}


def train_cell(training: CellTraining, role: Role = ALONE) -> dict[str, Any] | None:
    """Train unless the cell is finished, and export it; returns what `metrics.json` holds.

    Args:
        role: what the training is a part of, if it is one.
    Raises:
        ConfigError: when model, data and devices do not fit together.
        StageError: when another process trains the cell, the loss is not finite, the disk is full, or a checkpoint
            or a shard was altered. The last good checkpoint and earlier results stay.
        StoppedError: after SIGTERM or SIGINT, the state saved.
    """
    config = training.config
    training.require_fit()
    identity = training.identity()
    cell = Cell(config.execution.checkpoints, identity["fingerprint"])
    if any(int(os.environ.get(name, 0)) for name in RANKS):
        return _follow(training, cell)
    with cell.locked():
        if _to_train(config, cell):
            if cell.finished:
                cell.clear()
            _train(training, cell, identity, role)
        name = f"{config.model_name}-seed{config.seed}-{identity['fingerprint'][:8]}"
        output = Path(config.output or f"runs/{name}")
        metrics = export(cell.result(), output, config.model_name)
    print(_summary(training.stage, metrics, output))
    return metrics


def export(result: Path, output: Path, name: str) -> dict[str, Any]:
    """Copy a finished result to `output` under the model's name; `metrics.json` goes first and comes back last."""
    metrics = {"model": name} | json.loads((result / METRICS).read_text("utf-8"))
    (output / METRICS).unlink(missing_ok=True)
    for file in sorted(result.iterdir()):
        if file.name != METRICS:
            with atomic_path(output / file.name) as path:
                shutil.copyfile(file, path)
    write_json(output / METRICS, metrics)
    return metrics


def _to_train(config: PipelineConfig, cell: Cell) -> bool:
    return config.execution.rerun or not cell.finished


def _follow(training: CellTraining, cell: Cell) -> None:
    """Train beside the first process of several, which speaks for all."""
    from pipelines.training import StopSignal

    if _to_train(training.config, cell):
        try:
            with StopSignal().installed() as stop:
                _fit(training, cell, None, stop)
        except StageError as error:
            sys.exit(error.exit_code)


def _train(training: CellTraining, cell: Cell, identity: dict[str, str], role: Role) -> None:
    """Train from the newest checkpoint, or from the beginning, tell the ledger, and finish the cell."""
    from pipelines.ledger import open_run
    from pipelines.training import StopSignal

    config, data = training.config, training.data
    with StopSignal().installed() as stop:
        source = commit()
        tags = {
            "cell.fingerprint": identity["fingerprint"],
            "model": config.model_name,
            "family": config.model.family,
            "seed": str(config.seed),
            "commit": source.sha,
            "dirty": str(source.dirty).lower(),
            "data.digest": identity["data_digest"],
            "code.digest": identity["code_digest"],
            "host": socket.gethostname(),
            **role.tags,
        }
        run = open_run(
            config.tracking,
            cell.run_key(),
            name=role.name or f"{config.model_name}-seed{config.seed}-{identity['fingerprint'][:8]}",
            tags=tags,
            params=_params(training),
            data={"name": config.data.corpus, "digest": data.digest},
        )
        with run.running():
            run.artifact("config.json", asdict(config))
            recorder = _fit(training, cell, run, stop, role)
            source_of = {"run_id": run.run_id, "commit": source.sha, "dirty": source.dirty}
            metrics: dict[str, Any] = identity | source_of | _measures(training, recorder)

            def write(folder: Path) -> None:
                _write_result(folder, training, recorder, metrics)
                speeds = {name: metrics[name] for name in ("tokens_per_second", "peak_memory_bytes")}
                run.record([(training.section.steps, speeds)])
                run.artifact(METRICS, {"model": config.model_name} | metrics)
                run.finish()  # before the cell is: what is finished is never looked at again

            cell.finish(write)


def _fit(training: CellTraining, cell: Cell, run: Run | None, stop: StopSignal, role: Role = ALONE) -> Recorder:
    """Run the steps that are left."""
    from models.lightning.training import NonFiniteError
    from pipelines.training import MicroBatches, Recorder, Rhythm, fit, make_trainer

    config, data, section = training.config, training.data, training.section
    rhythm = Rhythm(**{field.name: getattr(section, field.name) for field in fields(Rhythm)})
    first, checkpoint = cell.latest() or (0, None)
    module = training.module(first)
    windows = data.held_out_windows(section.context, section.validation_tokens)
    share = section.batch_size // (config.execution.devices * config.execution.nodes * section.accumulate)
    recorder = Recorder(cell, run, rhythm, windows, share, stop, role.validated, training.stage)
    trainer = make_trainer(config.execution, section.accumulate, recorder)
    rank = {"rank": trainer.global_rank, "world_size": trainer.world_size}
    loader = BatchLoader(data, config.seed, section.batch_size, section.context, section.steps, first, **rank)
    try:
        fit(trainer, module, MicroBatches(loader, section.accumulate), checkpoint)
    except NonFiniteError as error:
        kept = cell.latest()
        state = f"the checkpoint of step {kept[0]:,} is kept in {cell.folder}" if kept else "there is no checkpoint yet"
        lower = f"a lower {training.stage}.lr may help"
        raise StageError(f"{error}: training stopped, {state}; {lower}") from None
    return recorder


def _measures(training: CellTraining, recorder: Recorder) -> dict[str, Any]:
    """What `metrics.json` says of the training itself."""
    config, section, last = training.config, training.section, recorder.history[-1]
    tokens = section.steps * section.batch_size * section.context
    return {
        "family": config.model.family,
        "seed": config.seed,
        "parameters": sum(weight.numel() for weight in _on_meta(config).parameters()),
        "context": section.context,
        "steps": section.steps,
        "tokens": tokens,
        "train_loss": last["train/loss"],
        "validation_loss": last["validation/loss"],
        "tokens_per_second": tokens / recorder.stepping,
        "training_flops_per_token": training.flops_per_token(),
        "peak_memory_bytes": recorder.peak_memory,
        "seconds": recorder.seconds,
        **training.measures(recorder.weights),
    }


def _write_result(folder: Path, training: CellTraining, recorder: Recorder, metrics: Mapping[str, Any]) -> None:
    section, model = training.section, _on_meta(training.config)
    model.load_state_dict(recorder.weights, assign=True)
    save_model(model, folder)
    training.data.tokenizer.save(folder)
    write_loss(folder / "loss.csv", recorder.history, section.batch_size * section.context)
    for name, text in training.files(recorder.weights).items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    write_json(folder / METRICS, metrics)


def _on_meta(config: PipelineConfig) -> Any:
    with torch.device("meta"):
        return build_model(config.model)


def write_loss(path: Path, history: Iterable[Mapping[str, float]], tokens_per_step: int) -> None:
    """One row per recorded step; a cell is empty where the step was not validated, or only validated."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["step", "tokens", *COLUMNS])
        for row in history:
            step = int(row["step"])
            table.writerow([step, step * tokens_per_step, *(row.get(name, "") for name in COLUMNS.values())])


def _params(training: CellTraining) -> dict[str, Any]:
    """Flat and stable: MLflow does not let them change."""
    config = training.config
    sections = {"model": config.model, training.stage: training.section, "data": config.data}
    flat = {f"{name}.{key}": value for name, section in sections.items() for key, value in asdict(section).items()}
    return {"model": config.model_name, "family": config.model.family, "seed": config.seed} | flat


def _summary(stage: str, metrics: Mapping[str, Any], output: Path) -> str:
    return (
        f"{stage}: {metrics['model']}, seed {metrics['seed']}, {metrics['parameters']:,} parameters, "
        f"{metrics['tokens']:,} tokens: loss {metrics['train_loss']:.3f}, held out {metrics['validation_loss']:.3f}; "
        f"{metrics['tokens_per_second']:,.0f} tokens/s, {metrics['seconds']:.0f} s -> {output}"
    )
