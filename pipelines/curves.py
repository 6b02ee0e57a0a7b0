"""The sections that show curves: perplexity by position, and the loss while training."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.figures import Line, Panel, draw
from pipelines.results import BUCKET, Result, tokens_before
from pipelines.sections import Section, labels, source
from pipelines.tables import number

SMOOTHED = 16  # logged steps in the running mean of the training loss
DISTILLED = (
    "A student minimises the divergence from its teacher, in the second phase with the distance between attended "
    "values added; its validation loss is drawn after the tokens of its teacher's training."
)


def position(results: Sequence[Result]) -> Section:
    """Perplexity by position in the longest context, inside a text chunk, and in one streamed document."""
    longest, trained = results[0].contexts[-1], results[0].training_context
    kinds = {
        "position": (f"In a window of {longest:,} tokens", "tokens read so far"),
        "stream": ("In one streamed document", "tokens read so far"),
        "chunk": ("Inside a text chunk", "position in the chunk"),
    }
    panels = []
    for kind, (title, x) in kinds.items():
        lines = _lines(results, [result.position_curve(kind) for result in results])
        mark = (trained, "training length") if kind != "chunk" else None
        if lines:
            panels.append(Panel(title, lines, x, "" if panels else "perplexity", contexts=kind != "chunk", mark=mark))
    if not panels:
        nothing = f"Fewer than {BUCKET} tokens were scored at any position: raise `evaluate.windows`."
        return Section("position", "Perplexity by position", (nothing,))
    caption = (
        "Perplexity of the tokens in each bucket of positions, drawn at its last position; "
        f"buckets of fewer than {BUCKET} tokens are left out. "
        "A memory should make the first tokens of a chunk easier; a model that does not extrapolate rises to the right "
        "of the training length. Only models whose state stays small are streamed through a whole document. "
        + source(results)
    )
    return Section("position", "Perplexity by position", (draw("position", panels, _ends(panels), caption),))


def training(results: Sequence[Result]) -> Section:
    """Training and validation loss against tokens seen."""
    scratch = [_train_loss(result) if result.teacher is None else {} for result in results]
    distilled = [_train_loss(result) if result.teacher is not None else {} for result in results]
    validation = [_validation_loss(result, tokens_before(result, results)) for result in results]
    shown = {"Training loss": scratch, "Distillation loss": distilled, "Validation loss": validation}
    panels = []
    for title, curves in shown.items():
        lines, y = _lines(results, curves), "" if panels else "nats per token"
        if lines:
            panels.append(Panel(title, lines, "tokens seen", y, log=False, contexts=False))
    notes = [
        "Models trained from scratch with one seed and batch size see the same batches in the same order.",
        f"Training loss: running mean over {SMOOTHED} logged steps.",
        *(["A looped model minimises the mean over its exits, not the last loop's loss."] if _loops(results) else []),
        *([DISTILLED] if any(distilled) else []),
    ]
    caption = f"{' '.join(notes)} {source(results)}"
    return Section("training", "Training", (draw("training", panels, _ends(panels), caption),))


def _loops(results: Sequence[Result]) -> bool:
    return any(result.looped and result.teacher is None for result in results)


def _lines(results: Sequence[Result], curves: Sequence[dict[int, float]]) -> list[Line]:
    """A line per result that has a curve."""
    names = labels(results)
    return [Line(names[i], curve, i) for i, curve in enumerate(curves) if curve]


def _train_loss(result: Result) -> dict[int, float]:
    rows = result.loss.dropna(subset="train_loss")
    smooth = rows.train_loss.rolling(SMOOTHED, min_periods=1).mean()
    return dict(zip(rows.tokens.tolist(), smooth.tolist(), strict=True))


def _validation_loss(result: Result, before: int) -> dict[int, float]:
    """By tokens seen, `before` of them by its teacher."""
    rows = result.loss.dropna(subset="validation_loss")
    return dict(zip((before + rows.tokens).tolist(), rows.validation_loss.tolist(), strict=True))


def _ends(panels: Sequence[Panel]) -> str:
    """Every curve's last value, for readers who cannot see it."""
    return " ".join(
        f"{panel.title}, right end: "
        + ", ".join(f"{line.label} {number(list(line.points.values())[-1])}" for line in panel.lines)
        + "."
        for panel in panels
    )
