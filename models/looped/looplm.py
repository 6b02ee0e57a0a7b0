"""LoopLM (Ouro): N layers applied R times, with a key/value cache per loop and layer.

Special here:
- a loop attends to the keys that earlier tokens had **in that loop**, so the state grows with R: what MELT removes;
- `exit_threshold` picks the loop whose logits count. It skips no compute: later tokens need the caches of every loop.

Source: Ouro; layer and objective in `looped_model`.

Shapes: `B` batch, `T` tokens, `R` loops (the paper's T), `D` width, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from models.language_model import Cost
from models.layers import KVCache
from models.looped.exits import exit_loop
from models.looped.looped_model import (
    CosSin,
    LoopedConfig,
    LoopedModel,
    SandwichLayer,
    Trace,
    causal_mask,
)


@dataclass(frozen=True)
class LoopLMConfig(LoopedConfig):
    family: ClassVar[str] = "looplm"


@dataclass
class LoopLMState:
    """A cache per loop and layer."""

    caches: list[list[KVCache]]  # [R][N]

    def tensors(self) -> Iterator[Tensor]:
        for loop in self.caches:
            for cache in loop:
                yield from cache.tensors()


class LoopLMLayer(SandwichLayer):
    """Keys, values and queries of the same stream."""

    def forward(
        self, x: Tensor, cos_sin: CosSin, mask: Tensor | None = None, cache: KVCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """`x [B, T, D]` after the layer, and the attended values `[B, T, D]` before the output projection.

        Args:
            cos_sin: rotary tables of the T positions.
            mask: from `causal_mask`, over the rows of the cache with the new ones.
            cache: the rows of this loop and layer; the new ones are appended.
        """
        stream = self.attention_norm(x)
        keys, values = self.keys_values(stream, cos_sin)
        if cache is not None:
            keys, values = cache.append(keys, values)
        attended = self.attend(self.queries(stream, cos_sin), keys, values, mask)
        return self.close(x, attended), attended


class LoopLM(LoopedModel):
    """The looped Transformer."""

    layer_type = LoopLMLayer

    def forward(self, tokens: Tensor) -> Tensor:
        return self._exit(self._run(tokens))

    def loop_states(self, tokens: Tensor) -> list[Tensor]:
        return self._run(tokens)

    def init_state(self, batch_size: int) -> LoopLMState:
        return LoopLMState([self._caches(batch_size, KVCache) for _ in range(self.config.loops)])

    def extend(self, tokens: Tensor, state: LoopLMState) -> tuple[Tensor, LoopLMState]:
        return self._exit(self.extend_states(tokens, state)), state

    def extend_states(self, tokens: Tensor, state: LoopLMState, trace: Trace | None = None) -> list[Tensor]:
        """The normed states of every loop for `tokens [B, t]` after `state`, which moves on; fills `trace`."""
        return self._run(tokens, state, trace)

    def cost(self, context: int) -> Cost:
        return self.cost_at(context, context, context * self.config.loops, exits=self.config.exit_threshold < 1)

    def _run(self, tokens: Tensor, state: LoopLMState | None = None, trace: Trace | None = None) -> list[Tensor]:
        start, length = 0 if state is None else state.caches[0][0].length, tokens.shape[1]
        cos_sin = self._rope(start, length)
        mask = causal_mask(length, start + length, tokens.device)
        x, states = self.embedding(tokens), []
        for loop in range(self.config.loops):
            for i, layer in enumerate(self.layers):
                x, attended = layer(x, cos_sin, mask, None if state is None else state.caches[loop][i])
                if trace is not None:
                    trace.attended.append(attended)
            x = self.norm(x)
            states.append(x)
        return states

    def _exit(self, states: list[Tensor]) -> Tensor:
        """Logits `[B, T, V]` of the loop after which each token leaves."""
        if self.config.exit_threshold == 1:
            return self.head(states[-1])
        chosen = exit_loop(self.exit_logits(states), self.config.exit_threshold)
        stacked = torch.stack(states)
        return self.head(stacked.gather(0, chosen[None, ..., None].expand(1, *stacked.shape[1:]))[0])


CONFIG, MODEL = LoopLMConfig, LoopLM
