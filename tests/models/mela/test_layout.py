"""Where patches, chunks and memory rows meet, against a count one token at a time."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.mela.config import MelaConfig
from models.mela.layout import (
    Piece,
    chunks_written,
    least_context,
    memory_rows,
    memory_span,
    patch_capacity,
    patches_read,
    pieces,
    positions,
)


def config_of(view: Any = "previous", patch_size=2, memory_chunk=3, text_chunk=8, memory_tokens=3) -> MelaConfig:
    return MelaConfig(
        patch_size=patch_size,
        memory_chunk=memory_chunk,
        text_chunk=text_chunk,
        memory_tokens=memory_tokens,
        memory_view=view,
    )


@given(begin=st.integers(0, 60), length=st.integers(1, 60))
def test_pieces_are_the_tokens_in_order_and_cross_no_chunk(begin, length):
    parts = pieces(config_of(), begin, begin + length)
    tokens = [token for piece in parts for token in range(piece.start, piece.start + piece.tokens)]
    assert tokens == list(range(begin, begin + length))
    for piece in parts:
        assert piece.start % 8 + piece.length <= 8
        assert piece.chunks == 1 or (piece.start % 8, piece.length) == (0, 8)


@pytest.mark.parametrize("view", ["previous", "causal"])
@pytest.mark.parametrize("memory_tokens", [1, 3, 6])
@given(cuts=st.sets(st.integers(1, 39)))
def test_memory_rows_come_once_and_as_soon_as_their_patch_is_over(view, memory_tokens, cuts):
    config = config_of(view, memory_tokens=memory_tokens)
    edges = [0, *sorted(cuts), 40]
    rows: dict[int, list[int]] = {}
    for begin, end in pairwise(edges):
        for piece in pieces(config, begin, end):
            for chunk in range(piece.chunks):
                lower, upper = memory_span(config, Piece(piece.start + 8 * chunk, piece.length))
                rows.setdefault(piece.start // 8 + chunk, []).extend(range(lower, upper))
    for chunk, patches in rows.items():
        before, own = 4 * chunk, 4 if view == "causal" else 0
        assert patches == list(range(before - memory_tokens, before + own))


def test_positions_in_both_views():
    assert positions(config_of(), Piece(8, 8)) == [0, 1, 2, *range(3, 11)]
    assert positions(config_of(), Piece(11, 2)) == [6, 7]
    causal = config_of("causal")
    assert positions(causal, Piece(8, 8)) == [0, 1, 2, 4, 6, 8, 10, *range(3, 11)]  # patches end at tokens 1, 3, 5, 7
    assert positions(causal, Piece(9, 3)) == [4, 6, 4, 5, 6]


@pytest.mark.parametrize("view", ["previous", "causal"])
def test_what_is_read_and_written(view):
    config = config_of(view)
    for length in range(1, 40):
        tokens = range(length)
        ends = [2 * patch + 1 for patch in range(length // 2)]
        limit = {"previous": tokens[-1] // 8 * 8 - 1, "causal": tokens[-1]}[view]
        read = sum(end <= limit for end in ends)
        assert patches_read(config, length) == read
        assert chunks_written(config, read) == sum(3 * (chunk + 1) < read for chunk in range(20))
        runs = chunks_written(config, read) > 0
        assert (length >= least_context(config)) == runs
        assert (length >= least_context(replace(config, neural_memory=False))) == (read > 0)
    assert least_context(MelaConfig(memory="none")) == 1
    assert memory_rows(config, 5) == (3 if view == "previous" else 5)
    assert patch_capacity(config) == (6 if view == "previous" else 2)
    assert patches_read(MelaConfig(memory="none"), 1000) == 0
