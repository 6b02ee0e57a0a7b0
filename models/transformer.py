"""Transformer++: the LLaMA-style decoder that every other model here is compared with.

Special here:
- pre-RMSNorm, SwiGLU, rotary positions (half-split), grouped-query attention optional, no biases;
- `window` (sliding window) and `chunk` (block-local attention) are the control baselines: flat perplexity beyond the
  training length needs no memory at all when attention is local. Both train in time linear in T;
- `Attention` and `Block` also build Mela's decoder.

Source: LLaMA (Touvron et al. 2023). The scale of the residual projections at the start, `(2 * layers)^-1/2`, follows
GPT-2; unit-variance linear maps are our assumption.

Shapes: `B` batch, `T` tokens, `D` width, `H` query heads, `G` key/value heads, `K` head width, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.configuration import require
from models.language_model import CausalLM, Cost, ModelConfig
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


@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """Defaults are the tiny scale, of as many parameters as tiny Mela."""

    family: ClassVar[str] = "transformer"

    layers: int = 6
    heads: int = 4  # H
    kv_heads: int | None = None  # G; null: one per query head
    hidden: int = 456  # inner width of the SwiGLU
    rope_theta: float = 10000.0
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    chunk: int | None = None  # a token sees its own block of this many tokens, up to itself
    tie_embeddings: bool = False  # the head reuses the embedding matrix
    norm_eps: float = 1e-6

    def validate(self) -> None:
        super().validate()
        least = {"layers": 1, "heads": 1, "kv_heads": 1, "hidden": 1, "window": 2, "chunk": 2}
        for name, minimum in least.items():
            value = getattr(self, name)
            require(value is None or value >= minimum, f"{name}={value} must be at least {minimum}")
        require_heads(self.width, self.heads, self.kv_heads)
        require(
            self.window is None or self.chunk is None,
            f"window={self.window} and chunk={self.chunk} exclude each other: set one to null",
        )
        for name in ("rope_theta", "norm_eps"):
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be above 0")

    @property
    def kv_width(self) -> int:
        """Width of the keys of one token, over all its heads."""
        return (self.kv_heads or self.heads) * (self.width // self.heads)


def require_heads(width: int, heads: int, kv_heads: int | None = None) -> None:
    """`ConfigError` unless `heads` cut `width` into even head widths and `kv_heads` groups the heads evenly."""
    require(width % heads == 0, f"heads={heads} must divide width={width}")
    require(width // heads % 2 == 0, f"heads={heads} gives an odd head width for width={width}; rotary needs even")
    require(kv_heads is None or heads % kv_heads == 0, f"kv_heads={kv_heads} must divide heads={heads}")


class Attention(nn.Module):
    """Causal self-attention with rotary positions; optionally grouped-query, sliding-window, masked or cached."""

    def __init__(
        self, width: int, heads: int, kv_heads: int | None = None, window: int | None = None, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width, self.window = heads, kv_heads or heads, width // heads, window
        self.q_proj = Linear(width, width)
        self.k_proj = Linear(width, self.kv_heads * self.head_width)
        self.v_proj = Linear(width, self.kv_heads * self.head_width)
        self.o_proj = Linear(width, width, scale)

    def forward(
        self, x: Tensor, tables: tuple[Tensor, Tensor], mask: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """`x [B, T, D] -> [B, T, D]`.

        Args:
            tables: rotary tables of the T positions, each `[T, K]`.
            mask: `[T, S]` True where attention is allowed, over the S rows of the cache with the new ones; causal
                (in the window, if there is one) when absent.
            cache: rows of earlier tokens; the new keys and values are appended to it.
        """
        queries = rotate(split_heads(self.q_proj(x), self.heads), tables)
        keys = rotate(split_heads(self.k_proj(x), self.kv_heads), tables)
        values = split_heads(self.v_proj(x), self.kv_heads)
        if cache is not None:
            keys, values = cache.append(keys, values)
        if mask is not None:
            heads = attend(queries, keys, values, mask)
        elif self.window is not None and keys.shape[2] > self.window:
            heads = attend_window(queries, keys, values, self.window)
        else:
            heads = attend_causal(queries, keys, values)
        if cache is not None and self.window is not None:
            cache.keep_last(self.window - 1)
        return self.o_proj(merge_heads(heads))


def attention_flops(width: int, kv_width: int, span: float) -> tuple[float, float]:
    """FLOPs per token of `Attention`, forward and training, when each token is scored against `span` keys.

    Fused attention recomputes the scores: its backward is five products for the two of its forward.
    """
    projections = 4.0 * width * (width + kv_width)
    scores = 4.0 * span * width
    return projections + scores, 3 * projections + 3.5 * scores


class Block(nn.Module):
    """`x += attention(norm(x)); x += mlp(norm(x))` on `[B, T, D]`."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None,
        hidden: int,
        norm_eps: float = 1e-6,
        window: int | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width, norm_eps)
        self.attention = Attention(width, heads, kv_heads, window, scale)
        self.mlp_norm = RMSNorm(width, norm_eps)
        self.mlp = SwiGLU(width, hidden, scale)

    def forward(
        self, x: Tensor, tables: tuple[Tensor, Tensor], mask: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), tables, mask, cache)
        return x + self.mlp(self.mlp_norm(x))


