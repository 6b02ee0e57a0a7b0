"""The figures of an ablation: effects over context length, a heat map of two factors, seeds, training, cost.

Every interval is Student's, at the level of the table, over differences paired by seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from pipelines.cells import Cell, distinct, plain
from pipelines.figures import FAINT, INK, MARKERS, PALETTE, Drawing, Line, Panel, canvas, draw, style
from pipelines.outcomes import lower_is_better
from pipelines.statistics import paired
from pipelines.sweeping.ablation import Ablation
from pipelines.tables import number

MOST_LINES, MOST_CURVES = 8, 16  # in one panel


def drawings(ablation: Ablation) -> list[Drawing]:
    """Every figure the table's data allow, in reading order."""
    makers = (effects_by_context, heat_map, seeds, learning_curves, frontier)
    return [drawing for make in makers if (drawing := make(ablation)) is not None]


def effects_by_context(ablation: Ablation) -> Drawing | None:
    """Per factor, the difference of each level to the baseline's, over cells that agree otherwise."""
    contexts = _contexts(ablation)
    base = _baseline(ablation)
    panels = []
    for factor in [name for name in base.levels if len(_levels(ablation, name)) > 1]:
        lines = []
        for kind, level in enumerate(level for level in _levels(ablation, factor) if level != base.levels[factor]):
            points, reach = {}, {}
            for context, measure in contexts.items():
                pairs = paired(_differences(ablation, measure, factor, level))
                if pairs.n >= 2:
                    low, high = pairs.interval(1 - ablation.rules.alpha)
                    points[context], reach[context] = float(pairs.mean), float(high - low) / 2
            if points:
                label = plain(level) if factor == "row" else f"{factor} = {plain(level)}"
                lines.append(Line(label, points, kind, reach=reach))
        if lines and len(lines) <= MOST_LINES:
            title = (
                "Difference to the baseline" if factor == "row" else f"{factor} against {plain(base.levels[factor])}"
            )
            mark = (ablation.sweep.context, "training length")
            panels.append(
                Panel(title, lines, "context (tokens)", "" if panels else "difference", False, zero=True, mark=mark)
            )
    if not panels or len(contexts) < 2:
        return None
    caption = (
        f"Difference in {_family(ablation)} to the baseline's level with {100 * (1 - ablation.rules.alpha):g} % "
        "intervals, averaged per seed over the cells that agree in every other factor. "
        f"{'Below' if lower_is_better(ablation.measures[0]) else 'Above'} the line is better."
    )
    said = "; ".join(
        f"{line.label}: {number(list(line.points.values())[-1], 3)} ± {number(list(line.reach.values())[-1], 3)}"
        for panel in panels
        for line in panel.lines
    )
    return draw("effects", panels, f"Effects at the longest context: {said}.", caption)


def heat_map(ablation: Ablation) -> Drawing | None:
    """Two factors: the mean of the judged measure in every cell."""
    factors = [name for name in _baseline(ablation).levels if len(_levels(ablation, name)) > 1]
    if len(factors) != 2:
        return None
    rows, columns = (_levels(ablation, name) for name in factors)
    values = np.full((len(rows), len(columns)), np.nan)
    for cell in ablation.sweep.cells():
        done = ablation.table.row(cell.name, ablation.measures[0])
        place = rows.index(cell.levels[factors[0]]), columns.index(cell.levels[factors[1]])
        values[place] = done[np.isfinite(done)].mean() if np.isfinite(done).any() else np.nan
    with style():
        figure, (axes,) = canvas(1, width=5.2)
        axes.imshow(
            values, cmap="Greys" if lower_is_better(ablation.measures[0]) else "Greys_r", alpha=0.35, aspect="auto"
        )
        axes.set_xticks(range(len(columns)), list(map(plain, columns)))
        axes.set_yticks(range(len(rows)), list(map(plain, rows)))
        axes.set(title=ablation.measures[0], xlabel=factors[1], ylabel=factors[0])
        for (i, j), value in np.ndenumerate(values):
            axes.text(j, i, number(value) if np.isfinite(value) else "–", ha="center", va="center", color=INK)
    best = np.nanmin(values) if lower_is_better(ablation.measures[0]) else np.nanmax(values)
    alt = f"{ablation.measures[0]} by {factors[0]} and {factors[1]}; the best cell has {number(float(best))}."
    return Drawing("heat_map", alt, f"Mean of {ablation.measures[0]} over seeds; darker is worse.", figure)


def seeds(ablation: Ablation) -> Drawing | None:
    """Every run of the judged measure: what the seeds do, beside what the cells do."""
    cells, values = ablation.table.cells, ablation.table.values(ablation.measures[0])
    if not np.isfinite(values).any() or len(ablation.seeds) < 2:
        return None
    with style():
        figure, (axes,) = canvas(1, height=1.2 + 0.28 * len(cells))
        for k, seed in enumerate(ablation.seeds):
            kind = k % len(PALETTE)
            axes.plot(
                values[:, k], range(len(cells)), MARKERS[kind], color=PALETTE[kind], label=f"seed {seed}", alpha=0.85
            )
        axes.plot(_means(values), range(len(cells)), "|", color=INK, markersize=13, label="mean")
        axes.set_yticks(range(len(cells)), cells)
        axes.invert_yaxis()
        axes.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.6)
        axes.set(title="Every run", xlabel=ablation.measures[0])
        axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    spread = max(float(np.ptp(row[np.isfinite(row)])) for row in values if np.isfinite(row).any())
    alt = f"{ablation.measures[0]} of every run; seeds of one cell lie up to {number(spread, 3)} apart."
    caption = "One mark per run. Seeds that move all cells together cancel in the differences, which are paired."
    return Drawing("seeds", alt, caption, figure)


