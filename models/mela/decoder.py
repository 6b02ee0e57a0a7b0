"""Mela's decoder: causal Transformer++ blocks over `[memory tokens ; text]`, one text chunk at a time.

Special here:
- chunks do not see each other's text: what they know of the past is in their memory rows;
- MemStack: after layer a, the memory state of outer cycle a is added to the memory rows;
- one rule says who sees whom, in both memory views: a row sees the rows at its own position and before. Memory tokens
  have positions 0..M-1, text token t has M + t, and in the causal view the state of a patch of the chunk itself sits at
  the position of its last token.

Source: Mela, decoder and MemStack; the causal view and the `learned` MemStack are ours.

Shapes: `R` rows (sequences times chunks), `m` memory rows, `t` text tokens, `D` width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.layers import KVCache, RMSNorm, rope
from models.mela.config import MelaConfig
from models.transformer import Block


class Decoder(nn.Module):
    """Memory rows and text in, text out."""

    def __init__(self, config: MelaConfig) -> None:
        super().__init__()
        self.head_width, self.rope_theta = config.width // config.decoder_heads, config.rope_theta
        self.blocks = nn.ModuleList(
            Block(
                config.width,
                config.decoder_heads,
                config.decoder_kv_heads,
                config.hidden,
                scale=(2 * config.decoder_layers) ** -0.5,
            )
            for _ in range(config.decoder_layers)
        )
        learned = config.memory == "on" and config.memstack == "learned" and config.stacked > 1
        self.memstack = MemStack(config.stacked - 1, config.width) if learned else None
        self.norm = RMSNorm(config.width)

    def forward(
        self,
        memory: Tensor,
        text: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        caches: list[KVCache] | None = None,
    ) -> Tensor:
        """Text states of one piece of a chunk (or of many chunks at the same place, in the batch).

        Args:
            memory: `[stacked, R, m, D]`, the last cycle last; m may be 0.
            text: `[R, t, D]`.
            positions: `[m + t]`, of the memory rows and then of the text.
            mask: `[m + t, S]` True where attention is allowed; rows in order of position need none.
            caches: one per layer, with the rows of the chunk so far; the new rows are appended.
        Returns:
            `[R, t, D]`, normed.
        """
        rows = memory.shape[2]
        stack = memory[:-1] if self.memstack is None else self.memstack(memory[:-1])
        tables = rope(positions, self.head_width, self.rope_theta)
        x = torch.cat((memory[-1], text), dim=1)
        for layer, block in enumerate(self.blocks):
            x = block(x, tables, mask, caches[layer] if caches is not None else None)
            if rows and layer < len(stack):
                x = torch.cat((x[:, :rows] + stack[layer], x[:, rows:]), dim=1)
        return self.norm(x[:, rows:])


class MemStack(nn.Module):
    """One learned scale per layer and channel for the states that are added, starting at 1."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(layers, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, z: Tensor) -> Tensor:
        return z * self.scale[:, None, None]
