"""Memory block: `x += GatedAttention(norm(x)); x += NeuralMemory(norm(x))`, and modules made of such blocks.

Special here:
- attention is causal inside a memory chunk of C patches and never crosses it: what crosses is the neural memory;
- the gate is `sigmoid(Linear(attention input))` on the attention output, before `o_proj`;
- a module closes every call with a norm, so that its output can be fed back to it by Mela's recursion.

Source: Mela's memory block; the gate follows Gated Attention (Qiu et al. 2025). Elementwise gates, and rotary positions
counted inside the chunk, are our assumptions.

Shapes: `B` rows, `N` patches, `D` width, `C` patches per memory chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, cast

import torch
from torch import Tensor, nn

from models.layers import Linear, RMSNorm, attend, merge_heads, rope, rotate, split_heads
from models.mela.config import MelaConfig
from models.mela.neural_memory import MemoryState, NeuralMemory


class GatedAttention(nn.Module):
    """Causal self-attention inside chunks, gated: `[B, N, D] -> [B, N, D]`."""

    def __init__(
        self,
        width: int,
        heads: int,
        chunk: int,
        gate: Literal["elementwise", "headwise", "none"] = "elementwise",
        rope_theta: float = 10000.0,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.heads, self.chunk, self.rope_theta = heads, chunk, rope_theta
        self.q_proj = Linear(width, width)
        self.k_proj = Linear(width, width)
        self.v_proj = Linear(width, width)
        gates = {"elementwise": width, "headwise": heads, "none": 0}[gate]
        self.gate_proj = Linear(width, gates) if gates else None
        self.o_proj = Linear(width, width, scale)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        rest = length % self.chunk
        mixed = []
        for size, part in ((self.chunk, slice(0, length - rest)), (rest, slice(length - rest, length))):
            if part.start < part.stop:  # chunks go into the batch
                chunks = self._attend(*(x[:, part].reshape(-1, size, width) for x in projected))
                mixed.append(chunks.reshape(batch, -1, width))
        y = torch.cat(mixed, dim=1)
        if self.gate_proj is not None:
            gate = self.gate_proj(x).sigmoid()
            y = (y.unflatten(2, (gate.shape[2], -1)) * gate[..., None]).flatten(2)
        return self.o_proj(y)

    def flops(self, length: int) -> tuple[float, float]:
        """FLOPs of one row of `length` patches: forward, and forward with backward."""
        width = self.o_proj.in_features
        gates = self.gate_proj.out_features if self.gate_proj is not None else 0
        rest = length % self.chunk
        projections = 2.0 * length * width * (4 * width + gates)
        scores = 4.0 * width * ((length - rest) * self.chunk + rest * rest)
        return projections + scores, 3 * projections + 3.5 * scores  # fused attention recomputes its scores

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Causal attention within rows of at most C patches, each `[R, n, D]`."""
        positions = torch.arange(queries.shape[1], device=queries.device)
        cos_sin = rope(positions, queries.shape[2] // self.heads, self.rope_theta)
        queries, keys = (rotate(split_heads(x, self.heads), cos_sin) for x in (queries, keys))
        return merge_heads(attend(queries, keys, split_heads(values, self.heads), causal=True))


class MemoryBlock(nn.Module):
    """One block; `attention` and `neural_memory` can each be left out."""

    def __init__(self, config: MelaConfig, scale: float) -> None:
        super().__init__()
        self.attention = self.neural_memory = None
        if config.attention:
            self.attention_norm = RMSNorm(config.width)
            self.attention = GatedAttention(
                config.width, config.heads, config.memory_chunk, config.gate, config.rope_theta, scale
            )
        if config.neural_memory:
            self.memory_norm = RMSNorm(config.width)
            self.neural_memory = NeuralMemory(
                config.width,
                config.memory_heads,
                config.memory_chunk,
                config.memory_depth,
                config.memory_expansion,
                config.newton_schulz_steps,
                config.retention_init,
                config.retention_bound,
                config.noop_gate,
                scale,
            )

    def forward(self, x: Tensor, state: MemoryState | None, writes: int) -> tuple[Tensor, MemoryState | None]:
        if self.attention is not None:
            x = x + self.attention(self.attention_norm(x))
        if self.neural_memory is not None:
            assert state is not None
            y, state = self.neural_memory(self.memory_norm(x), state, writes)
            x = x + y
        return x, state


class MemoryModule(nn.Module):
    """A stack of memory blocks and a closing norm: the L-module or the H-module."""

    def __init__(self, config: MelaConfig, blocks: int) -> None:
        super().__init__()
        scale = (2 * blocks) ** -0.5
        self.blocks = nn.ModuleList(MemoryBlock(config, scale) for _ in range(blocks))
        self.norm = RMSNorm(config.width)

    def init_state(self, batch_size: int) -> list[MemoryState | None]:
        """The state of one call of this module, per block (None for a block without neural memory)."""
        memories = (block.neural_memory for block in cast(Iterable[MemoryBlock], self.blocks))
        return [memory.init_state(batch_size) if memory is not None else None for memory in memories]

    def forward(
        self, x: Tensor, states: list[MemoryState | None], writes: int
    ) -> tuple[Tensor, list[MemoryState | None]]:
        """`x [B, N, D]` from a chunk boundary on -> `[B, N, D]`, and the states after the first `writes` chunks."""
        after = []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = block(x, state, writes)
            after.append(state)
        return self.norm(x), after

    def flops(self, length: int, writes: int) -> dict[str, tuple[float, float]]:
        """FLOPs of one call on one row, by part: forward, and forward with backward."""
        parts: dict[str, tuple[float, float]] = {}
        block, count = cast(MemoryBlock, self.blocks[0]), len(self.blocks)
        if block.attention is not None:
            parts["attention"] = block.attention.flops(length)
        if block.neural_memory is not None:
            parts |= block.neural_memory.flops(length, writes)
        return {name: (count * forward, count * training) for name, (forward, training) in parts.items()}
