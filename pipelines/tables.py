"""One table, four prints: HTML, Markdown, plain text, and rich for the terminal.

A cell may carry a tip: where its number comes from. HTML shows it on hover; the other prints name the source once, in
the caption.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import rich.box
import rich.table
from rich.console import Console
from rich.measure import Measurement

MISSING = "–"


@dataclass(frozen=True)
class Cell:
    """A formatted value."""

    text: str
    tip: str = ""  # provenance, or an explanation
    strong: bool = False  # the best of its column, or a warning

    @classmethod
    def of(cls, value: Cell | str) -> Cell:
        return value if isinstance(value, Cell) else cls(value)


@dataclass(frozen=True)
class Table:
    """Rows under column headings (which may break at a newline, where space is short).

    Columns after the first `labels` ones hold numbers and align right. Rows that begin alike form a group.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    labels: int = 1

    def html(self) -> str:
        """A `<figure>` that scrolls sideways on narrow screens."""
        head = "".join(
            f'<th scope="col"{self._side(i)}>{escape(_flat(name))}</th>' for i, name in enumerate(self.columns)
        )
        body = "".join(self._row(row, before) for row, before in zip(self.rows, (None, *self.rows), strict=False))
        caption = f"<figcaption>{words(self.caption)}</figcaption>" if self.caption else ""
        return (
            f'<figure class="table"><div class="scroll"><table><caption>{escape(self.title)}</caption>\n'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>{caption}</figure>"
        )

    def markdown(self) -> str:
        """A pipe table under its title in bold, the caption below."""
        rule = ["---" if i < self.labels else "---:" for i in range(len(self.columns))]
        columns = [_flat(name) for name in self.columns]
        rows = [[f"**{c.text}**" if c.strong else c.text for c in row] for row in self.rows]
        lines = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in [columns, rule, *rows]]
        return "\n".join([f"**{self.title}**", "", *lines, *(["", self.caption] if self.caption else [])])

    def rich(self) -> rich.table.Table:
        """For a terminal: a group of equal first cells is named once and followed by an empty line."""
        table = rich.table.Table(title=self.title, box=rich.box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
        for i, name in enumerate(self.columns):
            table.add_column(name, justify="left" if i < self.labels else "right", no_wrap=True)
        group, grouped = None, len({row[0] for row in self.rows}) < len(self.rows)
        for row in self.rows:
            if grouped and group not in (None, row[0]):
                table.add_section()
            cells = [Cell("") if row[0] == group else row[0], *row[1:]]
            table.add_row(*(f"[bold]{cell.text}[/]" if cell.strong else cell.text for cell in cells))
            group = row[0]
        return table

    def text(self) -> str:
        """Plain text, as wide as it takes: nothing is cut off."""
        console, table = Console(file=io.StringIO(), width=1000, color_system=None, legacy_windows=False), self.rich()
        console.print(table, width=Measurement.get(console, console.options, table).maximum)
        assert isinstance(console.file, io.StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"

    def _row(self, row: tuple[Cell, ...], before: tuple[Cell, ...] | None) -> str:
        follow = ' class="follow"' if before is not None and before[0] == row[0] else ""
        return f"<tr{follow}>{''.join(self._html(i, cell) for i, cell in enumerate(row))}</tr>\n"

    def _side(self, column: int) -> str:
        return "" if column < self.labels else ' class="n"'

    def _html(self, column: int, cell: Cell) -> str:
        tip = f' title="{escape(cell.tip)}"' if cell.tip else ""
        text = f"<strong>{escape(cell.text)}</strong>" if cell.strong else escape(cell.text)
        if column == 0:
            return f'<th scope="row"{tip}>{text}</th>'
        return f"<td{self._side(column)}{tip}>{text}</td>"


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell | str]], caption: str = "", labels: int = 1
) -> Table:
    """A `Table` whose cells may be plain strings."""
    assert all(len(row) == len(columns) for row in rows), title
    return Table(title, tuple(columns), tuple(tuple(map(Cell.of, row)) for row in rows), caption, labels)


def words(text: str) -> str:
    """Text with `code` in backticks, as HTML."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _flat(heading: str) -> str:
    return heading.replace("\n", " ")


def number(value: float | None, digits: int = 2) -> str:
    """`1,234.50`; a dash for a missing value."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def count(value: float | None) -> str:
    """Three significant digits with k, M, G or T: `1.05M`; whole numbers below 10,000 as they are."""
    if value is None:
        return MISSING
    if abs(value) < 10_000:
        return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.3g}"
    for power, suffix in ((4, "T"), (3, "G"), (2, "M"), (1, "k")):
        if abs(value) >= 0.9995 * 1000**power:
            scaled = value / 1000**power
            return f"{scaled:.{max(0, 3 - len(str(int(scaled))))}f}{suffix}"
    raise AssertionError(value)


def size(value: float | None) -> str:
    """Bytes in binary units: `1.25 MiB`."""
    if value is None:
        return MISSING
    for power, suffix in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1024**power:
            return f"{value / 1024**power:.2f} {suffix}"
    return f"{value:.0f} B"


def percent(value: float | None, digits: int = 1) -> str:
    """A signed percentage of a fraction: `+1.3 %`."""
    return MISSING if value is None else f"{100 * value:+z.{digits}f} %".replace("-", "−")
