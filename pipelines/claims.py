"""What a paper claims, as something our table can support or contradict.

A claim is written in a sweep file as one of four predicates over cells. Each comes down to *contrasts*: per seed, a
weighted sum of measured values that the claim says is negative. A claim is
- **supported** when every one of its contrasts is shown to be negative,
- **contradicted** when at least one is shown to be positive,
- **not shown** at this scale otherwise; means alone never decide.

The first needs no correction inside the claim (intersection-union test), the second takes Bonferroni's; over the claims
of a table Holm's method keeps the chance of any wrong statement under alpha.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np

from models.configuration import Config, ConfigError, config_from, nearest, require
from pipelines.cells import Cell, distinct, pairs, select
from pipelines.outcomes import Outcomes
from pipelines.reported import paper
from pipelines.statistics import Paired, holm, paired, sequential_p
from pipelines.verdicts import Rules

Term = tuple[str, str, float]  # cell, measure, weight


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of measured values, per seed, that a claim says is below 0."""

    terms: tuple[Term, ...]

    def per_seed(self, outcomes: Outcomes) -> np.ndarray:
        """`[seeds]`; NaN where a seed lacks one of the values."""
        rows = [weight * outcomes.row(cell, measure) for cell, measure, weight in self.terms]
        return np.sum(rows, axis=0)


@dataclass(frozen=True)
class Lower(Config):
    """`cell` measures less than `factor` times `than`, for each pair that agrees on every factor neither names."""

    kind: ClassVar[str] = "lower"
    cell: Any  # selectors, see `cells.select`
    than: Any
    factor: float = 1.0
    than_measures: tuple[str, ...] = ()  # measures of `than`, one for each of the claim's; the same if left out

    def contrasts(self, cells: Sequence[Cell], measures: Sequence[str], where: str) -> list[Contrast]:
        found = pairs(cells, self.cell, self.than, where)
        return [
            Contrast(((a.name, measure, 1.0), (b.name, other, -self.factor)))
            for a, b in found
            for measure, other in _beside(measures, self.than_measures, where)
        ]


@dataclass(frozen=True)
class Equal(Config):
    """`cell` measures `factor` times `than`, to within a fraction `within` (two one-sided tests).

    The default is for what does not vary between seeds, such as bytes.
    """

    kind: ClassVar[str] = "equal"
    cell: Any
    than: Any
    factor: float = 1.0
    within: float = 1e-6
    than_measures: tuple[str, ...] = ()

    def validate(self) -> None:
        require(0 < self.within < 1, f"within={self.within} must be between 0 and 1")

    def contrasts(self, cells: Sequence[Cell], measures: Sequence[str], where: str) -> list[Contrast]:
        above, below = self.factor * (1 + self.within), self.factor * (1 - self.within)
        return [
            contrast
            for a, b in pairs(cells, self.cell, self.than, where)
            for measure, other in _beside(measures, self.than_measures, where)
            for contrast in (
                Contrast(((a.name, measure, 1.0), (b.name, other, -above))),
                Contrast(((a.name, measure, -1.0), (b.name, other, below))),
            )
        ]


@dataclass(frozen=True)
class Monotone(Config):
    """The measure falls (or rises) from each level of a factor to the next, in the order written."""

    kind: ClassVar[str] = "monotone"
    factor: str
    direction: Literal["falls", "rises"] = "falls"
    where: dict[str, Any] | None = None  # levels of other factors; every combination if left out

    def contrasts(self, cells: Sequence[Cell], measures: Sequence[str], where: str) -> list[Contrast]:
        among = select(cells, self.where, where) if self.where else list(cells)
        known = list(dict.fromkeys(label for cell in among for label in cell.levels))
        require(self.factor in known, f"{where}: unknown factor {self.factor!r}{nearest(self.factor, known)}")
        levels = distinct(cell.levels[self.factor] for cell in among)
        require(len(levels) > 1, f"{where}: {self.factor} has one level only")
        steps = pairwise(levels if self.direction == "falls" else levels[::-1])
        return [
            Contrast(((b.name, measure, 1.0), (a.name, measure, -1.0)))
            for first, second in steps
            for a, b in pairs(among, {self.factor: first}, {self.factor: second}, where)
            for measure in measures
        ]


