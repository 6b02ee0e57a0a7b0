"""A signal ends a worker even where a library swallows the exception it raises."""

from __future__ import annotations

import os
import signal

import pytest

from pipelines.config import StoppedError
from pipelines.sweeping import worker as working
from pipelines.sweeping.queue import Queue, Result
from pipelines.sweeping.storage import open_storage
from pipelines.sweeping.worker import Job, Settings, work
from pipelines.training import StopSignal
from tests.pipelines import sweeps


def swallow(job: Job) -> Result:
    """A run in which something is told to stop and does not care."""
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except Exception:
        return Result({"ppl/window_mean/512": 1.0}, {}, [])
    raise AssertionError("no signal arrived")


def test_a_worker_stops_after_the_run_that_swallowed_its_signal(tmp_path, monkeypatch):
    monkeypatch.setattr(working, "_require_same_code", lambda plan, task: None)
    where, plan = str(tmp_path / "queue.journal"), sweeps.plan()
    queue = Queue.launch(open_storage(where), plan)
    queue.add([("layers=1", seed) for seed in range(3)], {})
    settings = Settings(where, plan.study, sweeps.local(tmp_path), runner=f"{__name__}:swallow", stay=True)
    with StopSignal().installed() as stop, pytest.raises(StoppedError, match="stopped by SIGTERM"):
        work(settings, stop)
    assert [outcome.status for outcome in queue.outcomes()].count("done") == 1
    assert queue.open() == 2


def test_a_training_remembers_a_signal_that_came_before_its_first_step():
    with StopSignal().installed() as stop:
        with pytest.raises(StoppedError):
            os.kill(os.getpid(), signal.SIGTERM)
        stop.deferred = True
        assert stop.received == signal.SIGTERM
