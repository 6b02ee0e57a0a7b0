"""Measured costs against what can be worked out on paper. No speed is asserted, only that one comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from models import build_model, preset
from models.language_model import CausalLM, Cost, ModelConfig
from pipelines.measurement import (
    decode_speed,
    matmul_flops_per_second,
    measured_state_bytes,
    peak_memory_bytes,
    prefill_speed,
)

VOCAB = 64


class Stateless(CausalLM):
    """Logits are an embedding: reading `t` tokens allocates exactly the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.config = ModelConfig(vocab_size=VOCAB, width=1)
        self.table = nn.Embedding(VOCAB, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)

    def init_state(self, batch_size: int) -> None:
        return None

    def extend(self, tokens: Tensor, state: None) -> tuple[Tensor, None]:
        return self(tokens), None

    def cost(self, context: int) -> Cost:
        raise AssertionError("not asked for")


def tokens_of(length: int) -> Tensor:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(0))


def tiny(**fields: int) -> CausalLM:
    return build_model(
        preset("transformer_pp_tiny", vocab_size=VOCAB, width=16, heads=2, layers=2, hidden=32, **fields)
    )


def test_state_bytes_are_those_of_the_caches() -> None:
    """Keys and values, two layers, fp32, 16 wide; a chunk that is over leaves nothing."""
    per_token = 2 * 2 * 4 * 16
    contexts = (8, 40, 1500)
    assert measured_state_bytes(tiny(), tokens_of(1500), contexts) == {n: n * per_token for n in contexts}
    assert measured_state_bytes(tiny(chunk=16), tokens_of(40), (8, 40)) == {8: 8 * per_token, 40: 8 * per_token}


def test_a_cost_that_states_other_bytes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    stated = model.cost(8)
    monkeypatch.setattr(model, "cost", lambda context: replace(stated, state_bytes=stated.state_bytes + 4))
    with pytest.raises(AssertionError, match="cost\\(\\) says"):
        measured_state_bytes(model, tokens_of(8), (8,))


def test_peak_memory_is_weights_plus_what_is_alive_at_once() -> None:
    """Two slices of logits are alive together: the last one is still held when the next is computed."""
    weights, logits = 4 * VOCAB * VOCAB, 4 * VOCAB
    assert peak_memory_bytes(Stateless(), tokens_of(100), slice_tokens=100) == weights + 100 * logits
    assert peak_memory_bytes(Stateless(), tokens_of(96), slice_tokens=16) == weights + 2 * 16 * logits


def test_peak_memory_repeats_and_shows_what_grows_with_the_context(capfd: pytest.CaptureFixture[str]) -> None:
    full, chunked, tokens = tiny(), tiny(chunk=16), tokens_of(1024)
    peaks = [peak_memory_bytes(full, tokens[:n], slice_tokens=64) for n in (256, 1024, 1024)]
    assert peaks[0] < peaks[1] == peaks[2]
    assert peak_memory_bytes(chunked, tokens[:256], 64) == peak_memory_bytes(chunked, tokens, 64)
    assert capfd.readouterr() == ("", "")


def test_speeds_come_back() -> None:
    model = tiny()
    assert prefill_speed(model, tokens_of(64)) > 0
    assert decode_speed(model, tokens_of(64)) > 0
    assert matmul_flops_per_second() > 0
