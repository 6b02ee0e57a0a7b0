"""Does the memory do anything? The model against itself with its memory changed, and against attention that is local.

A flat curve beyond the training length needs no memory when attention is local, so a Transformer++ with a window or
with chunks, and no memory at all, is the control for flatness.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.comparisons import Change, change
from pipelines.figures import Line, Panel, draw, spare_kinds
from pipelines.results import Result
from pipelines.sections import PROTOCOLS, Section, context_lines, labels, source
from pipelines.tables import Cell, Table, number, table

WORDS = {"zero": "memory zeroed", "reset": "memory reset every chunk", "shuffle": "memory of another document"}


def controls(results: Sequence[Result]) -> Section:
    """Sentences, curves and a table."""
    arms = with_memory(results)
    if not arms:
        return Section("controls", "Is it the memory?", ("No evaluated model has a memory to change.",))
    words = [sentence for arm in arms for sentence in (*_memory(arm), _local(arm, results))]
    names = dict(zip((result.name for result in results), labels(results), strict=True))
    curves = zip(context_lines(results, "fixed_targets"), results, strict=True)
    lines = [line for line, result in curves if result.local or len(result.controls) > 1]
    spare = spare_kinds([line.kind for line in lines])
    for arm in arms:
        for control in arm.controls[1:]:
            name = f"{names[arm.name]}, {WORDS.get(control, control)}"
            curve = arm.perplexity("fixed_targets", control)
            lines.append(Line(name, curve, next(spare), dashed=True))
    panel = Panel("Same targets", lines, "context length (tokens)", "perplexity")
    caption = (
        "Evaluation-time controls: the weights stay, only the memory changes. Transformer++ with local attention has "
        f"none. Models whose state grows with the context are left out: see the figure above. {source(results)}"
    )
    figure = draw("controls", [panel], " ".join(words), caption)
    return Section("controls", "Is it the memory?", (tuple(words), figure, _table(arms)))


def findings(results: Sequence[Result]) -> list[str]:
    """The sentences that belong at the top: the memory switched off, and the local control."""
    return [sentence for arm in with_memory(results) for sentence in (*_memory(arm)[:1], _local(arm, results))]


def with_memory(results: Sequence[Result]) -> list[Result]:
    """Models evaluated with their memory changed."""
    return [result for result in results if len(result.controls) > 1]


def _memory(arm: Result) -> list[str]:
    n, sentences = arm.contexts[-1], []
    for control in arm.controls[1:]:
        effect = change(arm, arm, n, control=control)
        reading = _reading(
            effect,
            higher="its own memory helps on these documents",
            lower="it does better on these documents without its own memory",
            neither="no effect stands out from the spread over documents",
        )
        name = WORDS.get(control, control)
        sentences.append(f"{arm.label}, {name}, at {n:,} tokens: perplexity {effect.text}. So {reading}.")
    return sentences


def _local(arm: Result, results: Sequence[Result]) -> str:
    local = [result for result in results if result.local and result.training["seed"] == arm.training["seed"]]
    if not local:
        return "No Transformer++ with local attention was evaluated: whether a flat curve needs a memory stays open."
    n = arm.contexts[-1]
    best = min(local, key=lambda result: result.perplexity("fixed_targets")[n])
    effect = change(arm, best, n)
    reading = _reading(
        effect,
        higher="local attention without any memory does better: a flat curve is no evidence for the memory",
        lower="local attention alone does not explain its perplexity on these documents",
        neither="the two cannot be told apart on these documents: a flat curve is no evidence for the memory",
    )
    return f"{arm.label} against {best.label}, at {n:,} tokens: perplexity {effect.text}. So {reading}."


def _reading(effect: Change, higher: str, lower: str, neither: str) -> str:
    if effect.interval is None or not effect.interval.excludes_zero:
        return neither
    return higher if effect.value > 0 else lower


def _table(arms: Sequence[Result]) -> Table:
    lengths = sorted({n for arm in arms for n in arm.contexts})
    rows = []
    for arm in arms:
        for protocol, name in PROTOCOLS.items():
            for control in arm.controls:
                curve = arm.perplexity(protocol, control)
                rows.append([arm.label, name, control, *(Cell(number(curve.get(n)), arm.provenance) for n in lengths)])
    columns = ("model", "protocol", "memory", *(f"{n:,}" for n in lengths))
    return table("Perplexity under each control", columns, rows, source(arms), labels=3)
