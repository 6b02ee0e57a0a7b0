"""A table says the same in every print, and hides nothing."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from pipelines.tables import Cell, count, number, percent, size, table

ROWS = [
    ["Mela & <co>", "512", Cell("50.4", "run 1234")],
    ["Mela & <co>", "1,024", Cell("49.1", strong=True)],
    ["a|b", "512", "–"],
]
TABLE = table("Perplexity", ("model", "context", "perplexity,\nsame targets"), ROWS, "Source: `artifacts/x`.")


class Texts(HTMLParser):
    """The texts and tips of every cell."""

    def __init__(self):
        super().__init__()
        self.open, self.cells, self.tips = [], [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
            self.tips.append(dict(attrs).get("title", ""))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "tr" in self.open:
            self.cells[-1] += data


def test_html_is_well_formed_escaped_and_carries_the_tips():
    parser = Texts()
    parser.feed(TABLE.html())
    assert parser.open == []
    assert parser.cells[:3] == ["model", "context", "perplexity, same targets"]
    assert parser.cells[3:] == [Cell.of(cell).text for row in ROWS for cell in row]
    assert parser.tips[5] == "run 1234"
    assert "<code>artifacts/x</code>" in TABLE.html()


def test_markdown_keeps_its_columns_whatever_is_in_a_cell():
    lines = [line for line in TABLE.markdown().splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {4}
    assert lines[1] == "| --- | ---: | ---: |"
    assert "**49.1**" in lines[3]


def test_text_is_as_wide_as_it_takes_and_names_a_group_once():
    wide = table("T", ("model", "value"), [["x" * 300, "1"], ["x" * 300, "2"], ["y", "3"]])
    text = wide.text()
    assert text.count("x" * 300) == 1
    assert "…" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_row_of_another_length_is_a_bug():
    with pytest.raises(AssertionError, match="broken"):
        table("broken", ("a", "b"), [["1"]])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (7, "7"), (9999, "9,999"), (0.5, "0.5"), (12.34, "12.3"), (310.6, "311"), (10_000, "10.0k"),
        (999_400, "999k"), (999_600, "1.00M"), (1_048_576, "1.05M"), (6.5e9, "6.50G"), (3.2e12, "3.20T"), (None, "–"),
    ],
)  # fmt: skip
def test_counts_have_three_digits(value, text):
    assert count(value) == text


def test_other_numbers():
    assert [size(n) for n in (0, 1023, 1024, 1.5 * 2**20, 2**31, None)] == [
        "0 B", "1023 B", "1.00 KiB", "1.50 MiB", "2.00 GiB", "–",
    ]  # fmt: skip
    assert [percent(0.0131), percent(-0.5), percent(-1e-5), percent(None)] == ["+1.3 %", "−50.0 %", "+0.0 %", "–"]
    assert [number(1234.5), number(1.23456, 3), number(None)] == ["1,234.50", "1.235", "–"]
