"""What every training does around its steps: record, validate, save, show progress, stop in good order.

Special here:
- a checkpoint holds no loop counters of Lightning: a resumed run is a new, shorter run over the remaining steps, whose
  batches depend on the step alone;
- metrics reach the ledger in batches, at validations and checkpoints, and are part of the checkpoint until then.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from models.lightning.training import Training
from pipelines.checkpoints import Cell, load_state, save_state
from pipelines.config import ExecutionConfig, StoppedError
from pipelines.data import BatchLoader
from pipelines.ledger import Run

for library in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(library).setLevel(logging.WARNING)


@dataclass(frozen=True)
class Rhythm:
    """After how many optimizer steps things happen; the last step records and validates in any case."""

    steps: int
    log_every: int
    validate_every: int
    checkpoint_every: int


class StopSignal:
    """SIGTERM and SIGINT as a request to stop after the current step; at once if no training is under way."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.deferred = False

    def __call__(self, number: int, _: Any) -> None:
        again, self.received = self.received is not None, number  # a library may swallow what is raised here
        if again or not self.deferred:
            self.check()

    def check(self) -> None:
        """Raise `StoppedError` after a signal."""
        if self.received is not None:
            raise StoppedError(f"stopped by {signal.Signals(self.received).name}", self.received)

    @contextmanager
    def installed(self) -> Iterator[StopSignal]:
        """Listen until the block ends."""
        previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        self.listen()
        try:
            yield self
        finally:
            for number, handler in previous.items():
                _on_signal(number, handler)

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            _on_signal(number, self)


