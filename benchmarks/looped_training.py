"""Training steps of LoopLM, fp32, against Transformer++ that has as many layers as LoopLM runs.

Every side does the whole step: forward, loss, backward, AdamW. The sides run equally many layers of the same shape, but

- LoopLM's objective has a cross-entropy after every loop, so its head runs R times where Transformer++ runs its own
  once. What that costs is in `training_flops_per_token`, and is taken out of the second ratio, which is per FLOP;
- `looplm, last loop` has the loss of Transformer++, one cross-entropy at the end. What is left between the two are
  LoopLM's two norms more per layer, and R times fewer weights to update.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.timing import alternate, promise
from benchmarks.training import step
from models import build_model, preset
from models.language_model import CausalLM

BATCH, CONTEXT, LOOPS, VOCABULARY, REPEATS = 8, 512, 4, 2048, 4
SHAPES: dict[str, dict[str, Any]] = {
    "the shape of looplm_tiny": {"width": 128, "layers": 2, "heads": 4, "hidden": 344},
    "twice as wide": {"width": 256, "layers": 2, "heads": 4, "hidden": 688},
}


def run(peak: float) -> dict[str, Any]:
    """Tokens per second of every side, and the same per FLOP."""
    return {
        f"{name}, {shape['layers']} layers x {LOOPS} loops, steps of {BATCH} x {CONTEXT} tokens": compare(shape, peak)
        for name, shape in SHAPES.items()
    }


def pair(shape: dict[str, Any]) -> tuple[CausalLM, CausalLM]:
    """LoopLM, and Transformer++ with a layer of its own for each that LoopLM runs."""
    unlooped = shape | {"layers": shape["layers"] * LOOPS}
    return (
        build_model(preset("looplm_tiny", **shape, loops=LOOPS, vocab_size=VOCABULARY)).train(),
        build_model(preset("transformer_pp_tiny", **unlooped, vocab_size=VOCABULARY)).train(),
    )


def compare(shape: dict[str, Any], peak: float) -> dict[str, Any]:
    looped, unlooped = pair(shape)
    window = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1))
    inputs, targets = window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def objective(model: CausalLM) -> torch.Tensor:
        return model.training_loss(inputs, targets)[0]

    sides: dict[str, Callable[[], None]] = {
        "looplm": step(looped, partial(objective, looped)),
        "looplm, last loop": step(looped, lambda: looped.cross_entropy(inputs, targets)),
        "transformer_pp": step(unlooped, partial(objective, unlooped)),
    }
    speed = {name: BATCH * CONTEXT / seconds for name, seconds in alternate(sides, REPEATS).items()}
    parts = dict(looped.cost(CONTEXT).training_flops)
    flops = {
        "looplm": sum(parts.values()),
        "looplm, last loop": parts["attention"] + parts["mlp"] + parts["head"] / LOOPS,
        "transformer_pp": unlooped.cost(CONTEXT).total_training_flops,
    }
    rate = {name: value * flops[name] for name, value in speed.items()}
    return {
        "tokens_per_second": {name: round(value) for name, value in speed.items()},
        "training_flops_per_token": {name: round(value) for name, value in flops.items()},
        "fraction_of_matmul_peak": {name: round(value / peak, 3) for name, value in rate.items()},
        "ratio": {"looplm, last loop / transformer_pp": round(speed["looplm, last loop"] / speed["transformer_pp"], 3)},
        "looplm / transformer_pp": promise(speed["looplm"] / speed["transformer_pp"], 1.0),
        "looplm / transformer_pp, per flop": promise(rate["looplm"] / rate["transformer_pp"], 1.0),
    }