@dataclass
class TransformerState:
    """A cache per layer, and the position of the next token (inside its chunk, when there are chunks)."""

    caches: list[KVCache]
    position: int = 0

    def tensors(self) -> Iterator[Tensor]:
        for cache in self.caches:
            yield from cache.tensors()


class Transformer(CausalLM):
    """Embedding, blocks, closing norm, head."""

    config: TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        scale = (2 * config.layers) ** -0.5
        self.embedding = Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(
            Block(config.width, config.heads, config.kv_heads, config.hidden, config.norm_eps, config.window, scale)
            for _ in range(config.layers)
        )
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = None if config.tie_embeddings else Linear(config.width, config.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        batch, length, width = x.shape
        if self.config.chunk is not None and length > self.config.chunk:  # chunks go into the batch
            padding = -length % self.config.chunk
            x = functional.pad(x, (0, 0, 0, padding)).view(-1, self.config.chunk, width)
        tables = self._rope(0, x.shape[1], x.device)
        for block in self.blocks:
            x = block(x, tables)
        return self._logits(x.reshape(batch, -1, width)[:, :length])

    def init_state(self, batch_size: int) -> TransformerState:
        config, weight = self.config, self.embedding.weight
        heads = config.kv_heads or config.heads
        return TransformerState(
            [KVCache.empty(batch_size, heads, config.width // config.heads, weight) for _ in self.blocks]
        )

    def extend(self, tokens: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        if self.config.chunk is None:
            return self._append(tokens, state), state
        chunk, logits = self.config.chunk, []
        while tokens.shape[1]:
            if state.position == chunk:  # a chunk that is over is never looked at again
                state = self.init_state(tokens.shape[0])
            whole = (tokens.shape[1] - 1) // chunk * chunk if state.position == 0 else 0
            taken = whole or min(chunk - state.position, tokens.shape[1])
            piece, tokens = tokens[:, :taken], tokens[:, taken:]
            logits.append(self(piece) if whole else self._append(piece, state))
        return torch.cat(logits, dim=1), state

    def cost(self, context: int) -> Cost:
        config = self.config
        blocks = cast(Iterable[Block], self.blocks)
        span, rows, padded = float(context), context, 1.0
        if config.window is not None:
            rows = min(context, config.window - 1)
            if context > config.window:
                span = window_span(context, config.window)
        if config.chunk is not None:
            rows = min(context, (context - 1) % config.chunk + 1)
            if context > config.chunk:
                span, padded = config.chunk, (context + -context % config.chunk) / context
        forward, training = attention_flops(config.width, config.kv_width, span)
        layers = config.layers * padded
        mlp = 6.0 * config.width * config.hidden
        head = 2.0 * config.width * config.vocab_size
        return Cost(
            parameters={
                "embedding": self.embedding.weight.numel(),
                "attention": sum(_size(block.attention_norm) + _size(block.attention) for block in blocks),
                "mlp": sum(_size(block.mlp_norm) + _size(block.mlp) for block in blocks),
                "head": _size(self.norm) + (_size(self.head) if self.head is not None else 0),
            },
            forward_flops={"attention": layers * forward, "mlp": layers * mlp, "head": head},
            training_flops={"attention": layers * training, "mlp": layers * 3 * mlp, "head": 3 * head},
            state_bytes=2 * config.layers * rows * config.kv_width * self.embedding.weight.element_size(),
        )

    def _append(self, tokens: Tensor, state: TransformerState) -> Tensor:
        """Logits of `tokens [B, t]` after the cached ones; the caches and the position move on."""
        x = self.embedding(tokens)
        tables = self._rope(state.position, tokens.shape[1], x.device)
        for block, cache in zip(self.blocks, state.caches, strict=True):
            x = block(x, tables, cache=cache)
        state.position += tokens.shape[1]
        return self._logits(x)

    def _rope(self, start: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + length, device=device)
        return rope(positions, self.config.width // self.config.heads, self.config.rope_theta)

    def _logits(self, x: Tensor) -> Tensor:
        weight = self.embedding.weight if self.head is None else self.head.weight
        return functional.linear(self.norm(x), weight)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


CONFIG, MODEL = TransformerConfig, Transformer
