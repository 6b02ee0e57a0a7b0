"""The parts language models share: linear maps, RMSNorm, rotary positions, SwiGLU, causal attention and its cache.

Shapes: `B` batch, `T` tokens, `D` width, `H` query heads, `G` key/value heads, `K` head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional


class Linear(nn.Linear):
    """A linear map without bias, initialised normal with std `scale / sqrt(fan_in)` (our assumption)."""

    def __init__(self, in_features: int, out_features: int, scale: float = 1.0) -> None:
        self.scale = scale
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.scale * self.in_features**-0.5)


class Embedding(nn.Embedding):
    """Token embedding, initialised normal with std `D^-1/2` (our assumption): near the usual 0.02 at large widths.

    At D = 128 and 150 steps this ended about 0.15 nats below 0.02, which leaves the first blocks to drown the tokens.
    """

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square normalisation over the last axis with a learned gain that starts at `gain`."""

    def __init__(self, width: int, eps: float = 1e-6, gain: float = 1.0) -> None:
        self.gain = gain
        super().__init__(width, eps=eps)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.gain)


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` on `[..., D]`."""

    def __init__(self, width: int, hidden: int, scale: float = 1.0) -> None:
        super().__init__()
        self.gate_proj = Linear(width, hidden)
        self.up_proj = Linear(width, hidden)
        self.down_proj = Linear(hidden, width, scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


def rope(positions: Tensor, head_width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Rotary tables for `rotate`, half-split layout (RoFormer, as LLaMA arranges it).

    Args:
        positions: `[T]` integer positions.
        head_width: K, even.
        theta: base of the frequencies.
    Returns:
        cosines, and sines with the sign of each half, each `[T, K]`, fp32 or wider as the default dtype asks.
    """
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    exponent = torch.arange(0, head_width, 2, dtype=dtype, device=positions.device) / head_width
    angles = torch.outer(positions.to(dtype), theta**-exponent)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions to `x [B, H, T, K]`, keeping its dtype."""
    cos, sin = (table.to(x.dtype) for table in tables)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


@dataclass
class KVCache:
    """Keys and values of the tokens seen so far, in buffers that double when full and are written in place."""

    keys: Tensor  # [B, G, capacity, K]
    values: Tensor  # [B, G, capacity, K]
    length: int = 0

    @classmethod
    def empty(cls, batch_size: int, heads: int, head_width: int, like: Tensor, capacity: int = 64) -> Self:
        """A cache of `capacity` rows on the device and in the dtype of `like`."""
        shape = (batch_size, heads, capacity, head_width)
        return cls(like.new_empty(shape), like.new_empty(shape))

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write `[B, G, t, K]` after the rows in use; returns all keys and values in use, `[B, G, length, K]`."""
        end = self.length + keys.shape[2]
        if end > self.keys.shape[2]:
            self.keys, self.values = self._grown(self.keys, end), self._grown(self.values, end)
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep_last(self, rows: int) -> None:
        """Forget all but the last `rows` rows, buffers included."""
        if self.length > rows:
            self.keys = self.keys[:, :, self.length - rows : self.length].clone()
            self.values = self.values[:, :, self.length - rows : self.length].clone()
            self.length = rows

    def _grown(self, buffer: Tensor, rows: int) -> Tensor:
        batch, heads, capacity, width = buffer.shape
        larger = buffer.new_empty(batch, heads, max(rows, 2 * capacity), width)
        larger[:, :, : self.length] = buffer[:, :, : self.length]
        return larger

    def tensors(self) -> Iterator[Tensor]:
        yield self.keys[:, :, : self.length]
        yield self.values[:, :, : self.length]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, T, heads * K] -> [B, heads, T, K]`."""
    batch, length, _ = x.shape
    return x.view(batch, length, heads, -1).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """`[B, heads, T, K] -> [B, T, heads * K]`."""
    return x.transpose(1, 2).flatten(2)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Scaled dot-product attention, `[B, H, t, K]` over `[B, G, s, K]`; each key/value head serves H / G query heads.

    `mask [t, s]` is True where attention is allowed; `causal` is for t == s and no mask.
    """
    return functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=queries.shape[1] != keys.shape[1]
    )


def attend_causal(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the last t of s positions: queries `[B, H, t, K]`, keys and values `[B, G, s, K]`."""
    new, rows = queries.shape[2], keys.shape[2]
    if new == 1 and rows > 1:
        return attend_one(queries, keys, values)
    if new == rows:
        return attend(queries, keys, values, causal=new > 1)
    mask = torch.ones(new, rows, dtype=torch.bool, device=keys.device).tril(rows - new)
    return attend(queries, keys, values, mask)


def attend_one(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of one position, `[B, H, 1, K]`, to `[B, G, s, K]`.

    On a CPU two plain products read a long cache twice as fast as the fused kernel.
    """
    if query.device.type != "cpu":
        return attend(query, keys, values)
    heads, groups, width = query.shape[1], keys.shape[1], query.shape[3]
    grouped = query.view(-1, groups, heads // groups, width) * width**-0.5
    weights = (grouped @ keys.transpose(2, 3)).softmax(-1)
    return (weights @ values).view(query.shape)


def attend_window(queries: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    """Causal attention of the last t of s positions to themselves and the `window - 1` positions before them.

    Time is linear in t: queries go in blocks of at most `window`, each with the keys it can reach.
    """
    heads, new, rows = queries.shape[1], queries.shape[2], keys.shape[2]
    size = min(new, window)
    blocks = -(-new // size)
    first, after = rows - new - (window - 1), blocks * size - new  # where the reach of the first block starts

    def in_blocks(x: Tensor, before: int, length: int) -> Tensor:  # [B, G, _, K] -> [blocks, B * G, length, K]
        x = functional.pad(x, (0, 0, before, after)).flatten(0, 1).unfold(1, length, size)
        return x.permute(1, 0, 3, 2)

    row = torch.arange(size, device=keys.device)[:, None]
    column = torch.arange(size + window - 1, device=keys.device)
    reach = (column >= row) & (column < row + window)
    exists = torch.arange(blocks, device=keys.device)[:, None, None] * size + column + first >= 0
    mixed = attend(
        in_blocks(queries, 0, size),
        in_blocks(keys, -first, size + window - 1),
        in_blocks(values, -first, size + window - 1),
        (reach & exists)[:, None],
    )
    return mixed.transpose(0, 1).flatten(1, 2).unflatten(0, (-1, heads))[:, :, :new]


def window_span(length: int, window: int) -> float:
    """Keys scored per token when `attend_window` runs on a whole sequence of `length > window` tokens."""
    return -(-length // window) * window * (2 * window - 1) / length
