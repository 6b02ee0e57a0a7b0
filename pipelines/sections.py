"""What a section of the report is made of, and the two that come first: what came out, and the context curves.

Every sentence with a number in it is computed from the results, in both directions: it says so when a model is worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.comparisons import SEEDS_NEEDED, baseline, change, verdict
from pipelines.figures import Drawing, Line, Panel, draw
from pipelines.reported import SIZES, citation, length_curves, paper
from pipelines.results import Protocol, Result, short
from pipelines.tables import Cell, Table, count, number, percent, size, table

Block = str | tuple[str, ...] | Table | Drawing  # a paragraph, a list of sentences, ...
PROTOCOLS: dict[Protocol, str] = {"fixed_targets": "same targets", "window_mean": "window mean"}
PROTOCOL_NOTE = (
    "Same targets: the last tokens of each window, the same at every length, so that lengths differ in context only. "
    "Window mean: every token of disjoint windows, as the papers measure. The two are never mixed."
)
REPORTED = {"transformer_pp": "Transformer++", "mela": "Mela"}  # as the paper's table names them, and as printed


@dataclass(frozen=True)
class Section:
    """A heading, its anchor, and what stands below it."""

    anchor: str
    title: str
    blocks: tuple[Block, ...]


def headline(results: Sequence[Result], findings: Sequence[str]) -> Section:
    """What came out: `findings` of the controls, differences to the baseline, and the table of everything."""
    blocks = ((*_growth(results), *findings), _differences(results), measures(results), PROTOCOL_NOTE)
    return Section("headline", "What came out", blocks)


def measures(results: Sequence[Result]) -> Table:
    """Model x context length: perplexities, bits per byte, state bytes, tokens/s. Also the table of the terminal."""
    rows = []
    for result in results:
        for n in result.contexts:
            texts = (
                number(result.perplexity("fixed_targets").get(n)),
                number(result.perplexity("window_mean").get(n)),
                number(result.measure("bits_per_byte").get(n), 3),
                size(result.measure("state_bytes").get(n)),
                count(result.measure("prefill_tokens_per_second").get(n)),
            )
            rows.append([result.label, f"{n:,}", *(Cell(text, result.provenance) for text in texts)])
    columns = ("perplexity,\nsame targets", "perplexity,\nwindow mean", "bits per\nbyte", "state", "prefill\ntokens/s")
    return table("Model and context length", ("model", "context", *columns), rows, source(results))


def _growth(results: Sequence[Result]) -> list[str]:
    """How much worse each model gets from its training length to the longest context."""
    changes: dict[tuple[int, int], list[str]] = {}
    for result in results:
        curve, first, last = result.perplexity("fixed_targets"), result.training_context, result.contexts[-1]
        if first in curve and last > first:
            text = f"{result.label} {percent(curve[last] / curve[first] - 1)}"
            changes.setdefault((first, last), []).append(text)
    return [
        f"From {first:,} tokens, the training length, to {last:,}, perplexity on the same targets changes by: "
        f"{', '.join(texts)}."
        for (first, last), texts in changes.items()
    ]


def _differences(results: Sequence[Result]) -> Block:
    """Every model against the full Transformer++, at the training length and at the longest."""
    rows = []
    for result in results:
        base = baseline(results, result.training["seed"])
        if base is None or result is base:
            continue
        for n in sorted({result.training_context, result.contexts[-1]} & set(result.contexts)):
            difference = change(result, base, n)
            texts = (number(result.perplexity("fixed_targets")[n]), percent(difference.value), difference.limits)
            cells = (Cell(text, f"{result.provenance}; against {base.provenance}") for text in texts)
            rows.append([result.label, f"{n:,}", *cells, verdict(result, results)])
    if not rows:
        return "No Transformer++ with full attention was evaluated beside another model: nothing to compare with."
    columns = ("model", "context", "perplexity,\nsame targets", "against\nTransformer++", "95 % over\ndocuments")
    caption = (
        "Paired by held-out document. The interval says how far the difference depends on the text, not on the seed: "
        f"no difference is called real with fewer than {SEEDS_NEEDED} seeds per arm. {source(results)}"
    )
    return table("Difference to the full Transformer++", (*columns, "verdict\nover seeds"), rows, caption)


def context(results: Sequence[Result]) -> Section:
    """Perplexity against context length, ours beside the paper's, never on one scale."""
    mark, x = (results[0].training_context, "training length"), "context length (tokens)"
    trained = (paper("mela")["training"]["context"], "training length")
    panels = [
        Panel("Ours, same targets", context_lines(results, "fixed_targets"), x, "perplexity", mark=mark),
        Panel("Ours, window mean", context_lines(results, "window_mean"), x, mark=mark),
        Panel("Mela paper, window mean", _reported_lines(results), x, mark=trained),
    ]
    alt = "Perplexity against context length. " + " ".join(_described(results, protocol) for protocol in PROTOCOLS)
    caption = (
        f"Left and middle: measured here. {PROTOCOL_NOTE} Right: reported by the paper for other data, another "
        f"tokenizer and far larger models: compare shapes, not values. Every panel has its own scale. {source(results)}"
    )
    figure = draw("context", panels, alt, caption)
    return Section("context", "Perplexity against context length", (figure, _reported_table()))


