"""What the seeds spent could have seen, and how many more it takes: power of the paired t test.

The variance is never known here, only estimated from a few seeds; a plan that takes the estimate for the truth falls
short of its power about as often as not. So the plan is made for the distribution of the estimate, too.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from scipy import optimize, stats


def detectable_effect(sd: float, n: int, alpha: float = 0.05, power: float = 0.8) -> float:
    """The smallest true effect a two-sided paired t test at level `alpha` finds with probability `power`.

    Args:
        sd: standard deviation of the paired differences, in the unit of the measure.
        n: pairs, at least 2.
    """
    return sd * _noncentrality(n, alpha, power) / np.sqrt(n)


def seeds_needed(
    effect: float, sd: float, n: int, alpha: float = 0.05, power: float = 0.8, most: int = 20
) -> int | None:
    """Seeds in total after which a true `effect` is found with probability `power`, when `n` seeds gave `sd`.

    The normal approximation asks for `N >= (sd / effect)^2 (z_alpha + z_power)^2`. With `sd` estimated from n seeds the
    factor becomes a quantile of the noncentral t distribution with n - 1 degrees of freedom (the tolerance factor of
    Owen, 1968): over all such estimates, the plan holds on average. Too few seeds lead to a large factor.

    Args:
        effect: the true effect to plan for, in the unit of the measure.
        sd: estimated standard deviation of the paired differences.
        n: pairs it was estimated from, at least 2.
        most: the largest total considered.
    Returns:
        At least n, or None when `most` seeds are not enough.
    """
    if sd == 0:
        return n if effect != 0 else None
    enough = np.flatnonzero(_per_seed(n, alpha, power, most) >= (sd / effect) ** 2) if effect != 0 else []
    return n + int(enough[0]) if len(enough) else None


@cache
def _noncentrality(n: int, alpha: float, power: float) -> float:
    """The noncentrality at which a t test with n - 1 degrees of freedom reaches `power`."""
    critical = stats.t.ppf(1 - alpha / 2, n - 1)
    found = optimize.root_scalar(
        lambda shift: stats.nct.sf(critical, n - 1, shift) - power, bracket=(0, 10 * critical), method="brentq"
    )
    return float(found.root)


@cache
def _per_seed(n: int, alpha: float, power: float, most: int) -> np.ndarray:
    """`[most - n + 1]`: the (sd / effect)^2 that n, n + 1, ... `most` seeds in total can resolve, increasing."""
    totals = np.arange(n, max(n, most) + 1)
    return totals / stats.nct.ppf(power, n - 1, stats.t.ppf(1 - alpha / 2, totals - 1)) ** 2
