"""What is seen while a sweep runs: every state a cell can be in, what runs where, and how long it will take."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from rich.live import Live

from pipelines.sweeping import display
from pipelines.sweeping.display import STATES, Display, duration, summary
from pipelines.sweeping.queue import Queue, Result
from pipelines.sweeping.storage import open_storage
from tests.pipelines import sweeps

DONE = Result({"ppl/window_mean/512": 1.0}, {}, seconds=100.0)


@pytest.fixture
def queue(tmp_path) -> Queue:
    """7 runs: one in every state, and a second one that waits."""
    queue = Queue.launch(
        open_storage(str(tmp_path / "queue.journal")), sweeps.plan({"layers": [1, 2, 3, 4, 5, 6, 7]}), 0
    )
    runs = [(f"layers={n}", 0) for n in range(1, 8)]
    queue.add(runs, {runs[0]: replace(DONE, seconds=0.0, cached=True)})
    done, failed, pruned, running = (queue.take() for _ in range(4))
    assert done
    assert failed
    assert pruned
    assert running
    queue.finish(done, DONE, 1.0)
    queue.fail(failed, "error", "the loss is NaN")
    queue.prune(pruned, "at step 8")
    queue.beat(running, 1, "step 40 of 128, loss 3.210")
    return queue


def shown(queue: Queue, terminal: bool, updates: int = 1) -> str:
    """Everything a display prints of a queue."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160, color_system=None)
    seen = Display(queue, workers=2)
    seen._live = Live(console=console, auto_refresh=False)
    with seen:
        for _ in range(updates):
            seen.update()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_state_is_counted_and_the_time_left_estimated(queue):
    line = summary(queue, list(queue.history().values()), workers=2)
    assert line == "2 queued, 1 running, 1 done, 1 cached, 1 pruned, 1 failed; about 2 min left"
    assert all(state in line for state in STATES)


def test_without_a_finished_run_there_is_no_guess(tmp_path):
    queue = Queue.launch(open_storage(str(tmp_path / "queue.journal")), sweeps.plan())
    queue.add([("layers=1", 0), ("layers=2", 0)], {})
    assert summary(queue, list(queue.history().values()), workers=1) == "2 queued"


def test_a_terminal_shows_what_runs_with_its_progress_and_its_own_time_left(queue, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: clock[0])
    seen = Display(queue, workers=2)
    history = list(queue.history().values())
    for clock[0] in (0.0, 30.0):
        block = seen._block("", history)
    console = Console(file=io.StringIO(), width=160, color_system=None)
    console.print(block)
    assert isinstance(console.file, io.StringIO)
    (row,) = [line for line in console.file.getvalue().splitlines() if "seed" in line]
    assert "layers=5 · seed 0" in row
    assert "step 40 of 128, loss 3.210" in row
    assert "30 s" in row
    assert "about 70 s left" in row
    assert "2 queued" in shown(queue, terminal=True)


def test_elsewhere_a_line_is_printed_when_the_counts_change(queue):
    text = shown(queue, terminal=False, updates=3)
    assert text.count("2 queued, 1 running") == 1


def test_durations_are_written_in_the_unit_that_fits():
    assert [duration(seconds) for seconds in (40, 720, 12_240)] == ["40 s", "12 min", "3.4 h"]
