"""The report's figures: drawn once, printed as PNG, as SVG, and as SVG inside the page, where it follows its theme.

Special here:
- colours follow Okabe and Ito's, told apart under the common colour blindnesses; lines differ in marker, too, and are
  labelled at their ends;
- the same results give the same bytes.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import (
    EngFormatter,
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)
from matplotlib.transforms import offset_copy
from scipy.optimize import isotonic_regression

PALETTE = ("#0063a0", "#009e73", "#c66a9c", "#d55e00", "#45a0da", "#5c3317", "#c98a00", "#6a6a6a", "#5b3a9e")
DARK = (  # the same hues on a dark page
    "#4a90d9", "#2fc79b", "#e08cc4", "#ff7f3f", "#a5dcff", "#a0522d", "#f5c542", "#9a9a9a", "#a98bf5",
)  # fmt: skip
MARKERS = "os^DvPX<*"
INK, FAINT = "#1f2328", "#9aa0a6"
LABEL = 16  # points between a label and the end of the longest line, or a point that stands alone
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 17,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "path.simplify": False,
}


@dataclass(frozen=True)
class Line:
    """One labelled curve. `kind` fixes colour and marker, so that a model looks the same in every figure."""

    label: str
    points: Mapping[int, float]
    kind: int
    dashed: bool = False
    reach: Mapping[int, float] = field(default_factory=dict)  # half the interval at a point


@dataclass(frozen=True)
class Drawing:
    """A finished figure with the words that go with it."""

    name: str  # file name without suffix
    alt: str  # what a reader who cannot see it needs to know
    caption: str
    figure: Figure

    def png(self) -> bytes:
        """150 dots per inch on white."""
        return self._print("png", facecolor="white", metadata={"Software": None})

    def svg(self) -> str:
        """A document of its own, on white."""
        return self._print("svg", facecolor="white", metadata={"Date": None, "Creator": None}).decode()

    def inline(self) -> str:
        """For an HTML page: transparent, its colours CSS variables, its ids unique in the page."""
        text = self._print("svg", transparent=True, metadata={"Date": None, "Creator": None}).decode()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{self.name}-", text)
        for i, colour in enumerate(PALETTE):
            text = text.replace(colour, f"var(--line-{i})")
        text = (
            text.replace(INK, "var(--ink)")
            .replace(FAINT, "var(--faint)")
            .replace("'DejaVu Sans'", "system-ui, sans-serif")
        )
        return text.replace("<svg", f'<svg role="img" aria-label="{escape(self.alt)}"', 1)

    def _print(self, kind: str, **options: Any) -> bytes:
        buffer = io.BytesIO()
        with matplotlib.rc_context({**STYLE, "svg.hashsalt": self.name}):
            self.figure.savefig(buffer, format=kind, dpi=150, **options)
        return buffer.getvalue()


@dataclass(frozen=True)
class Panel:
    """One set of axes. A context axis (tokens or bytes) is logarithmic to base 2, any other x counts something whole.

    `log` makes the other axis logarithmic too.
    """

    title: str
    lines: Sequence[Line]
    x: str
    y: str = ""
    log: bool = True
    contexts: bool = True
    zero: bool = False  # a line at 0
    mark: tuple[float, str] | None = None  # a vertical line and its label, such as the training length


def canvas(columns: int, width: float = 10.5, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """An empty figure of the report's style and its axes side by side; to be drawn on inside `style()`."""
    figure, (axes,) = grid(1, columns, width, height)
    return figure, axes


def grid(rows: int, columns: int, width: float = 10.5, height: float = 3.4) -> tuple[Figure, list[list[Axes]]]:
    """As `canvas`, in rows: for small multiples."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [list(row) for row in figure.subplots(rows, columns, squeeze=False)]


def spare_kinds(taken: Collection[int]) -> Iterator[int]:
    """Kinds of lines for what is no model, from the far end of the palette; over again when they run out."""
    kinds = range(len(PALETTE))
    return itertools.cycle([kind for kind in reversed(kinds) if kind not in taken] or kinds)


def style() -> Any:
    """The context in which everything is drawn."""
    return matplotlib.rc_context(STYLE)


def draw(name: str, panels: Sequence[Panel], alt: str, caption: str, height: float = 3.4) -> Drawing:
    """Panels side by side, each with its own scale."""
    with style():
        figure, places = canvas(len(panels), height=height)
        for axes, panel in zip(places, panels, strict=True):
            _draw(axes, panel)
        figure.canvas.draw()
        figure.set_layout_engine("none")
        for axes in figure.axes:
            _spread(axes)
    return Drawing(name, alt, caption, figure)


def _draw(axes: Axes, panel: Panel) -> None:
    axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    axes.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    right = max((x for line in panel.lines for x in line.points), default=0)
    for line in panel.lines:
        xs, ys = list(line.points), list(line.points.values())
        colour, marker = PALETTE[line.kind % len(PALETTE)], MARKERS[line.kind % len(MARKERS)]
        every = max(1, len(xs) // 10)
        axes.plot(xs, ys, color=colour, marker=marker, markevery=every, linestyle=(0, (4, 2)) if line.dashed else "-")
        if line.reach:
            axes.errorbar(xs, ys, [line.reach[x] for x in xs], fmt="none", ecolor=colour, elinewidth=1, capsize=2.5)
        axes.annotate(
            line.label,
            (xs[-1], ys[-1]),
            xytext=(right if len(xs) > 1 else xs[0], ys[-1]),
            textcoords=offset_copy(axes.transData, axes.get_figure(root=True), x=LABEL, units="points"),
            va="center",
            fontsize=8.5,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 1,
                "linestyle": ":" if len(xs) > 1 and xs[-1] < right else "-",
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 3,
            },
        )
    if panel.contexts:
        ticks = sorted({x for line in panel.lines for x in line.points}, reverse=True)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(ticks[:: 1 + len(ticks) // 7]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(_tokens))
    else:
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if panel.log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high / low > 5 else MaxNLocator(6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_minor_locator(NullLocator())
    if panel.zero:
        axes.axhline(0, color=FAINT, linewidth=1)
    if panel.mark:
        x, label = panel.mark
        axes.axvline(x, color=FAINT, linewidth=1, linestyle=":")
        place = {"xycoords": ("data", "axes fraction"), "xytext": (0, 3), "textcoords": "offset points"}
        axes.annotate(label, (x, 1), **place, ha="left", va="bottom", fontsize=8, color=FAINT)


def _spread(axes: Axes) -> None:
    """Move the labels at the line ends apart: the least squares shift that leaves a line's height between them."""
    labels = [t for t in axes.texts if isinstance(t, Annotation) and t.get_annotation_clip() is False]
    height = 10.5 * axes.figure.dpi / 72
    wanted = [(axes.transData.transform(label.xy)[1], i) for i, label in enumerate(labels)]
    wanted.sort()
    gaps = np.arange(len(labels)) * height
    placed = isotonic_regression(np.array([y for y, _ in wanted]) - gaps).x + gaps
    for (_, i), target in zip(wanted, placed, strict=True):
        labels[i].xyann = (labels[i].xyann[0], axes.transData.inverted().transform((0, target))[1])


def _tokens(value: float, _: object = None) -> str:
    """A number of tokens or bytes as an axis shows it: 512, 4K, 2.5M."""
    for unit, letter in ((2**20, "M"), (2**10, "K")):
        if value >= unit and value % (unit / 4) == 0:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"