class Recorder(lightning.Callback):
    """Keeps the history of a training, in memory, in its checkpoints and in the ledger.

    Args:
        cell: where checkpoints go.
        run: the ledger's run, on the first process; None on the others.
        rhythm: when to record, validate and save.
        windows: `[R, T + 1]` held-out tokens.
        batch_size: sequences per forward pass of a validation.
        stop: asked after every step.
        validated: told every step's held-out loss, once the ledger has it; may raise to end the training.
        stage: named beside the progress.
    """

    def __init__(
        self,
        cell: Cell,
        run: Run | None,
        rhythm: Rhythm,
        windows: Tensor,
        batch_size: int,
        stop: StopSignal,
        validated: Callable[[int, float], None],
        stage: str,
    ) -> None:
        self.cell, self.run, self.rhythm = cell, run, rhythm
        self.windows, self.batch_size, self.stop, self.validated = windows, batch_size, stop, validated
        self.history: list[dict[str, float]] = []  # one row per recorded step
        self.seconds = 0.0  # wall time, everything included, over all resumes
        self.stepping = 0.0  # of it, in training steps
        self.peak_memory = 0  # bytes, at most, since the last resume
        self.weights: dict[str, Tensor] = {}  # after the last step, on the first process
        self._progress = _progress(stage, disable=run is None)
        self._written = 0  # rows of the history that the ledger has

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": self.history,
            "seconds": self.seconds + time.monotonic() - self._started,
            "stepping": self.stepping,
            "random": torch.get_rng_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history, self.seconds = state_dict["history"], state_dict["seconds"]
        self.stepping = state_dict["stepping"]
        torch.set_rng_state(state_dict["random"].cpu())

    def on_save_checkpoint(self, trainer: lightning.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        del checkpoint["loops"]

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._started = self._step_started = time.monotonic()
        self.stop.deferred = True
        self.stop.listen()  # in place of Lightning's own handlers, which would not save
        self._progress.start()
        self._task = self._progress.add_task("", total=self.rhythm.steps, completed=pl_module.step)
        self._write_ledger()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        step, last = pl_module.step, pl_module.step == self.rhythm.steps
        self._progress.update(self._task, completed=step, description=f"loss {pl_module.last_loss():.3f}")
        self.stepping += time.monotonic() - self._step_started
        recorded, validated, saved = (
            last or step % every == 0
            for every in (self.rhythm.log_every, self.rhythm.validate_every, self.rhythm.checkpoint_every)
        )
        asked = recorded or trainer.world_size == 1  # several devices have to agree, which costs time
        stopped = asked and trainer.strategy.reduce_boolean_decision(self.stop.received is not None, all=False)
        if recorded or validated:
            self.history.append(self._row(pl_module, step, recorded, validated))
        if (saved or stopped) and not last:
            self._save(trainer, step)
        if validated or saved or stopped:
            self._write_ledger()
        if stopped and not last:
            name = signal.Signals(self.stop.received or signal.SIGTERM).name
            message = f"stopped by {name} after step {step:,}; run again to go on from there"
            raise StoppedError(message, self.stop.received or signal.SIGTERM)
        if validated and self.run is not None:
            self.validated(step, self.history[-1]["validation/loss"])
        self._step_started = time.monotonic()

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self.seconds += time.monotonic() - self._started
        self.peak_memory = peak_memory(pl_module.device)
        state = trainer.strategy.lightning_module_state_dict()
        self.weights = {name.removeprefix("model."): weight for name, weight in state.items()}

    def teardown(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        self.stop.deferred = False
        self._progress.stop()

    def _row(self, module: Training, step: int, recorded: bool, validated: bool) -> dict[str, float]:
        row: dict[str, float] = {"step": step}
        if recorded:
            scalars = {f"train/{name}": value for name, value in module.last_scalars().items()}
            row |= scalars | {"train/lr": module.learning_rate(step)}
        if validated:
            row["validation/loss"] = module.held_out_loss(self.windows, self.batch_size)
        return row

    def _save(self, trainer: lightning.Trainer, step: int) -> None:
        trainer.save_checkpoint(self.cell.checkpoint_path(step))
        if trainer.is_global_zero:
            self.cell.add(step)

    def _write_ledger(self) -> None:
        if self.run is not None:
            rows = self.history[self._written :]
            self.run.record((int(row["step"]), {k: v for k, v in row.items() if k != "step"}) for row in rows)
            self._written = len(self.history)


@dataclass(frozen=True)
class MicroBatches:
    """The batches of a loader, each in `parts` equal parts: what fits on a device at once."""

    loader: BatchLoader
    parts: int

    def __len__(self) -> int:
        return len(self.loader) * self.parts

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.loader:
            yield from batch.chunk(self.parts)


class PlainCheckpoints(CheckpointIO):
    """How Lightning reads and writes a checkpoint: atomically, and nothing but tensors and plain values."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        save_state(checkpoint, path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        return load_state(path, map_location)

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink()


def make_trainer(execution: ExecutionConfig, accumulate: int, callback: lightning.Callback) -> lightning.Trainer:
    """A Trainer that trains and nothing else: recording, validation and checkpoints belong to the callback."""
    plugins: list[Any] = [PlainCheckpoints()]
    if SLURMEnvironment.detect():
        plugins.append(SLURMEnvironment(auto_requeue=False))  # a requeued job resumes by running the same command
    return lightning.Trainer(
        accelerator=execution.accelerator,
        devices=execution.devices,
        num_nodes=execution.nodes,
        strategy=_strategy(execution, accumulate),
        precision=execution.resolved_precision,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=[callback],
        plugins=plugins,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )


def _strategy(execution: ExecutionConfig, accumulate: int) -> Any:
    """One device: no strategy. Several: weights copied, with gradients that may be missing (a memory that the text is
    too short for), or cut."""
    devices = execution.devices * execution.nodes
    if execution.strategy == "fsdp":
        return ModelParallelStrategy(devices, tensor_parallel_size=1, save_distributed_checkpoint=False)
    if execution.strategy == "ddp" or devices > 1:
        return DDPStrategy(static_graph=accumulate == 1, find_unused_parameters=accumulate > 1)
    return "auto"


def fit(trainer: lightning.Trainer, module: Training, batches: MicroBatches, checkpoint: Path | None) -> None:
    """Train on `batches`, from the state in `checkpoint` if there is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.` is deprecated")  # Lightning about torch
        trainer.fit(module, batches, ckpt_path=checkpoint, weights_only=True)


def peak_memory(device: torch.device) -> int:
    """Most bytes held so far: by tensors on a GPU, by this process on a CPU (0 where the system does not say)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    (peak,) = (line.split()[1] for line in status.read_text("utf-8").splitlines() if line.startswith("VmHWM:"))
    return int(peak) * 1024


def _progress(stage: str, disable: bool) -> Progress:
    return Progress(
        TextColumn(f"{stage}: step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        refresh_per_second=2,
        disable=disable,
    )


def _on_signal(number: int, handler: Callable[..., Any] | int | None) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, handler)
