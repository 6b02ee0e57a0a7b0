"""MELT in the report, gates: how much of a token's memory each layer keeps from loop to loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.ticker import NullLocator

from pipelines.figures import FAINT, INK, PALETTE, Drawing, grid, style
from pipelines.looped_results import Pair
from pipelines.sections import Block, Section, source
from pipelines.tables import Cell, Table, number, table

EDGE = 0.1  # gates closer than this to 0 or 1 all but replace or keep the memory


def gates(pairs: Sequence[Pair]) -> Section:
    """Distributions of gate values by layer and loop."""
    blocks: list[Block] = []
    for pair in pairs:
        name = pair.student.label
        if pair.gates is None:
            blocks.append(f"{name}: `gates.csv` is missing in its training folder: distill it again.")
        elif pair.gates.empty:
            blocks.append(f"{name}: one loop needs no gate.")
        else:
            blocks += [_figure(pair, pair.gates), _table(pair, pair.gates)]
    return Section("gates", "MELT: gate values", tuple(blocks))


def _figure(pair: Pair, histograms: pd.DataFrame) -> Drawing:
    """A small histogram per layer (down) and loop (across), on one scale."""
    layers, loops = sorted(histograms.layer.unique()), sorted(histograms.loop.unique())
    tallest, kind = float(histograms.share.max()), pair.places[0] % len(PALETTE)
    with style():
        figure, places = grid(len(layers), len(loops), height=0.7 + 1.15 * len(layers))
        for row, layer in enumerate(layers):
            for column, loop in enumerate(loops):
                axes, bins = places[row][column], _bins(histograms, layer, loop)
                edges = [*bins["from"], bins["to"].iloc[-1]]
                axes.stairs(bins.share, edges, fill=True, color=PALETTE[kind], alpha=0.6)
                axes.axvline(_mean(bins), color=INK, linewidth=1, linestyle=":")
                axes.set(xlim=(0, 1), ylim=(0, 1.05 * tallest))
                axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
                axes.yaxis.set_major_locator(NullLocator())
                axes.spines["left"].set_color(FAINT)
                if row == 0:
                    axes.set_title(f"loop {loop}", pad=6)
                if column == 0:
                    axes.set_ylabel(f"layer {layer}")
                if row == len(layers) - 1:
                    axes.set_xlabel("gate z")
                else:
                    axes.tick_params(labelbottom=False)
    means = ", ".join(
        f"layer {layer} loop {loop} {number(_mean(_bins(histograms, layer, loop)))}"
        for layer in layers
        for loop in loops
    )
    caption = (
        "Share of gate values in equal parts of 0 to 1, on held-out text, all panels on one scale; dotted: their mean. "
        "In each loop the memory becomes z times what it was, and 1 − z times the new stream: at 0 the new "
        f"stream replaces it, at 1 the memory stays. {source([pair.student])}"
    )
    return Drawing(
        f"gates_{pair.student.name}", f"Gate values of {pair.student.label}, means: {means}.", caption, figure
    )


def _table(pair: Pair, histograms: pd.DataFrame) -> Table:
    rows = []
    for layer, loop in sorted(set(zip(histograms.layer, histograms.loop, strict=True))):
        bins = _bins(histograms, layer, loop)
        low, high = bins.share[bins.to <= EDGE + 1e-9].sum(), bins.share[bins["from"] >= 1 - EDGE - 1e-9].sum()
        texts = (number(_mean(bins)), f"{low:.1%}", f"{high:.1%}")
        rows.append([f"layer {layer}", f"loop {loop}", *(Cell(text, pair.student.provenance) for text in texts)])
    columns = ("layer", "loop", "mean", f"below {EDGE:g}", f"above {1 - EDGE:g}")
    caption = f"Means of the histograms above. The first loop has no gate. {source([pair.student])}"
    return table(f"Gate values of {pair.student.label}", columns, rows, caption, labels=2)


def _bins(histograms: pd.DataFrame, layer: int, loop: int) -> pd.DataFrame:
    return histograms.loc[(histograms.layer == layer) & (histograms.loop == loop)].sort_values(by="from")


def _mean(bins: pd.DataFrame) -> float:
    """Of a histogram, each value taken for the middle of its part."""
    return float(np.average((bins["from"] + bins["to"]) / 2, weights=bins.share))
