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

from pipelines.figures import DARK, INK, MARKERS, PALETTE, Line, Panel, draw, spare_kinds

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


def test_six_models_can_be_told_apart_by_colour_alone():
    """A distance of 0.1 in OKLab is several times what is just noticed side by side."""
    for colours in (PALETTE, DARK):
        apart = [np.linalg.norm(_oklab(a) - _oklab(b)) for a, b in itertools.combinations(colours[:6], 2)]
        assert min(apart) > 0.13
    assert list(itertools.islice(spare_kinds([0, 8]), 3)) == [7, 6, 5]
    assert next(spare_kinds(range(len(PALETTE)))) in range(len(PALETTE))


def test_a_line_that_ends_early_has_its_label_where_no_other_line_runs():
    lines = [Line("short", {0: 2.0, 100: 1.0}, 0), Line("long", {0: 1.5, 1000: 1.1}, 1)]
    figure = draw("name", [Panel("Left", lines, "tokens", log=False, contexts=False)], "alt", "caption").figure
    (axes,) = figure.axes
    edge = axes.transData.transform((1000, 0))[0]
    assert all(Text.get_window_extent(text).x0 > edge for text in axes.texts)


def _oklab(colour: str) -> np.ndarray:
    """Ottosson 2020."""
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    cones = np.cbrt(
        np.array([[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]) @ linear
    )
    return np.array([[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]) @ cones


def _contrast(a: str, b: str) -> float:
    """WCAG 2 contrast ratio."""
    light, dark = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])
