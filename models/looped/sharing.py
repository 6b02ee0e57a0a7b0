"""A LoopLM that decodes with one loop's cache for all loops, without being trained for it: what MELT has to beat.

Special here:
- the prompt is read as LoopLM reads it; then its cache is kept loop by loop, or every loop gets the rows of one loop;
- tokens after the prompt keep the row of one loop only, `last` or `first`, as MELT does with the gate of that name.

Source: MELT, appendix B and table 5. `last` or `first`, with or without the prompt's cache: four strategies.

Shapes: `B` batch, `T` tokens, `R` loops, `G` key/value heads, `K` head width, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from models.configuration import config_from
from models.layers import KVCache
from models.looped.looplm import LoopLM
from models.looped.melt import KeysValues, Melt, MeltConfig

SharedLoop = Literal["first", "last"]


@dataclass
class SharedRows:
    """Rows of one layer: the prompt's by loop, later ones the same in every loop."""

    caches: list[KVCache]  # by loop

    @property
    def length(self) -> int:
        return self.caches[0].length

    def join(self, keys: Tensor, values: Tensor, loop: int) -> KeysValues:
        joined = self.caches[loop].append(keys, values)
        self.caches[loop].length -= keys.shape[2]
        return joined

    def keep(self, keys: Tensor, values: Tensor) -> Self:
        for cache in self.caches:
            cache.append(keys, values)
        return self


@torch.no_grad()
def decode_with_shared_cache(model: LoopLM, tokens: Tensor, prompt: int, loop: SharedLoop, keep_prompt: bool) -> Tensor:
    """Logits `[B, T - prompt, V]` of the tokens after the prompt, one token at a time.

    Args:
        model: trained with a cache per loop.
        tokens: `[B, T]`.
        prompt: tokens that are read at once, at least 1 and fewer than T.
        loop: whose keys and values later tokens find in the cache.
        keep_prompt: every loop keeps its own rows of the prompt, else all get those of `loop`.
    """
    student = as_melt(model, loop)
    state = model.init_state(len(tokens))
    model.extend(tokens[:, :prompt], state)
    shared = 0 if loop == "first" else -1
    rows = [
        SharedRows([by_loop if keep_prompt else _copy(layer[shared]) for by_loop in layer])
        for layer in zip(*state.caches, strict=True)
    ]
    states = [student.run_chunk(token, rows)[-1] for token in tokens[:, prompt:].split(1, dim=1)]
    return model.head(torch.cat(states, dim=1))


def as_melt(model: LoopLM, gate: SharedLoop) -> Melt:
    """The model's weights in a MELT whose gate has none."""
    fields = {**asdict(model.config), "gate": gate, "inference_chunk": 1, "exit_threshold": 1.0}
    with torch.device("meta"):
        student = Melt(config_from(MeltConfig, fields))
    student.load_state_dict(model.state_dict(), assign=True)
    return student.eval()


def _copy(cache: KVCache) -> KVCache:
    return KVCache(cache.keys.clone(), cache.values.clone(), cache.length)
