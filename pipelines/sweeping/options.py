"""How a sweep is run, as the command line states it; none of it changes a number."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from models.configuration import Config, require


@dataclass(frozen=True)
class Options(Config):
    dry_run: bool = False  # print every cell with its costs, run nothing
    workers: int = 1  # processes, which share execution.threads; with another launcher, its jobs
    worker: bool = False  # be one more worker of the last launch, of those with open runs if any has
    study: str | None = None  # worker: of this launch instead, as the launch printed it
    storage: str | None = None  # the queue: a journal file or a database URL; null: runs/sweeps/<sweep>.journal
    retries: int = 1  # attempts after the first
    allocate: bool = False  # after the table: more seeds where the verdict is open
    budget_hours: float | None = None  # allocate: of computing, over all workers

    def validate(self) -> None:
        require(self.workers >= 1, f"workers={self.workers} must be at least 1")
        require(self.retries >= 0, f"retries={self.retries} must be at least 0")
        require(
            self.allocate == (self.budget_hours is not None),
            "allocate and budget_hours belong together: allocate=true budget_hours=2",
        )

    def where(self, sweep: str) -> str:
        """The storage of a sweep's queue."""
        return self.storage or f"runs/sweeps/{sweep}.journal"


STATED: dict[str, Any] = asdict(Options())
