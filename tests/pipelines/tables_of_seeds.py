"""Made-up outcomes with known effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipelines.cells import Cell, cross
from pipelines.outcomes import Outcome, Outcomes


def outcomes(values: Mapping[str, Any], replaced: Sequence[Outcome] = ()) -> Outcomes:
    """Of `{cell: {measure: [value of seed 0, 1, ...]}}`; `replaced` stand in for single runs."""
    found = {}
    for cell, measures in values.items():
        for seed in range(max(map(len, measures.values()))):
            one = {name: float(column[seed]) for name, column in measures.items() if not np.isnan(column[seed])}
            found[cell, seed] = Outcome(cell, seed, "done", one)
    found |= {(each.cell, each.seed): each for each in replaced}
    return Outcomes(values, range(1 + max(seed for _, seed in found)), found.values())


def grid(**axes: list[Any]) -> list[Cell]:
    """The cells of a table with these factors of the model."""
    return cross({"": ("transformer_pp_tiny", {})}, {f"model.{name}": levels for name, levels in axes.items()}, {})


def rows(*names: str) -> list[Cell]:
    """The cells of a table with these rows."""
    return cross({name: ("transformer_pp_tiny", {}) for name in names}, {}, {})
