"""Stage `pretrain`: train one model on the token data and export it.

    python -m pipelines.pretrain model=mela_tiny model.h_cycles=2 seed=1 output=artifacts/mela_tiny

Writes, in `output`, `model.safetensors` and `config.json` (the model), the tokenizer's file, `loss.csv` and, last,
`metrics.json`. Killed at any moment and started again, it goes on from its last checkpoint to the same weights, bit for
bit on a CPU, in the same run of the ledger. A finished cell is copied to `output`, not trained again.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from models import build_model, save_model
from models.configuration import require
from models.presets import FAMILIES
from pipelines.checkpoints import Cell
from pipelines.config import PipelineConfig, StageError
from pipelines.data import BatchLoader, TokenData
from pipelines.files import atomic_path, write_json
from pipelines.identity import code_digest, commit, fingerprint
from pipelines.role import ALONE, Role

if TYPE_CHECKING:
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


def run(config: PipelineConfig, role: Role = ALONE) -> dict[str, Any] | None:
    """Train the model `config.model` unless its cell is finished, and export it; returns what `metrics.json` holds.

    Args:
        role: what the training is a part of, if it is one.
    Raises:
        ConfigError: when model, data and devices do not fit together.
        StageError: when another process trains the cell, the loss is not finite, the disk is full, or a checkpoint
            or a shard was altered. The last good checkpoint and earlier results stay.
        StoppedError: after SIGTERM or SIGINT, the state saved.
    """
    torch.set_num_threads(config.execution.threads)
    data = TokenData.open(config.data.directory)
    require_fit(config, data)
    identity = cell_identity(config, data)
    cell = Cell(config.execution.checkpoints, identity["fingerprint"])
    if any(int(os.environ.get(name, 0)) for name in RANKS):
        return _follow(config, data, cell)
    with cell.locked():
        if _to_train(config, cell):
            if cell.finished:
                cell.clear()
            _train(config, data, cell, identity, role)
        name = f"{config.model_name}-seed{config.seed}-{identity['fingerprint'][:8]}"
        output = Path(config.output or f"runs/{name}")
        metrics = export(cell.result(), output, config.model_name)
    print(_summary(metrics, output))
    return metrics


def require_fit(config: PipelineConfig, data: TokenData) -> None:
    """Raise `ConfigError` unless the model, the data and the devices fit together."""
    pretrain, execution = config.pretrain, config.execution
    data.require_vocab(config.model.vocab_size)
    data.training_windows(pretrain.context, pretrain.batch_size)
    data.held_out_windows(pretrain.context, pretrain.validation_tokens)
    devices = execution.devices * execution.nodes
    require(
        pretrain.batch_size % (devices * pretrain.accumulate) == 0,
        f"pretrain.batch_size={pretrain.batch_size} must be a multiple of execution.devices * execution.nodes * "
        f"pretrain.accumulate = {devices * pretrain.accumulate}",
    )
    require(
        execution.accelerator != "gpu" or torch.cuda.is_available(),
        "execution.accelerator=gpu: torch finds no GPU here; use auto or cpu",
    )
    require(
        (execution.strategy, pretrain.optimizer) != ("fsdp", "muon"),
        "execution.strategy=fsdp cuts the matrices that pretrain.optimizer=muon needs whole; use adamw or ddp",
    )


def cell_identity(config: PipelineConfig, data: TokenData) -> dict[str, str]:
    """The digests that say what is trained: `fingerprint`, and in it `data_digest` and `code_digest`."""
    code = code_digest([__spec__.name if __name__ == "__main__" else __name__, FAMILIES[config.model.family]])
    science = {
        "stage": "pretrain",
        "seed": config.seed,
        "family": config.model.family,
        "model": asdict(config.model),
        "pretrain": asdict(config.pretrain),
        "data": data.digest,
        "code": code,
    }
    return {"fingerprint": fingerprint(science), "data_digest": data.digest, "code_digest": code}


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


def _follow(config: PipelineConfig, data: TokenData, cell: Cell) -> None:
    """Train beside the first process of several, which speaks for all."""
    from pipelines.training import StopSignal

    if _to_train(config, cell):
        try:
            with StopSignal().installed() as stop:
                _fit(config, data, cell, None, stop)
        except StageError as error:
            sys.exit(error.exit_code)


def _train(config: PipelineConfig, data: TokenData, cell: Cell, identity: dict[str, str], role: Role) -> None:
    """Train from the newest checkpoint, or from the beginning, tell the ledger, and finish the cell."""
    from pipelines.ledger import open_run
    from pipelines.training import StopSignal

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
            name=role.name or f"{config.model_name}-seed{config.seed}",
            tags=tags,
            params=_params(config),
            data={"name": config.data.corpus, "digest": data.digest},
        )
        with run.running():
            run.artifact("config.json", asdict(config))
            recorder = _fit(config, data, cell, run, stop, role)
            source_of = {"run_id": run.run_id, "commit": source.sha, "dirty": source.dirty}
            metrics: dict[str, Any] = identity | source_of | _measures(config, recorder)

            def write(folder: Path) -> None:
                _write_result(folder, config, data, recorder, metrics)
                run.record([(config.pretrain.steps, {"tokens_per_second": metrics["tokens_per_second"]})])
                run.artifact(METRICS, {"model": config.model_name} | metrics)
                run.finish()  # before the cell is: what is finished is never looked at again

            cell.finish(write)


def _fit(
    config: PipelineConfig, data: TokenData, cell: Cell, run: Run | None, stop: StopSignal, role: Role = ALONE
) -> Recorder:
    """Run the steps that are left."""
    from models.lightning.pretraining import Pretraining, Recipe
    from models.lightning.training import NonFiniteError
    from pipelines.training import MicroBatches, Recorder, Rhythm, fit, make_trainer

    pretrain = config.pretrain
    recipe = Recipe(**{field.name: getattr(pretrain, field.name) for field in fields(Recipe)})
    rhythm = Rhythm(**{field.name: getattr(pretrain, field.name) for field in fields(Rhythm)})
    first, checkpoint = cell.latest() or (0, None)
    module = Pretraining(build_model(config.model, config.seed), recipe, first, config.execution.compile)
    windows = data.held_out_windows(pretrain.context, pretrain.validation_tokens)
    share = pretrain.batch_size // (config.execution.devices * config.execution.nodes * pretrain.accumulate)
    recorder = Recorder(cell, run, rhythm, windows, share, stop, role.validated)
    trainer = make_trainer(config.execution, pretrain.accumulate, recorder)
    rank = {"rank": trainer.global_rank, "world_size": trainer.world_size}
    loader = BatchLoader(data, config.seed, pretrain.batch_size, pretrain.context, pretrain.steps, first, **rank)
    try:
        fit(trainer, module, MicroBatches(loader, pretrain.accumulate), checkpoint)
    except NonFiniteError as error:
        kept = cell.latest()
        state = f"the checkpoint of step {kept[0]:,} is kept in {cell.folder}" if kept else "there is no checkpoint yet"
        raise StageError(f"{error}: training stopped, {state}; a lower pretrain.lr may help") from None
    return recorder


def _measures(config: PipelineConfig, recorder: Recorder) -> dict[str, Any]:
    """What `metrics.json` says of the training itself."""
    pretrain, last = config.pretrain, recorder.history[-1]
    with torch.device("meta"):
        model = build_model(config.model)
    tokens = pretrain.steps * pretrain.batch_size * pretrain.context
    return {
        "family": config.model.family,
        "seed": config.seed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": pretrain.steps,
        "tokens": tokens,
        "train_loss": last["train/loss"],
        "validation_loss": last["validation/loss"],
        "tokens_per_second": tokens / recorder.stepping,
        "training_flops_per_token": model.cost(pretrain.context).total_training_flops,
        "seconds": recorder.seconds,
    }


def _write_result(
    folder: Path, config: PipelineConfig, data: TokenData, recorder: Recorder, metrics: Mapping[str, Any]
) -> None:
    with torch.device("meta"):
        model = build_model(config.model)
    model.load_state_dict(recorder.weights, assign=True)
    save_model(model, folder)
    data.tokenizer.save(folder)
    write_loss(folder / "loss.csv", recorder.history, config.pretrain.batch_size * config.pretrain.context)
    write_json(folder / METRICS, metrics)


def write_loss(path: Path, history: Iterable[Mapping[str, float]], tokens_per_step: int) -> None:
    """One row per recorded step; a cell is empty where the step was not validated, or only validated."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["step", "tokens", *COLUMNS])
        for row in history:
            step = int(row["step"])
            table.writerow([step, step * tokens_per_step, *(row.get(name, "") for name in COLUMNS.values())])


def _params(config: PipelineConfig) -> dict[str, Any]:
    """Flat and stable: MLflow does not let them change."""
    sections = {"model": asdict(config.model), "pretrain": asdict(config.pretrain), "data": asdict(config.data)}
    flat = {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
    return {"model": config.model_name, "family": config.model.family, "seed": config.seed} | flat


def _summary(metrics: Mapping[str, Any], output: Path) -> str:
    return (
        f"pretrain: {metrics['model']}, seed {metrics['seed']}, {metrics['parameters']:,} parameters, "
        f"{metrics['tokens']:,} tokens: loss {metrics['train_loss']:.3f}, held out {metrics['validation_loss']:.3f}; "
        f"{metrics['tokens_per_second']:,.0f} tokens/s, {metrics['seconds']:.0f} s -> {output}"
    )


if __name__ == "__main__":
    from pipelines.command import main

    main(run)