def learning_curves(ablation: Ablation) -> Drawing | None:
    """Held-out loss against tokens, the mean over seeds of every arm."""
    lines = []
    for kind, cell in enumerate(ablation.table.cells):
        curves = [ablation.curves.get(f"{cell} · seed {seed}") for seed in ablation.seeds]
        arrays = [np.array(curve) for curve in curves if curve]
        if arrays and len({len(array) for array in arrays}) == 1:
            mean = np.mean(arrays, axis=0)
            lines.append(Line(cell, {int(tokens): float(loss) for _, tokens, loss in mean}, kind))
    if not 0 < len(lines) <= MOST_CURVES:
        return None
    panel = Panel("Held-out loss", lines, "tokens seen", "nats per token", log=False, contexts=False)
    ends = ", ".join(f"{line.label} {number(list(line.points.values())[-1], 3)}" for line in lines)
    caption = "Mean over seeds. Arms of one seed start from equal weights where shapes agree, and see the same batches."
    return draw("training", [panel], f"At the end: {ends}.", caption, height=max(3.4, 0.6 + 0.2 * len(lines)))


def frontier(ablation: Ablation) -> Drawing | None:
    """The judged measure against training compute; cells that no other beats in both are joined."""
    cost, value = (_means(ablation.table.values(name)) for name in ("training_flops_per_token", ablation.measures[0]))
    known = np.isfinite(cost) & np.isfinite(value)
    if known.sum() < 2 or len(set(cost[known])) < 2:
        return None
    better = value if lower_is_better(ablation.measures[0]) else -value
    cells = np.flatnonzero(known).tolist()
    front = [i for i in cells if not any(_dominates(j, i, cost, better) for j in cells)]
    front.sort(key=lambda i: cost[i])
    with style():
        figure, (axes,) = canvas(1)
        axes.plot(cost[front], value[front], color=PALETTE[0], linewidth=1.2)
        axes.plot(cost[known], value[known], "o", color=PALETTE[0])
        _name_points(axes, [(cost[i], value[i], ablation.table.cells[i]) for i in cells])
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set(title="Cost", xlabel="training FLOPs per token", ylabel=ablation.measures[0])
    names = ", ".join(ablation.table.cells[i] for i in front)
    caption = f"Means over seeds. Joined: no other cell is better at the same or lower cost ({names})."
    return Drawing("frontier", f"Cells on the frontier: {names}.", caption, figure)


def _dominates(j: int, i: int, cost: np.ndarray, better: np.ndarray) -> bool:
    at_least = cost[j] <= cost[i] and better[j] <= better[i]
    return bool(at_least and (cost[j] < cost[i] or better[j] < better[i]))


def _name_points(axes: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    for x, y, name in points:
        axes.annotate(name, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8)


def _means(values: np.ndarray) -> np.ndarray:
    """`[cells]`, over the seeds that are done; NaN where none is."""
    return np.array([row[np.isfinite(row)].mean() if np.isfinite(row).any() else np.nan for row in values])


def _baseline(ablation: Ablation) -> Cell:
    return next(cell for cell in ablation.sweep.cells() if cell.name == ablation.baseline)


def _levels(ablation: Ablation, factor: str) -> list[object]:
    return distinct(cell.levels.get(factor) for cell in ablation.sweep.cells())


def _family(ablation: Ablation) -> str:
    return ablation.measures[0].rpartition("/")[0]


def _contexts(ablation: Ablation) -> dict[int, str]:
    """Context -> measure, for the judged measure's kind."""
    family = f"{_family(ablation)}/"
    names = {name for outcome in ablation.outcomes for name in outcome.values if name.startswith(family)}
    lengths = sorted(int(name.removeprefix(family)) for name in names if name.removeprefix(family).isdigit())
    return {length: f"{family}{length}" for length in lengths}


def _differences(ablation: Ablation, measure: str, factor: str, level: object) -> np.ndarray:
    """`[seeds]`: cells with this level minus those with the baseline's that agree otherwise, averaged over pairs."""
    base = _baseline(ablation).levels[factor]
    cells = ablation.sweep.cells()
    pairs = [
        ablation.table.row(a.name, measure) - ablation.table.row(b.name, measure)
        for a in cells
        for b in cells
        if a.levels.get(factor) == level and b.levels.get(factor) == base and _rest(a, factor) == _rest(b, factor)
    ]
    return np.mean(pairs, axis=0) if pairs else np.full(len(ablation.seeds), np.nan)


def _rest(cell: Cell, factor: str) -> dict[str, object]:
    return {name: level for name, level in cell.levels.items() if name != factor}
