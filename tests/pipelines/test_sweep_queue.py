"""The queue: every run finished exactly once, by any number of processes, whatever kills them."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from models.configuration import ConfigError
from pipelines.config import StageError
from pipelines.sweeping.crew import Crew
from pipelines.sweeping.queue import LIVES, Attempt, Queue, Result, latest_study
from pipelines.sweeping.storage import open_storage
from pipelines.sweeping.worker import Settings, work
from tests.pipelines import sweeps
from tests.pipelines.trainings import query

DONE = Result({"ppl/window_mean/512": 1.0}, {})


@pytest.fixture(params=["journal", "sqlite"])
def where(request, tmp_path) -> str:
    return str(tmp_path / "queue.journal") if request.param == "journal" else f"sqlite:///{tmp_path}/queue.db"


def launched(where: str, retries: int = 1, seeds: int = 3, **changes) -> Queue:
    plan = sweeps.plan(**changes)
    queue = Queue.launch(open_storage(where), plan, retries)
    queue.add([(task.cell.name, task.seed) for task in plan.tasks(range(seeds))], {})
    return queue


def settings(where: str, queue: Queue, folder: Path, **changes) -> Settings:
    told: dict[str, Any] = {
        "storage": where,
        "study": queue.name,
        "runner": "tests.pipelines.fake_runs:run",
        "local": sweeps.local(folder),
        "retries": queue.retries,
    }
    return Settings(**told | changes)


def take(queue: Queue) -> Attempt:
    attempt = queue.take()
    assert attempt is not None
    return attempt


def statuses(queue: Queue) -> Counter:
    return Counter(outcome.status for outcome in queue.outcomes())


def test_a_second_launch_adds_nothing_and_more_seeds_add_what_is_missing(where):
    queue = launched(where)
    launched(where)
    assert statuses(queue) == {"queued": 6}
    launched(where, seeds=5)
    assert statuses(queue) == {"queued": 10}


def test_launches_at_the_same_moment_make_one_queue(where):
    first = Queue.launch(open_storage(where), sweeps.plan())
    second = Queue.launch(open_storage(where), sweeps.plan())
    nothing = first.history()
    second.history = lambda: nothing  # it looked before the first one wrote
    for queue in (first, second):
        queue.add([("layers=1", 0), ("layers=2", 0)], {})
    del second.history
    taken = [queue.take() for queue in (first, second, first, second)]
    assert sorted(attempt.cell for attempt in taken if attempt) == ["layers=1", "layers=2"]
    for attempt in filter(None, taken):
        first.finish(attempt, DONE, 1.0)
    assert statuses(first) == {"done": 2}
    assert not second.open()


def test_what_is_finished_elsewhere_is_not_queued(where):
    plan = sweeps.plan()
    queue = Queue.launch(open_storage(where), plan)
    queue.add([("layers=1", 0), ("layers=2", 0)], {("layers=1", 0): DONE})
    assert statuses(queue) == {"done": 1, "queued": 1}


def test_a_failure_is_tried_again_then_stays_until_the_next_launch(where):
    queue = launched(where, retries=1, seeds=1, factors={"layers": [1]})
    for expected in ("queued", "failed"):
        attempt = take(queue)
        queue.fail(attempt, "error", "the loss is NaN")
        queue.tend()
        assert statuses(queue) == {expected: 1}
    assert queue.outcomes()[0].reason == "the loss is NaN"
    assert launched(where, retries=1, seeds=1, factors={"layers": [1]}).open() == 1


def test_a_mistake_is_not_tried_again(where):
    queue = launched(where, retries=3, seeds=1, factors={"layers": [1]})
    queue.fail(take(queue), "refused", "width=3 must be even")
    queue.tend()
    assert not queue.open()


def test_a_dead_process_loses_its_run_and_cannot_finish_it_later(where, monkeypatch):
    queue = launched(where, seeds=1, factors={"layers": [1]})
    lost = take(queue)
    queue.tend()
    assert statuses(queue) == {"running": 1}, "this process lives"
    monkeypatch.setattr("pipelines.sweeping.lease._alive", lambda pid, started: False)
    queue.tend()
    again = take(queue)
    assert (again.cell, again.attempt) == (lost.cell, 1)
    queue.finish(lost, Result({"ppl/window_mean/512": 9.0}, {}), 9.0)
    assert not queue.beat(lost, 1)
    queue.finish(again, DONE, 1.0)
    assert [outcome.values["ppl/window_mean/512"] for outcome in queue.outcomes()] == [1.0]


def test_a_process_elsewhere_is_dead_when_its_beat_stands_still(where, monkeypatch):
    queue = launched(where, seeds=1, factors={"layers": [1]})
    attempt = take(queue)
    monkeypatch.setattr("pipelines.sweeping.lease.machine", lambda: "elsewhere")
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    queue.tend()
    for beat in range(1, 4):
        clock[0] += 50
        monkeypatch.setattr("pipelines.sweeping.lease.machine", lambda: "there")
        assert queue.beat(attempt, beat)
        monkeypatch.setattr("pipelines.sweeping.lease.machine", lambda: "here")
        queue.tend()
    assert statuses(queue) == {"running": 1}
    clock[0] += 61
    queue.tend()
    assert statuses(queue) == {"queued": 1}


def test_a_run_that_kills_its_process_every_time_fails_in_the_end(where, monkeypatch):
    queue = launched(where, seeds=1, factors={"layers": [1]})
    monkeypatch.setattr("pipelines.sweeping.lease._alive", lambda pid, started: False)
    for _ in range(LIVES):
        assert queue.take()
        queue.tend()
    assert queue.take() is None
    assert "out of memory" in queue.outcomes()[0].reason


def test_a_changed_sweep_is_another_queue(where):
    one, other = launched(where), launched(where, title="Layers, again")
    assert one.name != other.name
    assert latest_study(one.storage, "layers") == other.name
    launched(where)
    assert latest_study(one.storage, "layers") == one.name, "it was launched last"
    while attempt := one.take():
        one.finish(attempt, DONE, 1.0)
    assert latest_study(one.storage, "layers") == other.name, "it has open runs"
    assert launched(where).plan == sweeps.plan()
    with pytest.raises(ConfigError, match="'gating' was not launched"):
        latest_study(one.storage, "gating")


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    where = str(tmp_path / "queue.journal")
    queue = launched(where)
    with open(where, "ab") as journal:
        journal.write(b'{"op_code": 4, "worker')
    assert queue.take()
    assert Queue(open_storage(where), queue.name).open() == 6


@pytest.mark.parametrize("where", ["{folder}", "sqlite:///{folder}/missing/queue.db", "nonsense://u:secret@h/db"])
def test_a_storage_that_cannot_be_used_is_one_line_without_the_password(tmp_path, where):
    with pytest.raises((StageError, ConfigError), match=r"^storage=") as failed:
        open_storage(where.format(folder=tmp_path))
    assert "secret" not in str(failed.value)
    assert "\n" not in str(failed.value)


def test_a_worker_does_everything_and_one_bad_cell_does_not_stop_it(tmp_path):
    where = str(tmp_path / "queue.journal")
    queue = launched(where, retries=0, factors={"layers": [1, 2, 3]})
    (tmp_path / "bad.txt").write_text("layers=2")
    (tmp_path / "seconds.txt").write_text("0")
    work(settings(where, queue, tmp_path, stay=True))
    assert statuses(queue) == {"done": 6, "failed": 3}
    assert {o.reason for o in queue.outcomes() if o.status == "failed"} == {"the loss is NaN at step 3"}
    (tmp_path / "bad.txt").write_text("")
    (tmp_path / "starts.txt").unlink()
    queue = launched(where, retries=0, factors={"layers": [1, 2, 3]})
    work(settings(where, queue, tmp_path, stay=True))
    assert statuses(queue) == {"done": 9}
    assert [line.split(" ", 1)[1] for line in (tmp_path / "starts.txt").read_text().splitlines()] == [
        f"layers=2 · seed {seed}" for seed in range(3)
    ]


def test_a_worker_stops_when_the_code_is_no_longer_what_was_launched(tmp_path, monkeypatch):
    where = str(tmp_path / "queue.journal")
    queue = launched(where)
    monkeypatch.setattr("pipelines.sweeping.worker.code_digest", lambda modules: "another")
    with pytest.raises(StageError, match="the code of transformer changed since"):
        work(settings(where, queue, tmp_path, stay=True))
    assert queue.open() == 6
    assert not (tmp_path / "starts.txt").exists()


@pytest.mark.slow
def test_workers_killed_at_random_finish_every_run_once(tmp_path, ledger_file):
    """4 processes, 40 runs, SIGKILL every so often, also while the ledger and the journal are being written."""
    where = str(tmp_path / "queue.journal")
    queue = launched(where, seeds=10, factors={"layers": [1, 2, 3, 4]})
    (tmp_path / "seconds.txt").write_text("0.3")
    told = settings(where, queue, tmp_path, local=sweeps.local(tmp_path, f"sqlite:///{ledger_file}"))
    crew, draw, killed = Crew(told, 4, tmp_path / "logs"), random.Random(0), 0
    with crew.working():
        deadline = time.monotonic() + 300
        while queue.open() and time.monotonic() < deadline:
            time.sleep(draw.uniform(0.5, 1.5))
            busy = "running" in statuses(queue)
            if killed < 12 and busy:
                draw.choice(crew.processes).kill()
                killed += 1
            crew.tend()
        while crew.tend():
            time.sleep(0.1)
    assert killed >= 8
    assert statuses(queue) == {"done": 40}
    complete = [t for t in queue.study.get_trials() if t.state == TrialState.COMPLETE]
    assert len(complete) == 40
    assert not [t for t in queue.study.get_trials() if t.state in (TrialState.RUNNING, TrialState.WAITING)]
    keys = query(tmp_path, "select value, count(*) from tags where key = 'run.key' group by value")
    assert len(keys) == 40
    assert {count for _, count in keys} == {1}
    assert query(tmp_path, "select count(*) from runs where status <> 'FINISHED'") == [(0,)]