@dataclass(frozen=True)
class Gain(Config):
    """Going `start` to `end` lowers the second measure by more (`grows`) or by less (`shrinks`) than the first one.

    With more than two measures the gain changes from each to the next.
    """

    kind: ClassVar[str] = "gain"
    start: Any
    end: Any
    trend: Literal["grows", "shrinks"]

    def contrasts(self, cells: Sequence[Cell], measures: Sequence[str], where: str) -> list[Contrast]:
        require(len(measures) > 1, f"{where}: a gain is compared between at least two measures")
        sign = 1.0 if self.trend == "grows" else -1.0
        return [
            Contrast(
                ((a.name, m, sign), (b.name, m, -sign), (a.name, n, -sign), (b.name, n, sign)),
            )
            for a, b in pairs(cells, self.start, self.end, where)
            for m, n in pairwise(measures)
        ]


Predicate = Lower | Equal | Monotone | Gain
PREDICATES: dict[str, type[Predicate]] = {each.kind: each for each in (Lower, Equal, Monotone, Gain)}


@dataclass(frozen=True)
class Claim:
    """A statement of a paper (or ours) and the predicate that tests it."""

    name: str
    says: str
    predicate: Predicate
    measures: tuple[str, ...]
    reported: tuple[str, ...]  # the paper's figures: paths such as "mela.table2_hlr_cycles.gap_h2_minus_h4"
    average: bool  # test the mean over matching pairs of cells, not each of them

    def contrasts(self, cells: Sequence[Cell]) -> list[Contrast]:
        """What has to be negative; `ConfigError` for cells that are not in the table, by name."""
        found = self.predicate.contrasts(cells, self.measures, f"claim {self.name!r}")
        return _averaged(found) if self.average else found


Ruling = Literal["supported", "contradicted", "not shown", "not tested"]


@dataclass(frozen=True)
class Judgement:
    """What our runs say about a claim, beside what the paper reported."""

    claim: Claim
    ruling: Ruling
    adjusted_p: float  # Holm over the table's claims
    shown: int  # contrasts shown (each alone, one-sided alpha / 2) in the claimed direction ...
    against: int  # ... in the other
    contrasts: int
    note: str = ""  # not tested or not shown: why


def parse_claim(name: str, values: Mapping[str, Any], measures: Sequence[str]) -> Claim:
    """A claim as a sweep file states it.

    Args:
        name: its key.
        values: `says`, one predicate (`lower`, `equal`, `monotone`, `gain`), and optionally `measures`, `reported`,
            `average`.
        measures: used when the claim names none.
    Raises:
        ConfigError: for an unknown key or predicate, none or several predicates, or a figure no paper reports.
    """
    where = f"claims.{name}"
    accepted = ["says", "measures", "reported", "average", *PREDICATES]
    for key in values:
        require(
            key in accepted, f"unknown field {where}.{key}{nearest(key, accepted)}; accepted: {', '.join(accepted)}"
        )
    kinds = [kind for kind in PREDICATES if kind in values]
    require(len(kinds) == 1, f"{where} must state exactly one of {', '.join(PREDICATES)}; it states {len(kinds)}")
    require(bool(values.get("says")), f"{where}.says must state the claim in words")
    reported = tuple(values.get("reported") or ())
    for path in reported:
        figure(path)
    return Claim(
        name=name,
        says=str(values["says"]),
        predicate=config_from(PREDICATES[kinds[0]], values[kinds[0]], f"{where}.{kinds[0]}"),
        measures=tuple(values.get("measures") or measures),
        reported=reported,
        average=bool(values.get("average", False)),
    )


