"""The state of a sweep while it runs: counts, what is running, time left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelines.sweeping.queue import Attempt, Queue

STATES = ("queued", "running", "done", "cached", "pruned", "failed")
STYLES = {"running": "bold", "failed": "bold red", "done": "green"}


class Display:
    """A live block in a terminal; elsewhere one line whenever the counts change."""

    def __init__(self, queue: Queue, workers: int) -> None:
        self._queue, self._workers = queue, workers
        self._live = Live(refresh_per_second=2)
        self._said = ""
        self._seen: dict[int, float] = {}  # running trial -> when it was first seen

    def __enter__(self) -> Display:
        self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.update()
        self._live.stop()

    def update(self) -> None:
        history = list(self._queue.history().values())
        line = summary(self._queue, history, self._workers)
        if self._live.console.is_terminal:
            self._live.update(self._block(line, history))
        elif (counts := line.split(";")[0]) != self._said:
            self._live.console.print(line, soft_wrap=True, highlight=False)
            self._said = counts

    def _block(self, line: str, history: Sequence[Sequence[Attempt]]) -> Group:
        table = Table.grid(padding=(0, 2))
        for attempt in (attempts[-1] for attempts in history):
            if attempt.state.name == "RUNNING":
                since = time.monotonic() - self._seen.setdefault(attempt.number, time.monotonic())
                said = (attempt.lease or {}).get("progress") or "starting"
                host = (attempt.lease or {}).get("machine", "").split(" ")[0]
                expected = seconds_of(history, attempt.cell)
                left = "" if expected is None else f"about {duration(max(0.0, expected - since))} left"
                table.add_row(f"{attempt.cell} · seed {attempt.seed}", said, duration(since), left, Text(host, "dim"))
        closed = sum(attempts[-1].state.is_finished() for attempts in history)
        return Group(ProgressBar(total=len(history), completed=closed, width=60), Text(line), table)


def summary(queue: Queue, history: Sequence[Sequence[Attempt]], workers: int) -> str:
    """`3 queued, 2 running, 22 done; about 4 min left`."""
    counts = Counter(outcome.status for outcome in queue.outcomes())
    counts["cached"] = sum(result.cached for attempts in history if (result := attempts[-1].result))
    counts["done"] -= counts["cached"]
    said = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    left = (counts["queued"] + counts["running"] / 2) * (seconds_of(history) or 0) / workers
    return f"{said}; about {duration(left)} left" if left else said


def seconds_of(history: Sequence[Sequence[Attempt]], cell: str | None = None) -> float | None:
    """What a run takes: the mean over this cell's finished seeds, or over all cells'; None when nothing is known."""
    known = [(attempts[-1].cell, result) for attempts in history if (result := attempts[-1].result)]
    own = [result.seconds for name, result in known if name == cell and result.seconds]
    fresh = [result.seconds for _, result in known if not result.cached]
    took = own or fresh or [result.seconds for _, result in known if result.seconds]
    return sum(took) / len(took) if took else None


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3.4 h`."""
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )
