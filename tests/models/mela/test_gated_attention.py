"""Gated attention against Qwen3-Next's, and its chunks."""

from typing import Any

import pytest
import torch
from torch import nn

from models.layers import rope
from models.mela.memory_block import GatedAttention


def attention_of(gate: Any = "elementwise", width: int = 16, heads: int = 4, chunk: int = 5) -> GatedAttention:
    torch.manual_seed(0)
    return GatedAttention(width, heads, chunk, gate).double()


def rows(length: int, width: int = 16) -> torch.Tensor:
    return torch.randn(2, length, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_it_is_that_of_qwen3_next():
    """Elementwise gates, rotary positions, one chunk; Qwen's norms of queries and keys taken out."""
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

    ours, x = attention_of(chunk=7), rows(7)
    config = Qwen3NextConfig(hidden_size=16, num_attention_heads=4, num_key_value_heads=4, head_dim=4)
    config._attn_implementation = "eager"
    theirs = Qwen3NextAttention(config, layer_idx=0).double()
    theirs.q_norm = theirs.k_norm = nn.Identity()  # type: ignore[assignment]
    assert ours.gate_proj is not None
    both = torch.stack((ours.q_proj.weight.view(4, 4, 16), ours.gate_proj.weight.view(4, 4, 16)), dim=1)
    with torch.no_grad():
        theirs.q_proj.weight.copy_(both.reshape(32, 16))  # per head: queries, then gates
        for name in ("k_proj", "v_proj", "o_proj"):
            getattr(theirs, name).weight.copy_(getattr(ours, name).weight)
        cos, signed = rope(torch.arange(7), 4, 10000.0)
        sin = signed * torch.tensor([-1, -1, 1, 1])  # our tables carry the sign of each half
        mask = torch.full((7, 7), float("-inf"), dtype=torch.float64).triu(1)
        expected, _ = theirs(x, (cos[None].double(), sin[None].double()), mask[None, None])
        torch.testing.assert_close(ours(x), expected)


@pytest.mark.parametrize("gate", ["elementwise", "headwise", "none"])
@pytest.mark.parametrize("length", [3, 5, 13])
def test_chunks_do_not_see_each_other(gate, length):
    attention, x = attention_of(gate), rows(length)
    apart = torch.cat([attention(part) for part in x.split(5, dim=1)], dim=1)
    torch.testing.assert_close(attention(x), apart)


def test_a_headwise_gate_is_one_per_head_and_no_gate_lets_all_through():
    x = rows(5)
    headwise, ungated = attention_of("headwise"), attention_of("none")
    ungated.load_state_dict({name: w for name, w in headwise.state_dict().items() if not name.startswith("gate")})
    assert headwise.gate_proj is not None
    with torch.no_grad():
        headwise.o_proj.weight.copy_(torch.eye(16))
        ungated.o_proj.weight.copy_(torch.eye(16))
    gate = headwise.gate_proj(x).sigmoid().repeat_interleave(4, dim=-1)
    torch.testing.assert_close(headwise(x), ungated(x) * gate)
