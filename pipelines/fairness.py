"""Was the comparison fair? Parameters, tokens, FLOPs, state and tuning of each arm against the baseline's.

Nothing here is a verdict: a gap is printed, so that a reader can weigh the effect against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.cells import flatten, plain
from pipelines.outcomes import Outcomes
from pipelines.tables import MISSING, Cell, Table, count, percent, size, table

COSTS = ("parameters", "tokens", "training_flops_per_token")  # measures as the tracker names them


@dataclass(frozen=True)
class Choice:
    """The nuisance values an arm was given."""

    values: Mapping[str, Any]  # dotted path -> value
    edges: tuple[str, ...] = ()  # paths whose value is the first or last of its grid: the best one may lie beyond

    @property
    def text(self) -> str:
        return ", ".join(
            f"{path.rpartition('.')[2]}={plain(value)}{' (edge of its grid)' * (path in self.edges)}"
            for path, value in self.values.items()
        )


def choose(grid: Mapping[str, Any], scores: Sequence[tuple[Mapping[str, Any], float]]) -> Choice:
    """The best nuisance values of one arm, from runs on a seed that no verdict uses.

    Args:
        grid: nested fields, each with its list of values.
        scores: each combination tried, with its validation loss (NaN for a failed run).
    """
    finished = [(values, loss) for values, loss in scores if np.isfinite(loss)]
    assert finished, "no run of the grid finished"
    best = min(finished, key=lambda pair: pair[1])[0]
    edges = tuple(
        path for path, values in flatten(grid).items() if len(values) > 1 and best[path] in (values[0], values[-1])
    )
    return Choice(dict(best), edges)


def audit(outcomes: Outcomes, baseline: str, state: str, choices: Mapping[str, Choice]) -> Table:
    """The fairness table.

    Args:
        state: the measure that holds the state's bytes, such as `state_bytes/2048`.
        choices: cell -> nuisance values, where they were tuned.
    """
    own = outcomes.cells.index(baseline)
    columns = {measure: np.array([_first(row) for row in outcomes.values(measure)]) for measure in (*COSTS, state)}
    rows = []
    for i, cell in enumerate(outcomes.cells):
        shown = [
            Cell(_beside(values[i], values[own], size if name == state else count)) for name, values in columns.items()
        ]
        tuning = choices[cell].text if cell in choices else "not tuned"
        rows.append([Cell(cell, strong=cell == baseline), *shown, Cell(tuning, strong="edge" in tuning)])
    headings = ["cell", "parameters", "tokens", "training FLOPs/token", state.replace("_", " "), "tuning"]
    caption = f"As executed; in brackets the gap to {baseline}. Tuned arms got equal grids, on a seed of their own."
    return table("Fairness", headings, rows, caption)


def _first(values: np.ndarray) -> float:
    """The value all seeds share; NaN where none is done."""
    done = values[np.isfinite(values)]
    return float(done[0]) if len(done) else np.nan


def _beside(value: float, base: float, form: Any) -> str:
    if np.isnan(value):
        return MISSING
    gap = f" ({percent(value / base - 1)})" if base and np.isfinite(base) and value != base else ""
    return f"{form(value)}{gap}"
