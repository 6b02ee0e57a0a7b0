"""Differences between models, and between a model and its controls, with an honest account of their uncertainty.

An interval over held-out documents says how far the difference depends on the text. It says nothing about another
seed: with fewer than three seeds per arm no difference is called real, however narrow the interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from pipelines.results import Result
from pipelines.tables import percent

SEEDS_NEEDED = 3


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence limits, from `n` pairs."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Change:
    """The relative change of perplexity from one arm to another, on the same documents."""

    value: float  # -0.05: five percent lower
    interval: Interval | None  # 95 % over documents, as relative changes; none with a single document

    @property
    def limits(self) -> str:
        """`−6.1 % to −3.9 %`."""
        if self.interval is None:
            return "one document"
        return f"{percent(self.interval.low)} to {percent(self.interval.high)}"

    @property
    def text(self) -> str:
        """`−5.0 % (95 % over 24 documents: −6.1 % to −3.9 %)`."""
        over = f"95 % over {self.interval.n} documents: " if self.interval else ""
        return f"{percent(self.value)} ({over}{self.limits})"


def change(arm: Result, base: Result, context: int, control: str = "on") -> Change:
    """Perplexity of `arm` under `control` against `base` in normal operation, on the same targets, by document."""
    after = arm.document_losses("fixed_targets", control, context)
    before = base.document_losses("fixed_targets", "on", context)
    assert after.index.equals(before.index), "the same data has the same documents"
    value = arm.perplexity("fixed_targets", control)[context] / base.perplexity("fixed_targets")[context] - 1
    if len(after) < 2:
        return Change(value, None)
    log = paired_interval(after.loss - before.loss, after.tokens)
    return Change(value, Interval(value, math.expm1(log.low), math.expm1(log.high), log.n))


def baseline(results: Sequence[Result], seed: int | None = None) -> Result | None:
    """The Transformer++ with full attention (of this seed), if there is one."""
    return next((r for r in results if r.full and seed in (None, r.training["seed"])), None)


def verdict(arm: Result, results: Sequence[Result]) -> str:
    """Whether the arm's difference to the baseline holds over seeds. Enough seeds are judged in an ablation table."""
    seeds = {r.training["seed"] for r in results if r.config == arm.config and baseline(results, r.training["seed"])}
    if len(seeds) < SEEDS_NEEDED:
        return f"not shown ({len(seeds)} seed{'s' if len(seeds) != 1 else ''})"
    return f"to be judged in an ablation table ({len(seeds)} seeds)"


def paired_interval(differences: ArrayLike, weights: ArrayLike | None = None, level: float = 0.95) -> Interval:
    """The weighted mean of paired differences with its two-sided interval (Student's t).

    With weights (tokens per document) the variance is that of a ratio estimate (Cochran, Sampling Techniques, 1977,
    eq. 6.13), which is the ordinary one when they are equal.

    Args:
        differences: `[n]`, n >= 2.
        weights: `[n]`, positive; equal if left out.
        level: coverage, such as 0.95.
    """
    d = np.asarray(differences, dtype=float)
    w = np.ones_like(d) if weights is None else np.asarray(weights, dtype=float)
    assert len(d) >= 2, "an interval needs two pairs"
    n, share = len(d), w / w.sum()
    mean = float(share @ d)
    error = float(np.sqrt(n / (n - 1) * np.sum((share * (d - mean)) ** 2)))
    reach = float(stats.t.ppf((1 + level) / 2, n - 1)) * error
    return Interval(mean, mean - reach, mean + reach, n)
