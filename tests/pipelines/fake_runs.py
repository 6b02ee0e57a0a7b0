"""Runs without training, for tests of the queue: they take a moment, write down what they did, and measure nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from filelock import FileLock

from models.configuration import ConfigError
from pipelines.cells import flatten
from pipelines.config import PipelineConfig, StageError
from pipelines.files import write_text
from pipelines.ledger import open_run
from pipelines.sweeping.ledger import mark_finished
from pipelines.sweeping.queue import Result
from pipelines.sweeping.run_cell import local_of, tags
from pipelines.sweeping.worker import Job


def run(job: Job) -> Result:
    """Finished once, in the folder `results`; every start is a line in `starts.txt`.

    `seconds.txt` says how long a run takes; a cell named in `bad.txt` fails, in the way that is said after a colon.
    """
    folder = Path(job.local.execution.checkpoints)
    (folder / "results").mkdir(parents=True, exist_ok=True)
    with open(folder / "starts.txt", "a") as starts:
        starts.write(f"{os.getpid()} {job.task.label}\n")
    for line in _read(folder / "bad.txt").splitlines():
        cell, _, how = line.partition(": ")
        if cell == job.task.cell.name:
            _fail(how)
    seed, key = job.task.seed, job.task.key
    config = job.plan.config(job.task.cell, seed)
    layers = getattr(config.model, "layers", 1)
    effect = (layers - 1) * (1 + 0.25 * (0, -1, 1)[seed % 3])  # at 3 seeds: open, where little of alpha is spent
    measured = {
        "ppl/window_mean/512": 10 + seed + effect,
        "validation_loss": abs(config.pretrain.lr - 2),
        "training_flops_per_token": -float(layers),
    }
    source = {
        "commit": "c" * 40,
        "data_digest": "d" * 64,
        "family": "transformer",
        "code": job.plan.code["transformer"],
    }
    with FileLock(folder / f"{key}.lock"):
        tracked = job.local.tracking.uri != "none"
        run_id = _ledger(job, config, source, measured) if tracked else key[:32]
        if not (folder / "results" / key).exists():
            time.sleep(float(_read(folder / "seconds.txt") or 0.05))
            write_text(folder / "results" / key, job.task.label)
    return Result(measured, {"run_id": run_id} | source, [[1, 64, 2.0]], 60.0)


def _fail(how: str) -> NoReturn:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise {
        "": StageError("the loss is NaN at step 3"),
        "exception": ValueError("shapes do not fit"),
        "memory": MemoryError("8 GiB cannot be allocated"),
        "mistake": ConfigError("width=3 must be even"),
        "interrupted": KeyboardInterrupt(),
    }[how]


def _ledger(job: Job, config: PipelineConfig, source: Mapping[str, str], measured: Mapping[str, float]) -> str:
    """The run that a training and its evaluation would leave."""
    task, tracking = job.task, local_of(job.plan, job.task, job.local).tracking
    named = {"model": config.model_name, "family": source["family"], "seed": str(task.seed)}
    told = {"commit": source["commit"], "data.digest": source["data_digest"]} | tags(job.plan, task, job.parent)
    params = flatten({"model": asdict(config.model), "pretrain": asdict(config.pretrain)})
    name, data = f"{task.cell.name} seed {task.seed}", {"name": "toy", "digest": source["data_digest"]}
    run = open_run(tracking, task.key, name, named | told, named | params, data)
    with run.running():
        run.record([(step, {"validation/loss": 3.0 / step}) for step in (1, 2)])
        run.finish()
    mark_finished(tracking, run.run_id, measured)
    return run.run_id


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""