def context_lines(results: Sequence[Result], protocol: Protocol) -> list[Line]:
    """One line per model, in the colour of its place among the results."""
    names = labels(results)
    return [Line(names[i], result.perplexity(protocol), i) for i, result in enumerate(results)]


def _reported_lines(results: Sequence[Result]) -> list[Line]:
    """The paper's curves, in the colours of ours; the smallest size solid."""
    mela = next((i for i, result in enumerate(results) if result.training["family"] == "mela"), 3)
    colour = {"transformer_pp": 0, "mela": mela}
    return [
        Line(f"{REPORTED[c.model]} {SIZES[c.size]}", c.perplexity, colour[c.model], dashed=c.size != next(iter(SIZES)))
        for c in length_curves()
    ]


def _reported_table() -> Table:
    curves = length_curves()
    lengths = sorted({n for curve in curves for n in curve.perplexity})
    rows = [
        [f"{REPORTED[curve.model]} {SIZES[curve.size]}", *(number(curve.perplexity.get(n)) for n in lengths)]
        for curve in curves
    ]
    caption = f"{citation('mela')}."
    return table("Reported perplexity (not measured here)", ["model", *(f"{n:,}" for n in lengths)], rows, caption)


def _described(results: Sequence[Result], protocol: Protocol) -> str:
    """The end points of every curve, for readers who cannot see it."""
    curves = {result.label: result.perplexity(protocol) for result in results}
    ends = ", ".join(f"{name} {number(c[min(c)])} to {number(c[max(c)])}" for name, c in curves.items())
    return f"{PROTOCOLS[protocol].capitalize()}, shortest to longest context: {ends}."


def labels(results: Sequence[Result]) -> list[str]:
    """Short names for figures: without the words that all models share, such as `tiny`."""
    words = [result.label.split() for result in results]
    shared = set.intersection(*(set(w[1:]) for w in words)) if len(words) > 1 else set()
    return [" ".join([w[0], *(word for word in w[1:] if word not in shared)]) for w in words]


def source(results: Sequence[Result]) -> str:
    """Where the numbers of a table come from: what its runs share once, what differs with each run."""
    keys = {"commit": "commit", "data_digest": "data", "seed": "seed"}
    shared = [key for key in keys if len({result.training[key] for result in results}) == 1]
    common = [f"{keys[key]} {short(str(results[0].training[key]))}" for key in shared]
    runs = []
    for result in results:
        own = [f", {keys[key]} {short(str(result.training[key]))}" for key in keys if key not in shared]
        runs.append(f"{short(result.training['run_id'])} ({result.label}{''.join(own)})")
    return f"Source: {', '.join([*common, 'runs ' + ', '.join(runs)])}."
