"""Whole sweeps for tests: in this process, or as `python -m pipelines.sweep` in one with the libraries loaded."""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from pathlib import Path

import pytest

from pipelines.sweeping.plan import Plan
from tests.pipelines import sweeps
from tests.pipelines.trainings import PROCESSES


def finish(folder: Path, plan: Plan) -> None:
    """Launch a sweep in `folder`, which has a ledger; its runs are made up, and this process is the worker."""
    from pipelines.sweeping import launch, worker
    from pipelines.sweeping.options import Options

    (folder / "seconds.txt").write_text("0")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(launch, "check", lambda plan, local: None)
        patch.setattr(worker, "_require_same_code", lambda plan, task: None)
        local, options = sweeps.local(folder, f"sqlite:///{folder}/mlflow.db"), Options()
        runner = "tests.pipelines.fake_runs:run"
        settings = worker.Settings(options.where(plan.name), plan.study, local, runner=runner, stay=True)
        launch.launch(plan, local, options, jobs=lambda: worker.work(settings))


def command(folder: Path, *arguments: str, runner: str | None = None) -> tuple[int, str, str]:
    """Run it in `folder`; returns the exit code and what it printed, on standard output and as errors.

    Args:
        runner: what runs a cell, as `module:function`, in the same process; the sweeps are those in `folder`/sweeps.
    """
    process = PROCESSES.Process(target=_command, args=(folder, arguments, runner))
    process.start()
    process.join(200)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode, (folder / "out.txt").read_text(), (folder / "err.txt").read_text()


def _command(folder: Path, arguments: tuple[str, ...], runner: str | None) -> None:
    os.chdir(folder)
    for descriptor, name in ((1, "out.txt"), (2, "err.txt")):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), descriptor)
    sys.argv = ["pipelines.sweep", *arguments]
    from pipelines import sweep

    if runner is not None:
        _without_training(folder, runner)
    code = sweep.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _without_training(folder: Path, runner: str) -> None:
    from pipelines import sweep
    from pipelines.sweeping import launch, start, worker

    sweep.SWEEPS = start.SWEEPS = folder / "sweeps"
    launch.check = lambda plan, local: None
    worker._require_same_code = lambda plan, task: None
    importlib.import_module(runner.partition(":")[0])
    original = launch.Launch

    class Here(original):
        """Its worker is this process."""

        def run(self) -> None:
            settings = worker.Settings(**vars(self.settings) | {"runner": runner, "stay": True})
            self.jobs = partial(worker.work, settings)
            super().run()

    launch.Launch = Here
