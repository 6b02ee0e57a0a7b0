"""Decoding after 8,192 tokens, one token at a time: MELT, LoopLM of as many loops, Transformer++ of as many layers.

The caches are filled with random rows: how fast they are read does not depend on what is in them. The promises are for
one sequence. In a batch whose caches are larger than the processor's, every loop of MELT reads as many bytes from
memory as LoopLM does, and MELT's gates come on top: what it gains is that R times the batch fits into the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.timing import alternate, promise
from models import build_model, preset
from models.language_model import CausalLM, state_bytes
from models.layers import KVCache
from models.looped.looplm import LoopLMState
from models.looped.melt import MeltState
from models.transformer import TransformerState

CONTEXT, BATCHES, TOKENS, REPEATS = 8192, (1, 8), 32, 15
SHAPE: dict[str, Any] = {"width": 128, "layers": 2, "heads": 4, "hidden": 344, "vocab_size": 2048}
LOOPS = 4


def models() -> dict[str, CausalLM]:
    """The three models, in inference mode."""
    looped = SHAPE | {"loops": LOOPS}
    configs = {
        "melt": preset("melt_tiny", **looped),
        "looplm": preset("looplm_tiny", **looped),
        "transformer_pp": preset("transformer_pp_tiny", **SHAPE),
    }
    return {name: build_model(config).eval() for name, config in configs.items()}


def run(peak: float) -> dict[str, Any]:
    """Tokens per second of the batch, and the rate at which caches are read."""
    return {f"{batch} x {CONTEXT} tokens in the cache, {LOOPS} loops": compare(batch) for batch in BATCHES}


def compare(batch: int) -> dict[str, Any]:
    sides, held, read = {}, {}, {}
    for name, model in models().items():
        state = filled(model, batch)
        held[name] = state_bytes(state)
        read[name] = held[name] * (LOOPS if name == "melt" else 1)  # MELT reads its one cache in every loop
        sides[name] = decoding(model, state, batch)
    speed = {name: batch * TOKENS / seconds for name, seconds in alternate(sides, REPEATS).items()}
    measured: dict[str, Any] = {
        "tokens_per_second": {name: round(value, 1) for name, value in speed.items()},
        "cache_bytes": held,
        "cache_bytes_read_per_second": {name: round(speed[name] / batch * read[name]) for name in speed},
    }
    ratios = {
        "melt / looplm": speed["melt"] / speed["looplm"],
        f"{LOOPS} x melt / transformer_pp": LOOPS * speed["melt"] / speed["transformer_pp"],
    }
    if batch > 1:
        return measured | {"ratio": {name: round(ratio, 3) for name, ratio in ratios.items()}}
    return measured | {name: promise(ratio, 1.0) for name, ratio in ratios.items()}


def filled(model: CausalLM, batch: int) -> Any:
    """A state after `CONTEXT` tokens."""
    state = model.init_state(batch)
    if isinstance(state, TransformerState):
        state.position = CONTEXT
    for cache in caches(state):
        cache.append(*torch.randn(2, *cache.keys.shape[:2], CONTEXT, cache.keys.shape[3]))
    return state


def caches(state: TransformerState | LoopLMState | MeltState) -> list[KVCache]:
    """Every cache: one per layer, LoopLM's one per loop and layer."""
    if isinstance(state, MeltState):
        return list(state.rows)
    return state.caches if isinstance(state, TransformerState) else [cache for loop in state.caches for cache in loop]


def decoding(model: CausalLM, state: Any, batch: int) -> Callable[[], None]:
    """`TOKENS` tokens one by one, as a call without arguments; the state grows with every call."""
    tokens = torch.zeros(batch, 1, dtype=torch.int64)

    def some() -> None:
        nonlocal state
        with torch.inference_mode():
            for _ in range(TOKENS):
                logits, state = model.extend(tokens, state)
                tokens.copy_(logits[:, -1:].argmax(-1))

    return some
