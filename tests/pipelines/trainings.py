"""Runs of the stages `pretrain` and `distill` in processes of their own, which can be killed at a chosen moment.

A server process imports Lightning once; every run is forked from it, as clean as a new one and at once there.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models import preset
from pipelines.config import PipelineConfig, TrackingConfig
from tests.pipelines.settings import settings

PROCESSES = multiprocessing.get_context("forkserver")
PRELOADED = [
    "pipelines.pretrain",
    "pipelines.distill",
    "pipelines.training",
    "pipelines.ledger",
    "pipelines.sweep",
    "pipelines.sweeping.launch",
    "mlflow.store.tracking.sqlalchemy_store",
]
PROCESSES.set_forkserver_preload([*PRELOADED, __name__])
TINY = {"vocab_size": 257, "width": 16, "layers": 1, "heads": 2, "hidden": 32}
PRETRAIN = {
    "context": 16,
    "batch_size": 4,
    "tokens": 24 * 64,
    "log_every": 1,
    "validate_every": 6,
    "validation_tokens": 256,
    "checkpoint_every": 4,
}


def tiny(token_folder: Path, model: dict[str, Any] | None = None, **changes: Any) -> PipelineConfig:
    """24 steps of a very small Transformer++; `changes` as `settings` takes them."""
    sections: dict[str, Any] = {
        "pretrain": PRETRAIN,
        "data": {"directory": str(token_folder)},
        "execution": {"threads": 1, "accelerator": "cpu"},
        "output": "out",
        "model": preset("transformer_pp_tiny", **TINY | (model or {})),
        "model_name": "transformer_pp_tiny",
    }
    for name, value in changes.items():
        sections[name] = sections.get(name, {}) | value if isinstance(value, dict) else value
    return settings(**sections)


@dataclass(frozen=True)
class Fault:
    """The process is killed (SIGKILL) at the `call`-th call of a function of the pipeline, before or after its work."""

    function: str  # "module:name" or "module:Class.name"
    call: int = 1
    after: bool = False


Trouble = Fault | Callable[[], Any] | None  # a function is called in the process before the stage begins


def train(
    config: PipelineConfig, folder: Path, fault: Trouble = None, timeout: float = 120, stage: str = "pretrain"
) -> tuple[int, str]:
    """Run the stage in `folder`; returns the exit code (-9 when killed) and what it printed."""
    process = start(config, folder, fault, stage)
    process.join(timeout)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode, (folder / "log.txt").read_text()


def start(config: PipelineConfig, folder: Path, fault: Trouble = None, stage: str = "pretrain") -> Any:
    """Begin the stage in `folder`; returns the process."""
    process = PROCESSES.Process(target=_run, args=(config, folder, fault, stage), daemon=True)
    process.start()
    return process


def make_ledger(file: Path) -> None:
    """A ledger without runs, made by a process that has the libraries loaded already."""
    process = PROCESSES.Process(target=_make_ledger, args=(file,))
    process.start()
    process.join()
    assert process.exitcode == 0


def _make_ledger(file: Path) -> None:
    from pipelines.ledger import find_run

    find_run(TrackingConfig(uri=f"sqlite:///{file}", experiment="unused"), "none")


def _run(config: PipelineConfig, folder: Path, fault: Trouble, stage: str) -> None:
    from pipelines.command import guarded

    os.chdir(folder)
    with open("log.txt", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    if isinstance(fault, Fault):
        _inject(fault)
    elif fault is not None:
        fault()
    code = guarded(lambda: importlib.import_module(f"pipelines.{stage}").run(config))
    sys.stdout.flush()
    os._exit(code)


def _inject(fault: Fault) -> None:
    module, _, path = fault.function.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), 0

    def patched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fault.call and not fault.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls == fault.call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, patched)


def weights(folder: Path) -> bytes:
    return (folder / "out" / "model.safetensors").read_bytes()


def metrics(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "metrics.json").read_text())


def query(folder: Path, sql: str) -> list[tuple]:
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as database:
        return database.execute(sql).fetchall()


def steps_logged(folder: Path, key: str) -> list[int]:
    """The steps the ledger has of a metric, with repetitions, over all runs."""
    return [step for (step,) in query(folder, f"select step from metrics where key = '{key}' order by step")]
