"""The noise floor: what a configuration differs by from itself (A/A), printed with every table.

Two arms that differ in nothing still differ by their seeds; an effect below that is invisible without pairing. Pairing
by seed removes what the arms have in common, and how much that is shows in the spread of the paired differences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from pipelines.outcomes import Outcomes


@dataclass(frozen=True)
class NoiseFloor:
    """One configuration on one measure; NaN for what was not run."""

    measure: str
    mean: float
    seeds: int
    seed_sd: float  # between seeds
    repeat: float  # largest difference between two runs of one seed

    @property
    def unpaired(self) -> float:
        """95 % of the differences between two equal arms of `seeds` other seeds each are smaller than this."""
        return float(stats.t.ppf(0.975, 2 * (self.seeds - 1)) * self.seed_sd * np.sqrt(2 / self.seeds))

    @property
    def text(self) -> str:
        """One sentence for a table's caption."""
        if self.seeds < 2:
            return "Noise floor: not measured (one seed)."
        same = "no difference" if self.repeat == 0 else f"up to {self.repeat:.3g}"
        repeat = "" if np.isnan(self.repeat) else f" The same seed twice: {same}."
        return (
            f"Noise floor (A/A), {self.measure}: seeds spread by {self.seed_sd:.3g} (sd of {self.seeds}), so two equal "
            f"arms of {self.seeds} other seeds differ by up to {self.unpaired:.3g}, 95 % of the time.{repeat}"
        )


def noise_floor(outcomes: Outcomes, measure: str, cell: str, again: str | None = None) -> NoiseFloor:
    """Of `cell`, and of its repetition `again` (the same seeds once more) where there is one."""
    values = outcomes.values(measure)
    own = values[outcomes.cells.index(cell)]
    done = own[np.isfinite(own)]
    repeats = np.abs(own - values[outcomes.cells.index(again)]) if again else np.array([])
    repeats = repeats[np.isfinite(repeats)]
    return NoiseFloor(
        measure=measure,
        mean=float(done.mean()) if len(done) else np.nan,
        seeds=len(done),
        seed_sd=float(done.std(ddof=1)) if len(done) > 1 else np.nan,
        repeat=float(repeats.max()) if len(repeats) else np.nan,
    )
