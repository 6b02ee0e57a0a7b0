"""What the cells of a sweep measured: one outcome per cell and seed, seen as `[cells, seeds]` arrays.

Special here: a failed or pruned run is an outcome, too. It stays visible, and its cell gets no verdict, because the
seeds that are left were selected by how well they did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Status = Literal["done", "running", "queued", "failed", "pruned", "missing"]

HIGHER_IS_BETTER = ("recall", "tokens_per_second", "prefill_tokens_per_second", "decode_tokens_per_second")


@dataclass(frozen=True)
class Outcome:
    """One run of one cell."""

    cell: str
    seed: int
    status: Status
    values: Mapping[str, float] = field(default_factory=dict)  # measure, as the tracker names it -> value
    reason: str = ""  # failed: the error; pruned: at which step
    provenance: Mapping[str, str] = field(default_factory=dict)  # run_id, commit, data_digest, ...


class Outcomes:
    """Every outcome of a table, in the table's order."""

    def __init__(self, cells: Iterable[str], seeds: Iterable[int], outcomes: Iterable[Outcome]) -> None:
        self.cells, self.seeds = list(cells), list(seeds)
        self._outcomes = {(each.cell, each.seed): each for each in outcomes}

    def at(self, cell: str, seed: int) -> Outcome:
        """The outcome of a cell and seed; one with status `missing` where nothing was run."""
        return self._outcomes.get((cell, seed)) or Outcome(cell, seed, "missing")

    def of(self, cell: str) -> list[Outcome]:
        """The outcomes of a cell, by seed."""
        return [self.at(cell, seed) for seed in self.seeds]

    def values(self, measure: str) -> np.ndarray:
        """`[cells, seeds]`, NaN where a run is not done or did not measure it."""
        return np.array([self.row(cell, measure) for cell in self.cells])

    def row(self, cell: str, measure: str) -> np.ndarray:
        """`[seeds]`, the row of `values` that belongs to a cell."""
        done = ((each.status == "done", each.values.get(measure, np.nan)) for each in self.of(cell))
        return np.array([value if finished else np.nan for finished, value in done], dtype=float)

    def spoilt(self, cell: str) -> str:
        """Why a cell cannot be judged: `failed: 1 of 3 seeds (NaN at step 40)`; empty when it can."""
        for status in ("failed", "pruned"):
            bad = [outcome for outcome in self.of(cell) if outcome.status == status]
            if bad:
                return f"{status}: {len(bad)} of {len(self.seeds)} seeds" + (
                    f" ({bad[0].reason})" if bad[0].reason else ""
                )
        return ""


def lower_is_better(measure: str) -> bool:
    """Perplexity, loss, bits, bytes and FLOPs are better when lower; accuracy and speed when higher."""
    return measure.split("/")[0] not in HIGHER_IS_BETTER
