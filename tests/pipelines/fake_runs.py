"""Runs without training, for tests of the queue: they take a moment, write down what they did, and measure nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

from filelock import FileLock

from pipelines.config import StageError
from pipelines.files import write_text
from pipelines.ledger import open_run
from pipelines.sweeping.queue import Result
from pipelines.sweeping.worker import Job


def run(job: Job) -> Result:
    """Finished once, in the folder `results`; every start is a line in `starts.txt`.

    `seconds.txt` says how long a run takes; a cell named in `bad.txt` fails, unless it is empty.
    """
    folder = Path(job.local.execution.checkpoints)
    (folder / "results").mkdir(parents=True, exist_ok=True)
    with open(folder / "starts.txt", "a") as starts:
        starts.write(f"{os.getpid()} {job.task.label}\n")
    if job.task.cell.name in _read(folder / "bad.txt").splitlines():
        raise StageError("the loss is NaN at step 3")
    seed = job.task.seed
    key = job.task.key
    with FileLock(folder / f"{key}.lock"):
        if job.local.tracking.uri != "none":
            _ledger(job)
        if not (folder / "results" / key).exists():
            time.sleep(float(_read(folder / "seconds.txt") or 0.05))
            write_text(folder / "results" / key, job.task.label)
    config = job.plan.config(job.task.cell, seed)
    layers = getattr(config.model, "layers", 1)
    effect = (layers - 1) * (1 + 0.25 * (0, -1, 1)[seed % 3])  # at 3 seeds: open, where little of alpha is spent
    measured = {
        "ppl/window_mean/512": 10 + seed + effect,
        "validation_loss": abs(config.pretrain.lr - 2),
        "cost": -float(layers),
    }
    source = {"run_id": key[:32], "commit": "c" * 40, "data_digest": "d" * 64, "family": "transformer", "code": "e"}
    return Result(measured, source, [[1, 64, 2.0]], 60.0)


def _ledger(job: Job) -> None:
    run = open_run(job.local.tracking, job.task.key, job.task.label, {}, {}, {"name": "toy", "digest": "d" * 64})
    with run.running():
        run.finish()


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""
