"""Each shared layer against its equation, written out in fp64."""

import pytest
import torch
from torch import Tensor

from models.layers import (
    Embedding,
    KVCache,
    Linear,
    RMSNorm,
    SwiGLU,
    attend,
    attend_causal,
    attend_window,
    merge_heads,
    rope,
    rotate,
    split_heads,
    window_span,
)
from tests.models.flops import counted_flops


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain_attention(queries: Tensor, keys: Tensor, values: Tensor, allowed: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(K)) v with -inf where not allowed; key/value heads repeated for their query heads."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = queries @ keys.mT / queries.shape[-1] ** 0.5
    return scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1) @ values


def band(new: int, rows: int, window: int | None = None) -> Tensor:
    """`[new, rows]`: the last `new` positions see themselves and up to `window - 1` positions before."""
    distance = torch.arange(rows - new, rows)[:, None] - torch.arange(rows)
    return (distance >= 0) & (distance < (window or rows))


def test_rotation_is_multiplication_by_a_complex_phase():
    x, positions, theta = normal(2, 3, 5, 8), torch.arange(7, 12), 100.0
    rotated = rotate(x, rope(positions, 8, theta))
    phase = torch.polar(
        torch.ones(5, 4).double(), positions.double()[:, None] * theta ** -(torch.arange(4).double() / 4)
    )
    expected = torch.complex(x[..., :4], x[..., 4:]) * phase
    torch.testing.assert_close(rotated, torch.cat((expected.real, expected.imag), dim=-1), rtol=0, atol=1e-5)


def test_rotated_products_depend_on_the_distance_alone():
    query, key = normal(1, 1, 1, 16), normal(1, 1, 1, 16, seed=1)

    def product(at: int, other: int) -> Tensor:
        tables = [rope(torch.tensor([position]), 16, 10000.0) for position in (at, other)]
        return (rotate(query, tables[0]) * rotate(key, tables[1])).sum()

    torch.testing.assert_close(product(13, 10), product(103, 100), rtol=0, atol=1e-4)
    torch.testing.assert_close(product(0, 0), (query * key).sum())
    assert (product(13, 10) - product(13, 9)).abs() > 1e-2


def test_rotation_keeps_the_type_of_its_input():
    tables = rope(torch.arange(3), 4, 10000.0)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert rotate(torch.ones(1, 1, 3, 4, dtype=dtype), tables).dtype == dtype


def test_rms_norm_divides_by_the_root_mean_square():
    norm, x = RMSNorm(6, eps=1e-3).double(), normal(2, 6)
    torch.nn.init.uniform_(norm.weight)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)


def test_swiglu_gates_with_silu():
    mlp, x = SwiGLU(4, 6).double(), normal(2, 3, 4)
    gate = x @ mlp.gate_proj.weight.T
    expected = (gate / (1 + torch.exp(-gate)) * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    torch.testing.assert_close(mlp(x), expected)


def test_initial_scales():
    torch.manual_seed(0)
    assert Linear(256, 128, scale=0.5).weight.std().item() == pytest.approx(0.5 / 16, rel=0.05)
    assert Embedding(512, 64).weight.std().item() == pytest.approx(1 / 8, rel=0.05)
    assert torch.equal(RMSNorm(4).weight, torch.ones(4))


def test_heads_split_and_merge():
    x = normal(2, 3, 8)
    heads = split_heads(x, 4)
    assert heads.shape == (2, 4, 3, 2)
    assert torch.equal(heads[0, 1, 2], x[0, 2, 2:4])
    assert torch.equal(merge_heads(heads), x)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("new", "rows"), [(1, 1), (1, 9), (4, 9), (9, 9)])
def test_causal_attention(new, rows, kv_heads):
    queries, keys, values = (
        normal(2, 4, new, 6),
        normal(2, kv_heads, rows, 6, seed=1),
        normal(2, kv_heads, rows, 6, seed=2),
    )
    expected = plain_attention(queries, keys, values, band(new, rows))
    torch.testing.assert_close(attend_causal(queries, keys, values), expected)


def test_masked_attention():
    queries, keys, values = normal(2, 4, 3, 6), normal(2, 2, 5, 6, seed=1), normal(2, 2, 5, 6, seed=2)
    mask = torch.tensor([[1, 0, 0, 0, 1], [0, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    torch.testing.assert_close(attend(queries, keys, values, mask), plain_attention(queries, keys, values, mask))


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("window", [2, 3, 8, 100])
@pytest.mark.parametrize(("new", "rows"), [(1, 1), (1, 9), (4, 9), (8, 9), (9, 9), (17, 17), (16, 40)])
def test_windowed_attention_and_its_gradients(new, rows, window, kv_heads):
    inputs = (normal(2, 4, new, 6), normal(2, kv_heads, rows, 6, seed=1), normal(2, kv_heads, rows, 6, seed=2))
    for x in inputs:
        x.requires_grad_()
    mixed, expected = attend_window(*inputs, window), plain_attention(*inputs, band(new, rows, window))
    torch.testing.assert_close(mixed, expected)
    weights = normal(2, 4, new, 6, seed=3)
    for ours, theirs in zip(
        torch.autograd.grad((mixed * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("length", "window"), [(9, 8), (16, 8), (40, 7)])
def test_window_span_is_what_windowed_attention_scores(length, window):
    queries, keys = normal(1, 2, length, 4), normal(1, 2, length, 4)
    flops = counted_flops(lambda: attend_window(queries, keys, keys, window))
    assert flops == pytest.approx(4 * window_span(length, window) * 2 * 4 * length)


def test_cache_returns_all_rows_in_order_however_they_came():
    keys, values = normal(2, 3, 200, 4), normal(2, 3, 200, 4, seed=1)
    cache = KVCache.empty(2, 3, 4, like=keys, capacity=2)
    assert [x.shape[2] for x in cache.tensors()] == [0, 0]
    start = 0
    for size in (1, 1, 1, 64, 3, 130):
        end = start + size
        seen = cache.append(keys[:, :, start:end], values[:, :, start:end])
        assert torch.equal(seen[0], keys[:, :, :end])
        assert torch.equal(seen[1], values[:, :, :end])
        start = end
    assert [x.shape[2] for x in cache.tensors()] == [200, 200]


def test_cache_forgets_rows_and_their_memory():
    keys = normal(1, 1, 1000, 4)
    cache = KVCache.empty(1, 1, 4, like=keys)
    cache.append(keys, keys)
    cache.keep_last(5)
    assert torch.equal(next(cache.tensors()), keys[:, :, 995:])
    assert cache.keys.untyped_storage().nbytes() == 5 * 4 * 8
    cache.keep_last(9)
    assert cache.length == 5
    seen, _ = cache.append(keys[:, :, :2], keys[:, :, :2])
    assert torch.equal(seen, torch.cat((keys[:, :, 995:], keys[:, :, :2]), dim=2))
