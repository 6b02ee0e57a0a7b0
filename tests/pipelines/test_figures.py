"""Figures repeat to the byte, keep their labels apart, and follow the page's theme."""

from __future__ import annotations

import io
import itertools
import re
import xml.etree.ElementTree as ElementTree

import matplotlib.image
import numpy as np
import pytest
from matplotlib.text import Text

from pipelines.figures import DARK, INK, MARKERS, PALETTE, Line, Panel, draw

CLOSE = [Line(f"model {i}", {512: 50 + 0.01 * i, 4096: 50 + 0.01 * i}, i) for i in range(5)]


@pytest.fixture(scope="module")
def drawing():
    panels = [
        Panel("Left", CLOSE, "context length (tokens)", "perplexity", mark=(512, "training length")),
        Panel("Right", [Line("alone", {1: 2.0, 10_000: 1.0}, 0, dashed=True)], "tokens", log=False, contexts=False),
    ]
    return draw("name", panels, 'five models & "one"', "caption")


def test_the_same_figure_is_the_same_bytes(drawing):
    again = draw("name", [Panel("Left", CLOSE, "x")], "alt", "caption")
    assert drawing.png() == drawing.png()
    assert drawing.svg() == drawing.svg()
    assert again.png() == draw("name", [Panel("Left", CLOSE, "x")], "alt", "caption").png()


def test_labels_of_lines_that_end_together_do_not_overlap(drawing):
    labels = sorted(
        (box.y0, box.y1) for text in drawing.figure.axes[0].texts[:5] for box in [Text.get_window_extent(text)]
    )
    assert all(upper_low >= low_high - 1 for (_, low_high), (upper_low, _) in itertools.pairwise(labels))


def test_png_is_white_paper_with_ink_inside_its_edges(drawing):
    pixels = matplotlib.image.imread(io.BytesIO(drawing.png()))[:, :, :3]
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert (edge == 1).all(), "a label or a line is cut off"
    assert pixels.min() < 0.2


def test_the_inline_figure_takes_colours_and_fonts_from_the_page(drawing):
    text = drawing.inline()
    root = ElementTree.fromstring(text)
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == drawing.alt
    assert not re.findall("|".join([*PALETTE, INK]), text)
    assert "var(--line-4)" in text
    assert "var(--ink)" in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert all(each.startswith("name-") for each in ids)
    assert {each[1:] for each in re.findall(r'(?:href="|url\()(#[^")]+)', text)} <= set(ids)


def test_every_colour_has_its_counterpart_on_dark_paper_and_a_marker_of_its_own():
    assert len(PALETTE) == len(DARK) == len(MARKERS) == len({*PALETTE}) == len({*DARK}) == len({*MARKERS})
    for colours, paper in ((PALETTE, "#ffffff"), (DARK, "#14171c")):
        assert min(_contrast(colour, paper) for colour in colours) > 2.8


def _contrast(a: str, b: str) -> float:
    """WCAG 2 contrast ratio."""
    light, dark = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])
