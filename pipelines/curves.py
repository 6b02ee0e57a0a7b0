"""The sections that show curves: perplexity by position, and the loss while training."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.figures import Line, Panel, draw
from pipelines.results import BUCKET, Result
from pipelines.sections import Section, labels, source
from pipelines.tables import number

SMOOTHED = 16  # logged steps in the running mean of the training loss


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
    panels = [
        Panel("Training loss", _lines(results, [_train_loss(r) for r in results]), "tokens seen", "nats per token",
              log=False, contexts=False),
        Panel("Validation loss", _lines(results, [_validation_loss(r) for r in results]), "tokens seen",
              log=False, contexts=False),
    ]  # fmt: skip
    caption = (
        "Models of one seed see the same batches in the same order. "
        f"Training loss: running mean over {SMOOTHED} logged steps. {source(results)}"
    )
    return Section("training", "Training", (draw("training", panels, _ends(panels), caption),))


def _lines(results: Sequence[Result], curves: Sequence[dict[int, float]]) -> list[Line]:
    """A line per result that has a curve."""
    names = labels(results)
    return [Line(names[i], curve, i) for i, curve in enumerate(curves) if curve]


def _train_loss(result: Result) -> dict[int, float]:
    rows = result.loss.dropna(subset="train_loss")
    smooth = rows.train_loss.rolling(SMOOTHED, min_periods=1).mean()
    return dict(zip(rows.tokens.tolist(), smooth.tolist(), strict=True))


def _validation_loss(result: Result) -> dict[int, float]:
    rows = result.loss.dropna(subset="validation_loss")
    return dict(zip(rows.tokens.tolist(), rows.validation_loss.tolist(), strict=True))


def _ends(panels: Sequence[Panel]) -> str:
    """Every curve's last value, for readers who cannot see it."""
    return " ".join(
        f"{panel.title}, right end: "
        + ", ".join(f"{line.label} {number(list(line.points.values())[-1])}" for line in panel.lines)
        + "."
        for panel in panels
    )
