"""An ablation as tables: effects with intervals and verdicts, every other measure, claims; also as LaTeX.

Failed, pruned and missing runs stay in the tables. A number without an interval does not vary between seeds.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipelines.claims import Judgement, figure
from pipelines.outcomes import Outcomes
from pipelines.tables import MISSING, Cell, Table, count, number, percent, size, table
from pipelines.verdicts import Effect, Rules

LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    "[": "{[}",  # after \\ it would be read as its argument
    "*": "{*}",  # so would this
    "−": "$-$",
    "–": "--",
    "×": r"$\times$",
    "±": r"$\pm$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "·": r"$\cdot$",
    "…": "...",
    "→": r"$\rightarrow$",
}


def effects_table(
    title: str, measure: str, effects: Sequence[Effect], outcomes: Outcomes, rules: Rules, notes: str = ""
) -> Table:
    """The judged measure: one row per cell, with its difference to the baseline and the verdict."""
    baseline = next(effect for effect in effects if effect.verdict == "baseline")
    planned = len(outcomes.seeds)
    rows = [
        [
            Cell(effect.cell),
            _seeds(effect, planned),
            printed(measure, effect.mean),
            *(
                [MISSING] * 5
                if effect is baseline
                else [
                    _difference(measure, effect),
                    percent(_relative(effect.difference, baseline.mean)),
                    _p(effect.p),
                    _p(effect.adjusted_p),
                    printed(measure, effect.detectable, fine=True),
                ]
            ),
            Cell(effect.text, strong=effect.verdict in ("real", "no verdict")),
        ]
        for effect in effects
    ]
    columns = ["cell", "seeds", measure, "difference", "relative", "p", "p (Holm)", "detectable", "verdict"]
    looks = (
        f" Seeds were added at looks of {', '.join(map(str, rules.looks))}, each with its share of alpha: p and "
        "intervals are those of the last, the intervals wider by its share."
        if rules.looks
        else ""
    )
    caption = (
        f"Differences to {baseline.cell}, paired by seed, with {100 * (1 - rules.alpha):g} % intervals for each "
        f"cell alone. Real: p below {rules.alpha:g} after Holm's correction over {len(effects) - 1} comparisons. "
        f"Detectable: the smallest true effect these seeds find with a power of {rules.power:g}.{looks} {notes}"
    )
    return table(title, columns, rows, caption.strip())


def measures_table(title: str, effects: Mapping[str, Sequence[Effect]], rules: Rules) -> Table:
    """Every measure, one column each: the mean, and the difference to the baseline with its interval; no verdicts."""
    cells = [effect.cell for effect in next(iter(effects.values()))]
    rows = [
        [Cell(cell), *(_both(measure, found[i]) for measure, found in effects.items())] for i, cell in enumerate(cells)
    ]
    several = any(np.isfinite(effect.low) for found in effects.values() for effect in found)
    interval = (
        f" with its {100 * (1 - rules.alpha):g} % interval for this cell and measure alone, uncorrected"
        if several
        else " (one seed has no interval)"
    )
    caption = f"In brackets the difference to the baseline{interval}: for reading, not for verdicts."
    return table(title, ["cell", *effects], rows, caption)


def claims_table(judgements: Sequence[Judgement], rules: Rules, scale: str) -> Table:
    """What our runs say about each claim, beside the paper's figures."""
    rows = [
        [
            Cell(each.claim.says, tip=each.claim.name),
            Cell(each.ruling, tip=each.note, strong=each.ruling in ("supported", "contradicted")),
            each.note
            if each.ruling == "not tested"
            else f"{each.shown} for, {each.against} against, of {each.contrasts}",
            "; ".join(_reported(path) for path in each.claim.reported) or "no figure",
            _p(np.nan if each.ruling == "not tested" else each.adjusted_p),
        ]
        for each in judgements
    ]
    caption = (
        f"At this scale ({scale}). Supported: every comparison of the claim is shown; contradicted: one is shown the "
        f"other way; p after Holm's correction over the claims, alpha {rules.alpha:g}. Not shown refutes nothing."
    )
    return table("Claims", ["claim", "here", "comparisons", "reported", "p (Holm)"], rows, caption, labels=4)


def latex(printed: Table) -> str:
    """The table for a paper; needs `\\usepackage{booktabs}`."""
    form = "l" * printed.labels + "r" * (len(printed.columns) - printed.labels)
    lines = [" & ".join(_latex(cell) for cell in row) + r" \\" for row in printed.rows]
    heading = " & ".join(_escape(name) for name in printed.columns) + r" \\"
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_escape(printed.title)}. {_escape(printed.caption)}}}",
            rf"\begin{{tabular}}{{{form}}}",
            r"\toprule",
            heading,
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _latex(cell: Cell) -> str:
    return rf"\textbf{{{_escape(cell.text)}}}" if cell.strong else _escape(cell.text)


def _escape(text: str) -> str:
    return "".join(map(_escaped, " ".join(text.split())))


def _escaped(character: str) -> str:
    """In ASCII, because a reason for a failure may hold any character, and LaTeX stops at one it has no glyph for."""
    if character.isascii():
        return LATEX.get(character, character if character.isprintable() else "")
    letters = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return LATEX.get(character) or "".join(map(_escaped, letters)) or f"U+{ord(character):04X}"


def _relative(difference: float, mean: float) -> float | None:
    """As a fraction of the baseline's mean; None where there is none, as for a recall of 0."""
    return difference / mean if mean != 0 and np.isfinite(difference / mean) else None


def _seeds(effect: Effect, planned: int) -> str:
    return str(effect.seeds) if effect.seeds == planned else f"{effect.seeds} of {planned}"


def _p(p: float) -> str:
    return MISSING if np.isnan(p) else "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.01 else f"{p:.3f}"


def printed(measure: str, value: float, fine: bool = False, signed: bool = False) -> str:
    """A number in the unit of its measure; `fine` for differences."""
    if not np.isfinite(value):
        return MISSING
    kind = measure.split("/")[0]
    sign = ("−" if value < 0 else "+" if value > 0 else "") if signed else ""
    magnitude = abs(value) if signed else value
    if kind.endswith("bytes"):
        return sign + size(magnitude)
    if "flops" in kind or kind in ("parameters", "tokens") or "per_second" in kind:
        return sign + count(magnitude)
    return sign + number(magnitude, 2 if kind == "ppl" and not fine else 4 if kind == "bits_per_byte" else 3)


def _difference(measure: str, effect: Effect) -> str:
    """`−0.412 [−0.530, −0.294]`; without an interval where there is none to give."""
    mean, low, high = (
        printed(measure, v, fine=True, signed=True) for v in (effect.difference, effect.low, effect.high)
    )
    return mean if not np.isfinite(effect.low) or effect.low == effect.high else f"{mean} [{low}, {high}]"


def _both(measure: str, effect: Effect) -> str:
    mean = printed(measure, effect.mean)
    compared = effect.verdict != "baseline" and np.isfinite(effect.difference) and effect.difference != 0
    return f"{mean} ({_difference(measure, effect)})" if compared else mean


def _reported(path: str) -> str:
    """`gap h2 minus h4: 0.06 at 1024, 0.08 at 4096`; a level further down in brackets."""
    return f"{path.rpartition('.')[2].replace('_', ' ')}: {_written(figure(path))}"


def _written(found: Any) -> str:
    if isinstance(found, Mapping):
        nested = any(isinstance(value, Mapping) for value in found.values())
        return ", ".join(f"{k} ({_written(v)})" if nested else f"{_written(v)} at {k}" for k, v in found.items())
    return ", ".join(map(str, found)) if isinstance(found, list) else str(found)
