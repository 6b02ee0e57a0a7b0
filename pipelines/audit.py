"""Was the comparison fair? What must be equal and is not; what designs differ in is told, not judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipelines.accounts import distilled, student_note
from pipelines.comparisons import baseline
from pipelines.results import Result, pretrained, short
from pipelines.sections import Block, Section, source
from pipelines.tables import Cell, Table, count, percent, table

PARAMETER_GAP = 0.01  # arms are of equal size within this fraction
FROM_SCRATCH = ("training tokens", "training steps")  # equal in pretrained models: a student's are on top of others
SAME: dict[str, Callable[[Result], str]] = {
    "seed (initial weights, order of data)": lambda r: str(r.training["seed"]),
    "training tokens": lambda r: f"{r.training['tokens']:,}",
    "training steps": lambda r: f"{r.training['steps']:,}",
    "training context": lambda r: f"{r.training_context:,}",
    "training data": lambda r: short(r.training["data_digest"]),
    "evaluation data": lambda r: short(r.evaluation["data_digest"]),
    "scored windows": lambda r: _windows(r),
    "commit of training": lambda r: short(r.training["commit"]),
    "commit of evaluation": lambda r: short(r.evaluation["commit"]),
}


def audit(results: Sequence[Result]) -> Section:
    """What must be equal for the comparison to be fair, and what is not; what designs differ in is told, not judged."""
    scratch = pretrained(results) or results
    rows = []
    for what, value in SAME.items():
        members = scratch if what in FROM_SCRATCH else results
        rows.append(_compared(_of(what, members, results), [(result, value(result)) for result in members]))
    for name in sorted({result.family for result in results}):
        members = [(r, short(r.training["code_digest"])) for r in results if r.family == name]
        rows.append(_compared(f"code of {name}", members))
    dirty = [result.label for result in results if result.training["dirty"]]
    rows.append(_row("no uncommitted changes", not dirty, ", ".join(dirty)))
    sized = [result for result in results if not result.looped]
    base = baseline(results) or next(iter(sized), results[0])
    large = [f"{r.label} {percent(gap)}" for r in sized if abs(gap := _gap(r, base, "parameters")) > PARAMETER_GAP]
    what = _of(f"parameters within {PARAMETER_GAP:.0%} of {base.label}", sized, results, "without loops")
    rows.append(_row(what, not large, ", ".join(large)))
    broken = [what for what, holds, _ in rows if holds != "yes"]
    sentence = (
        f"Not in every respect, so read differences with care: {'; '.join(map(str, broken))}."
        if broken
        else "All that is listed here as due to be equal is. Not covered: compute per token, in which designs differ "
        "(last table), and whether one learning rate suits every model: nothing here tunes it."
    )
    caption = f"Code is compared inside a family: another family runs other code by design. {source(results)}"
    checks = table("What should hold", ("equal in every model", "holds", "value"), rows, caption, labels=3)
    unjudged = _unjudged(results, base)
    blocks: list[Block] = [sentence, *([unjudged] if unjudged else []), checks, _gaps(results, base)]
    return Section("audit", "Was the comparison fair?", tuple(blocks))


def _of(what: str, members: Sequence[Result], results: Sequence[Result], which: str = "pretrained") -> str:
    """Says so when a check is about some of the models only."""
    return what if len(members) == len(results) else f"{what} ({which})"


def _unjudged(results: Sequence[Result], base: Result) -> tuple[str, ...]:
    """Where equal is not defined: loops trade parameters for compute, and a student has a teacher."""
    sentences = []
    looped = [result for result in results if result.looped]
    if looped and not base.looped:
        gaps = "; ".join(
            f"{r.label}, {r.config['loops']} loops: parameters {percent(_gap(r, base, 'parameters'))}, training "
            f"FLOPs/token {percent(_gap(r, base, 'training_flops_per_token'))}"
            for r in looped
        )
        sentences.append(
            "Not judged: a model that uses its layers several times can equal another in parameters or in compute, not "
            f"in both, so a difference to {base.label} is of two kinds at once ({gaps})."
        )
    sentences += [
        f"Not judged: {distilled(result, results)}. It is to be compared with its teacher; against models trained on "
        "fewer tokens in all, part of a difference may be training."
        for result in results
        if result.teacher is not None
    ]
    return tuple(sentences)


def _windows(result: Result) -> str:
    windows = result.evaluation["windows"]
    return f"{windows['count']:,} of {windows['documents']:,} documents, {windows['score_tokens']:,} fixed targets"


def _compared(what: str, values: Sequence[tuple[Result, str]]) -> list[Cell | str]:
    """Equal when there is one value; else each value with the models that have it."""
    models: dict[str, list[str]] = {}
    for result, value in values:
        models.setdefault(value, []).append(result.label)
    if len(models) == 1:
        return _row(what, True, next(iter(models)))
    return _row(what, False, "; ".join(f"{value}: {', '.join(names)}" for value, names in models.items()))


def _row(what: str, holds: bool, value: str) -> list[Cell | str]:
    return [what, "yes" if holds else Cell("no", strong=True), value]


def _gap(result: Result, base: Result, key: str) -> float:
    return result.training[key] / base.training[key] - 1


def _gaps(results: Sequence[Result], base: Result) -> Table:
    """What a design may legitimately differ in, as gaps to the baseline."""
    rows = []
    for result in results:
        texts = (
            f"{result.training['parameters']:,}",
            percent(_gap(result, base, "parameters")),
            percent(_gap(result, base, "training_flops_per_token")),
            count(result.training["tokens_per_second"]),
        )
        rows.append([result.label, *(Cell(text, result.provenance) for text in texts)])
    caption = f"Gaps to {base.label}. {student_note(results)}{source(results)}"
    columns = ("model", "parameters", "gap", "gap in training\nFLOPs/token", "training\ntokens/s")
    return table("Size and compute", columns, rows, caption)
