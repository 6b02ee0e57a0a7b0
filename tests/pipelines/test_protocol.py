"""The protocol on models whose loss at every target has a closed form."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from models.configuration import ConfigError
from pipelines.config import StageError
from pipelines.protocol import (
    Summary,
    Window,
    by_chunk_position,
    by_document,
    by_position,
    choose_windows,
    controlled,
    score,
    select,
    stream,
    summarise,
)
from tests.pipelines.toys import VOCAB, Bigram, Positional, positional_loss


def windows_of(count: int, longest: int) -> Tensor:
    return torch.randint(VOCAB, (count, longest + 1), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("batch_tokens", [4, 16, 1000])
@pytest.mark.parametrize("context", [4, 8, 16])
def test_every_target_is_scored_once_after_exactly_its_piece(context: int, batch_tokens: int) -> None:
    windows = windows_of(3, 16)
    losses = score(Positional(), windows, context, batch_tokens)
    expected = [[positional_loss(i % context, int(row[i + 1])) for i in range(16)] for row in windows]
    torch.testing.assert_close(losses, torch.tensor(expected), atol=1e-5, rtol=0)


def test_fixed_targets_are_the_same_tokens_at_every_context() -> None:
    """A bigram sees no context, so equal losses at every length mean equal targets."""
    model, windows = Bigram(), windows_of(5, 32)
    closed_form = functional.cross_entropy(model.table[windows[:, :-1]].flatten(0, 1), windows[:, 1:].flatten())
    by_context = {context: score(model, windows, context, 64) for context in (8, 16, 32)}
    for losses in by_context.values():
        assert torch.equal(select("fixed_targets", losses, 6), select("fixed_targets", by_context[8], 6))
        assert select("window_mean", losses, 6).mean().item() == pytest.approx(closed_form.item(), abs=1e-6)
    assert torch.equal(select("fixed_targets", windows[:, 1:], 6), windows[:, -6:])


def test_fixed_targets_are_read_from_pieces_that_end_with_the_window() -> None:
    windows = windows_of(2, 32)
    for context in (8, 16, 32):
        losses = select("fixed_targets", score(Positional(), windows, context, 64), 6)
        expected = [[positional_loss(context - 6 + i, int(row[27 + i])) for i in range(6)] for row in windows]
        torch.testing.assert_close(losses, torch.tensor(expected), atol=1e-5, rtol=0)


def test_long_pieces_are_streamed_in_bounded_slices() -> None:
    model, windows = Positional(), windows_of(4, 64)
    streamed = score(model, windows, 64, 16)
    assert {call[0] for call in model.calls} == {"extend"}
    assert all(math.prod(shape) <= 16 for _, _, shape in model.calls)
    assert torch.equal(streamed, score(Positional(), windows, 64, 10_000))


def test_stream_yields_the_logits_of_forward() -> None:
    model, tokens = Positional(), windows_of(2, 12)
    logits = torch.cat([part for part, _ in stream(model, tokens, 5)], dim=1)
    assert torch.equal(logits, model(tokens))


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("batch_tokens", [1, 8, 24])
def test_shuffle_never_meets_a_batch_of_one(count: int, batch_tokens: int) -> None:
    model = Positional()
    with controlled(model, "shuffle"):
        score(model, windows_of(count, 8), 8, batch_tokens)
        score(model, windows_of(count, 8), 4, batch_tokens)
    assert all(control == "shuffle" and shape[0] >= 2 for _, control, shape in model.calls)


def test_controlled_puts_control_and_mode_back() -> None:
    model = Positional().train()
    with controlled(model, "shuffle"):
        assert (model.control, model.training) == ("shuffle", False)
    assert (model.control, model.training) == ("on", True)
    with pytest.raises(ConfigError, match="zero"), controlled(model, "zero"):
        pass


def test_progress_counts_every_target() -> None:
    counted: list[int] = []
    score(Positional(), windows_of(5, 16), 8, 30, counted.append)
    assert sum(counted) == 5 * 16


def test_a_loss_that_is_not_finite_is_refused() -> None:
    model = Bigram()
    model.table[0] = math.nan
    with pytest.raises(StageError, match="not finite at context 8"):
        score(model, windows_of(2, 8), 8, 64)


@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=12), limit=st.integers(1, 30))
def test_windows_are_disjoint_inside_their_document_and_even(lengths: list[int], limit: int) -> None:
    room = [length // 10 for length in lengths]
    if not any(room):
        with pytest.raises(ConfigError, match=f"has 10 tokens; the longest has {max(lengths)}"):
            choose_windows(lengths, 10, limit)
        return
    windows = choose_windows(lengths, 10, limit)
    assert windows == choose_windows(lengths, 10, limit)
    assert len(windows) == len(set(windows)) == min(limit, sum(room))
    assert all(window.start % 10 == 0 and window.start + 10 <= lengths[window.document] for window in windows)
    share = Counter(window.document for window in windows)
    assert len(share) == min(limit, sum(1 for places in room if places))
    for document, count in share.items():  # nobody has two more than a document that had room for more
        assert all(count <= other + 1 for each, other in share.items() if other < room[each]), (document, share)


def test_windows_of_different_documents_are_neighbours() -> None:
    windows = choose_windows([1000, 30, 1000], 10, 6)
    assert [window.document for window in windows] == [0, 1, 2, 0, 1, 2]
    assert [window.start for window in windows] == [250, 0, 250, 750, 20, 750]


def test_perplexity_and_bits_per_byte() -> None:
    """Two tokens of 2 nats each that stand for "é" and "あ", 2 + 3 bytes."""
    summary = summarise(torch.tensor([[2.0, 2.0]]), torch.tensor([[2, 3]]))
    assert summary == Summary(tokens=2, loss_sum=4.0, byte_count=5)
    assert summary.perplexity == pytest.approx(math.e**2)
    assert summary.bits_per_byte == pytest.approx(4 / math.log(2) / 5)


def test_positions_cover_every_token_once() -> None:
    losses = torch.arange(12.0).repeat(2, 2)  # [2, 24]: pieces of 12, the loss is the position
    buckets = by_position(losses, 12)
    assert [(start, end) for start, end, _ in buckets] == [(0, 1), (1, 2), (2, 4), (4, 8), (8, 12)]
    assert [summary.tokens for _, _, summary in buckets] == [4, 4, 8, 16, 16]
    assert [summary.loss_sum / summary.tokens for *_, summary in buckets] == [0, 1, 2.5, 5.5, 9.5]
    assert by_position(losses, 1)[0][:2] == (0, 1)


def test_chunk_positions_leave_out_a_cut_chunk() -> None:
    losses = torch.arange(12.0).repeat(2, 2)
    buckets = by_chunk_position(losses, 12, 5)
    assert [(start, end) for start, end, _ in buckets] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert [summary.loss_sum for *_, summary in buckets] == [4 * (i + 5 + i) for i in range(5)]
    assert [end for _, end, _ in by_chunk_position(torch.zeros(1, 64), 64, 64)] == list(range(4, 65, 4))


def test_documents_add_up_to_the_total() -> None:
    losses = torch.rand(5, 8, dtype=torch.float64)
    windows = [Window(document, 0) for document in (3, 1, 3, 7, 1)]
    documents = by_document(losses, windows)
    assert list(documents) == [1, 3, 7]
    assert documents[1].tokens == 16
    assert sum(summary.loss_sum for summary in documents.values()) == pytest.approx(losses.sum().item())
