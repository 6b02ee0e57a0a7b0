"""When is an effect real? One verdict per cell of an ablation table, with its direction.

The rules, fixed before a table is run:
- arms share initial weights and data order, so effects are differences to the baseline **paired by seed**;
- *real* when Holm's adjusted p over the table is below alpha: in a table without any effect, the chance that even one
  cell is called real is below alpha. Every cell counts, finished or not, so no verdict of *real* is taken back when
  the others finish; more seeds of its own may: mean, interval and p are those of its last look;
- *needs k more seeds* when the planned effect would show with at most `max_seeds` seeds in total: the observed effect,
  or the smallest of interest where that is larger;
- *not shown* otherwise; with a smallest effect of interest, also when the effect is shown to be smaller (two one-sided
  tests). Not shown is never proof of no effect;
- nothing below 3 seeds, and nothing for a cell with failed or pruned seeds: the survivors were selected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from models.configuration import Config, require
from pipelines.outcomes import Outcomes, lower_is_better
from pipelines.power import detectable_effect, seeds_needed
from pipelines.statistics import Paired, at_last_look, differences_to, holm, paired, sequential_p, spending

LEAST_SEEDS = 3
LOOKS = (3, 5, 8, 12, 20)  # where seeds are added step by step and nothing else is stated

Verdict = Literal["baseline", "real", "not shown", "needs more seeds", "no verdict"]


@dataclass(frozen=True)
class Rules(Config):
    """How a table is judged; part of the sweep file."""

    alpha: float = 0.05  # chance of any false "real" in the table
    power: float = 0.8  # of the seeds recommended
    smallest_effect: float | None = None  # of interest, as a fraction of the baseline's mean
    max_seeds: int = 20  # per cell; beyond it an open verdict becomes "not shown"
    looks: tuple[int, ...] = ()  # numbers of seeds at which verdicts are given, when seeds are added in steps

    def validate(self) -> None:
        require(0 < self.alpha < 0.5, f"alpha={self.alpha} must be between 0 and 0.5")
        require(0.5 <= self.power < 1, f"power={self.power} must be in [0.5, 1)")
        smallest, looks = self.smallest_effect, list(self.looks)
        require(smallest is None or smallest > 0, f"smallest_effect={smallest} must be above 0, or null")
        require(self.max_seeds >= LEAST_SEEDS, f"max_seeds={self.max_seeds} must be at least {LEAST_SEEDS}")
        require(
            looks == sorted(set(looks)) and (not looks or looks[0] >= LEAST_SEEDS),
            f"looks={looks} must increase from at least {LEAST_SEEDS} seeds",
        )

    @property
    def least(self) -> int:
        """Seeds at which the first verdict is given."""
        return self.looks[0] if self.looks else LEAST_SEEDS

    def level(self, seeds: int) -> float:
        """The alpha to spend at `seeds` seeds, or at the first look after them."""
        if not self.looks:
            return self.alpha
        look = next((j for j, look in enumerate(self.looks) if look >= seeds), -1)
        return self.alpha * float(spending(self.looks)[look])

    def total(self, needed: int | None) -> int | None:
        """The seeds to run so that `needed` are there at a look; None when that is more than allowed."""
        totals = [look for look in self.looks if look >= (needed or 0)] if self.looks else [needed or 0]
        return totals[0] if needed is not None and totals and totals[0] <= self.max_seeds else None


@dataclass(frozen=True)
class Effect:
    """One cell against the baseline, on one measure. Numbers are NaN where there are too few seeds for them."""

    cell: str
    mean: float  # of the measure, over the cell's own seeds
    seeds: int  # complete pairs; of the baseline, its runs
    difference: float  # cell minus baseline, mean over pairs
    low: float  # its interval at confidence 1 - alpha, or 1 - the last look's share of it; for this cell alone
    high: float
    p: float  # two-sided, for this cell alone
    adjusted_p: float  # Holm over the table
    detectable: float  # smallest true effect these seeds find with the stated power
    better: bool  # the difference is in the better direction of the measure
    equivalent: bool  # shown to be smaller than the smallest effect of interest
    verdict: Verdict
    more_seeds: int = 0  # needs more seeds: how many
    note: str = ""  # no verdict: why

    @property
    def direction(self) -> str:
        """`better`, `worse`, or empty when there is no difference."""
        return ("better" if self.better else "worse") if self.difference < 0 or self.difference > 0 else ""

    @property
    def text(self) -> str:
        """The verdict as a table prints it: `real: better`, `needs 4 more seeds (better so far)`, `not shown`."""
        so_far = f" ({self.direction} so far)" if self.direction else ""
        if self.verdict == "real":
            return f"real: {self.direction}"
        if self.verdict == "needs more seeds":
            return f"needs {self.more_seeds} more seed{'s' * (self.more_seeds > 1)}{so_far}"
        if self.verdict == "not shown":
            return "not shown: smaller than of interest" if self.equivalent else f"not shown{so_far}"
        return f"{self.verdict} ({self.note})" if self.note else self.verdict


def judge(outcomes: Outcomes, measure: str, baseline: str, rules: Rules) -> list[Effect]:
    """The effect of every cell on one measure, in table order; the baseline's own entry carries its mean.

    Holm's family is the table: verdicts are meant for its primary measure, other measures are printed with intervals.
    """
    values, own = outcomes.values(measure), outcomes.cells.index(baseline)
    notes = [_note(outcomes, cell, baseline) for cell in outcomes.cells]
    differences = differences_to(values, own)
    pairs = np.isfinite(differences).sum(axis=1)
    differences[[bool(note) for note in notes]] = np.nan
    if rules.looks:
        differences = at_last_look(differences, rules.looks)
    tests = paired(differences)
    p = _at_every_look(differences, rules, lambda pairs: pairs.p)
    enough = tests.n >= rules.least
    adjusted = _over_table(np.where(enough, p, np.nan), own)
    unsettled = max(1, len(values) - 1 - int((adjusted < rules.alpha).sum()))
    smallest = (rules.smallest_effect or 0.0) * abs(_mean(values[own]))
    small = _at_every_look(differences, rules, lambda pairs: pairs.within(smallest))
    equivalent = _over_table(np.where(enough, small, np.nan), own) < rules.alpha

    def effect(i: int, cell: str) -> Effect:
        n, mean, sd, note = int(tests.n[i]), float(tests.mean[i]), float(tests.sd[i]), notes[i]
        total: int | None = rules.least
        if n >= rules.least:
            level = rules.level(n + 1) / unsettled
            total = rules.total(seeds_needed(max(abs(mean), smallest), sd, n, level, rules.power, rules.max_seeds))
        more = 0 if total is None or equivalent[i] else max(0, total - n)
        verdict: Verdict = "needs more seeds" if more else "not shown"
        if cell == baseline or note or adjusted[i] < rules.alpha:
            verdict, more = "baseline" if cell == baseline else "no verdict" if note else "real", 0
        low, high = tests.interval(1 - rules.level(n))
        return Effect(
            cell=cell,
            mean=_mean(values[i]),
            seeds=int(np.isfinite(values[i]).sum() if cell == baseline else pairs[i]),
            difference=mean,
            low=float(low[i]),
            high=float(high[i]),
            p=float(p[i]),
            adjusted_p=float(adjusted[i]),
            detectable=detectable_effect(sd, n, rules.level(n) / unsettled, rules.power) if n >= 2 else np.nan,
            better=(mean < 0) == lower_is_better(measure),
            equivalent=bool(equivalent[i]),
            verdict=verdict,
            more_seeds=more,
            note=note,
        )

    return [effect(i, cell) for i, cell in enumerate(outcomes.cells)]


def allocate(effects: Sequence[Effect], rules: Rules) -> list[tuple[str, int]]:
    """Where extra seeds are worth most: the cells still open and the seeds each should have next, cheapest first.

    Seeds are added look by look (`rules.looks`), so a cell that settles early leaves its share of the budget to others.
    The baseline needs the same seeds. `rules.looks` must be set.
    """
    undecided = sorted((e for e in effects if e.verdict == "needs more seeds"), key=lambda e: e.more_seeds)
    return [(e.cell, next(look for look in rules.looks if look > e.seeds)) for e in undecided]


def _at_every_look(differences: np.ndarray, rules: Rules, test: Callable[[Paired], np.ndarray]) -> np.ndarray:
    """A test's p-value, valid however often the table was looked at."""
    return sequential_p(differences, rules.looks, test) if rules.looks else test(paired(differences))


def _over_table(p: np.ndarray, baseline: int) -> np.ndarray:
    """Holm's adjustment with every cell but the baseline in the family; cells without a p-value yet stay NaN."""
    counted = np.where(np.isfinite(p), p, 1.0)
    counted[baseline] = np.nan
    return np.where(np.isfinite(p), holm(counted), np.nan)


def _note(outcomes: Outcomes, cell: str, baseline: str) -> str:
    """Why a cell cannot be judged, if so."""
    spoilt = outcomes.spoilt(cell)
    return spoilt or (f"baseline {outcomes.spoilt(baseline)}" if outcomes.spoilt(baseline) else "")


def _mean(values: np.ndarray) -> float:
    done = values[np.isfinite(values)]
    return float(done.mean()) if len(done) else float("nan")