def figure(path: str) -> Any:
    """A figure of a paper: `mela.table2_hlr_cycles.gap_h2_minus_h4`; `ConfigError` when there is none."""
    name, *keys = path.split(".")
    try:
        found: Any = paper(name)
    except FileNotFoundError:
        raise ConfigError(f"reported={path!r}: there are no figures of a paper {name!r}") from None
    for key in keys:
        known = [str(each) for each in found] if isinstance(found, Mapping) else []
        require(
            key in known,
            f"reported={path!r}: {key!r} is not reported{nearest(key, known)}; there is {', '.join(known)}",
        )
        found = next(value for each, value in found.items() if str(each) == key)
    return found


def judge_claims(claims: Sequence[Claim], cells: Sequence[Cell], outcomes: Outcomes, rules: Rules) -> list[Judgement]:
    """Every claim against the outcomes, in order.

    Args:
        cells: the whole table; cells that were left out of the run make the claims that name them "not tested".
    """
    contrasts = [claim.contrasts(cells) for claim in claims]
    notes = [_obstacle(found, outcomes, rules) for found in contrasts]
    p = _p_values([[] if note else found for found, note in zip(contrasts, notes, strict=True)], outcomes, rules)
    support = np.array([below.max() for below, _ in p])
    contradiction = np.array([min(1.0, len(above) * above.min()) for _, above in p])
    adjusted = holm(np.minimum(1.0, 2 * np.minimum(support, contradiction)))
    judgements = []
    for i, claim in enumerate(claims):
        ruling: Ruling = "not tested" if notes[i] else "not shown"
        if adjusted[i] < rules.alpha:
            ruling = "supported" if support[i] < contradiction[i] else "contradicted"
        shown, against = (int((side < rules.alpha / 2).sum()) for side in p[i])
        judgements.append(Judgement(claim, ruling, float(adjusted[i]), shown, against, len(contrasts[i]), notes[i]))
    return judgements


def _p_values(contrasts: Sequence[Sequence[Contrast]], outcomes: Outcomes, rules: Rules) -> list[np.ndarray]:
    """By claim `[2, contrasts]`: one-sided p that each is negative, that each is positive; 1 where there is none."""
    values = np.array([each.per_seed(outcomes) for found in contrasts for each in found])
    both = np.stack([values, -values]).reshape(2, -1, len(outcomes.seeds))
    p = sequential_p(both, rules.looks, Paired.one_sided) if rules.looks else paired(both).one_sided()
    by_claim = np.split(p, np.cumsum([len(found) for found in contrasts])[:-1], axis=1)
    return [each if each.size else np.ones((2, 1)) for each in by_claim]


def _obstacle(contrasts: Sequence[Contrast], outcomes: Outcomes, rules: Rules) -> str:
    """What stands against testing a claim: cells left out, failed or pruned, or too few seeds."""
    names = list(dict.fromkeys(cell for contrast in contrasts for cell, _, _ in contrast.terms))
    left_out = [name for name in names if name not in outcomes.cells]
    if left_out:
        return f"left out of this run: {', '.join(left_out)}"
    spoilt = [f"{name} {outcomes.spoilt(name)}" for name in names if outcomes.spoilt(name)]
    if spoilt:
        return "; ".join(spoilt)
    least = min(int(np.isfinite(contrast.per_seed(outcomes)).sum()) for contrast in contrasts)
    return "" if least >= rules.least else f"{least} of at least {rules.least} seeds"


def _averaged(contrasts: Sequence[Contrast]) -> list[Contrast]:
    """One contrast per combination of measures: the mean over the pairs of cells."""
    groups: dict[tuple[Any, ...], list[Contrast]] = {}
    for contrast in contrasts:
        groups.setdefault(tuple((measure, weight) for _, measure, weight in contrast.terms), []).append(contrast)
    return [
        Contrast(tuple((cell, measure, weight / len(group)) for each in group for cell, measure, weight in each.terms))
        for group in groups.values()
    ]


def _beside(measures: Sequence[str], others: Sequence[str], where: str) -> list[tuple[str, str]]:
    """Each measure with the one it is compared with."""
    require(
        not others or len(others) == len(measures),
        f"{where}: than_measures={list(others)} must name one measure for each of {list(measures)}",
    )
    return list(zip(measures, others or measures, strict=True))
