"""Tests on differences that are paired by seed, over whole tables and whole sets of tables at once.

Special here: the last axis is the one tested over (seeds, or a table's comparisons), any axes before it are free. So
ten thousand simulated tables are one call, and what is simulated is the code that judges real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

ROUNDING = 1e-9  # relative differences below it are none


@dataclass(frozen=True)
class Paired:
    """What seeds say about differences to the baseline; every array is `[...]`, one entry per comparison."""

    n: np.ndarray  # complete pairs
    mean: np.ndarray
    sd: np.ndarray  # of the differences, NaN below two pairs
    p: np.ndarray  # two-sided, Student's t; NaN below two pairs

    def interval(self, level: float | np.ndarray = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper limit of the mean difference at confidence `level`."""
        with np.errstate(invalid="ignore", divide="ignore"):
            reach = stats.t.ppf((1 + np.asarray(level)) / 2, self.n - 1) * self.sd / np.sqrt(self.n)
        return self.mean - reach, self.mean + reach

    def one_sided(self) -> np.ndarray:
        """p for the claim that the mean is below 0 (small when it is)."""
        return np.where(self.mean < 0, self.p / 2, 1 - self.p / 2)

    def within(self, bound: float | np.ndarray) -> np.ndarray:
        """p for the claim that the mean is inside (-bound, bound): two one-sided tests (Schuirmann, 1987)."""
        with np.errstate(invalid="ignore", divide="ignore"):
            t = (bound - np.abs(self.mean)) / (self.sd / np.sqrt(self.n))
        return np.where((self.sd == 0) & (np.abs(self.mean) == bound), 1.0, stats.t.sf(t, self.n - 1))


def paired(differences: ArrayLike) -> Paired:
    """Student's t on paired differences.

    Args:
        differences: `[..., S]`, one per seed; NaN where a seed has no pair.
    """
    d = np.asarray(differences, dtype=float)
    n = np.isfinite(d).sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(d, axis=-1) / n
        spread = np.sqrt(np.nansum((d - mean[..., None]) ** 2, axis=-1) / (n - 1))
        most, least = np.fmax.reduce(d, axis=-1, initial=-np.inf), np.fmin.reduce(d, axis=-1, initial=np.inf)
        sd = np.where(most == least, 0.0, spread)
        sd = np.where(n >= 2, sd, np.nan)
        t = np.abs(mean) / (sd / np.sqrt(n))
    t = np.where((sd == 0) & (mean == 0), 0.0, t)  # equal in every seed: no effect, with certainty
    return Paired(n, mean, sd, 2 * stats.t.sf(t, n - 1))


def differences_to(values: ArrayLike, baseline: int) -> np.ndarray:
    """`values [..., C, S]` (cells, seeds) minus the baseline cell of the same seed; the baseline's own row is NaN.

    What differs by rounding alone is equal: the same run on two machines is no effect.
    """
    v = np.asarray(values, dtype=float)
    base = v[..., baseline : baseline + 1, :]
    d = np.where(np.isclose(v, base, rtol=ROUNDING, atol=0), 0.0, v - base)
    d[..., baseline, :] = np.nan
    return d


def holm(p: ArrayLike) -> np.ndarray:
    """p-values adjusted for the family along the last axis (Holm, 1979); NaN stays NaN and is not counted.

    Rejecting where the result is below alpha keeps the chance of any false rejection under alpha, however the tests
    depend on each other (here they share the baseline).
    """
    p = np.asarray(p, dtype=float)
    order = np.argsort(p, axis=-1)  # NaN last
    ranked = np.take_along_axis(p, order, axis=-1)
    remaining = np.isfinite(p).sum(axis=-1, keepdims=True) - np.arange(p.shape[-1])
    adjusted = np.minimum(1, np.maximum.accumulate(ranked * np.maximum(remaining, 1), axis=-1))
    result = np.empty_like(p)
    np.put_along_axis(result, order, adjusted, axis=-1)
    return result


def spending(looks: tuple[int, ...]) -> np.ndarray:
    """The share of alpha each look may spend: linear in the seeds spent (Kim and DeMets, 1987, rho = 1).

    Args:
        looks: increasing numbers of seeds at which verdicts are given; the last one spends what is left.
    """
    return np.diff(np.array(looks) / looks[-1], prepend=0.0)


def at_last_look(differences: ArrayLike, looks: tuple[int, ...]) -> np.ndarray:
    """`[..., S]` with the seeds after each comparison's last complete look taken away (NaN): what is judged so far.

    A look counts once all its seeds are there; a comparison that has reached none keeps its seeds.
    """
    d = np.array(differences, dtype=float)
    reached = _last_look(d, looks)
    d[np.arange(d.shape[-1]) >= np.where(reached, reached, d.shape[-1])[..., None]] = np.nan
    return d


def sequential_p(
    differences: ArrayLike, looks: tuple[int, ...], test: Callable[[Paired], np.ndarray] = lambda pairs: pairs.p
) -> np.ndarray:
    """One p-value per comparison that stays valid however often, and for whatever reason, seeds were added.

    That of the last complete look, divided by the look's share of alpha. By the union bound the smallest over all looks
    would be a p-value, so neither stopping early nor giving more seeds to some cells than to others can spend alpha
    twice. The last is taken, not the smallest, because it speaks of the same seeds as mean and interval: what later
    seeds contradict does not stay shown. `holm` applies to the results as to any p-values.

    Args:
        differences: `[..., S]`; NaN where a seed has no pair.
        looks: as in `spending`, the first at least 2.
        test: what gives a look's p-value.
    Returns:
        `[...]`; NaN where not even the first look is complete.
    """
    d = np.asarray(differences, dtype=float)
    shares = np.array([np.nan, *spending(looks)])[np.searchsorted(looks, _last_look(d, looks), side="right")]
    return np.minimum(1, test(paired(at_last_look(d, looks))) / shares)


def _last_look(differences: np.ndarray, looks: tuple[int, ...]) -> np.ndarray:
    """The last look whose seeds are all there, of each comparison `[..., S]`; 0 where there is none."""
    complete = np.isfinite(differences).cumprod(axis=-1).sum(axis=-1)  # seeds before the first that is missing
    return np.array([0, *looks])[np.searchsorted(looks, complete, side="right")]
