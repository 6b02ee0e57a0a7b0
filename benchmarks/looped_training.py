"""Training steps of LoopLM, fp32, against Transformer++ that has as many layers as LoopLM runs.

Every side does the whole step: forward, loss, backward, AdamW. The sides run equally many layers of the same shape, but
LoopLM's objective has a cross-entropy after every loop, so its head runs R times where Transformer++ runs its own once.
Two more sides tell that apart from the looping itself:

- `looplm, last loop` has the loss of Transformer++: one cross-entropy, at the end;
- `transformer_pp, as many predictions` has LoopLM's: a cross-entropy after every N layers.

What is left between equals: LoopLM has two norms more per layer and an exit gate, and R times fewer weights to update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import alternate, promise
from benchmarks.training import step
from models import build_model, preset
from models.layers import rope
from models.looped.head_losses import cross_entropy
from models.looped.looplm import LoopLM
from models.transformer import Transformer

BATCH, CONTEXT, LOOPS, VOCABULARY, REPEATS = 8, 512, 4, 2048, 4
SHAPES: dict[str, dict[str, Any]] = {
    "the shape of looplm_tiny": {"width": 128, "layers": 2, "heads": 4, "hidden": 344},
    "twice as wide": {"width": 256, "layers": 2, "heads": 4, "hidden": 688},
}


def run(peak: float) -> dict[str, Any]:
    """Tokens per second of every side, and LoopLM's as a share of the others'."""
    return {
        f"{name}, {shape['layers']} layers x {LOOPS} loops, steps of {BATCH} x {CONTEXT} tokens": compare(shape, peak)
        for name, shape in SHAPES.items()
    }


def pair(shape: dict[str, Any]) -> tuple[LoopLM, Transformer]:
    """LoopLM, and Transformer++ with a layer of its own for each that LoopLM runs."""
    looped = build_model(preset("looplm_tiny", **shape, loops=LOOPS, vocab_size=VOCABULARY)).train()
    unlooped = shape | {"layers": shape["layers"] * LOOPS}
    plain = build_model(preset("transformer_pp_tiny", **unlooped, vocab_size=VOCABULARY)).train()
    assert isinstance(looped, LoopLM)
    assert isinstance(plain, Transformer)
    return looped, plain


def compare(shape: dict[str, Any], peak: float) -> dict[str, Any]:
    looped, plain = pair(shape)
    window = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1))
    inputs, targets = window[:, :-1].contiguous(), window[:, 1:].contiguous()
    sides: dict[str, Callable[[], None]] = {
        "looplm": step(looped, lambda: looped.training_loss(inputs, targets)[0]),
        "looplm, last loop": step(looped, lambda: looped.cross_entropy(inputs, targets)),
        "transformer_pp": step(plain, lambda: plain.training_loss(inputs, targets)[0]),
        "transformer_pp, as many predictions": step(
            plain, lambda: loss_after_every(shape["layers"], plain, inputs, targets)
        ),
    }
    speed = {name: BATCH * CONTEXT / seconds for name, seconds in alternate(sides, REPEATS).items()}
    flops = {
        "looplm": looped.cost(CONTEXT).total_training_flops,
        "transformer_pp": plain.cost(CONTEXT).total_training_flops,
    }
    return {
        "tokens_per_second": {name: round(value) for name, value in speed.items()},
        "training_flops_per_token": {name: round(value) for name, value in flops.items()},
        "fraction_of_matmul_peak": {name: round(speed[name] * value / peak, 3) for name, value in flops.items()},
        "ratio": {"looplm, last loop / transformer_pp": round(speed["looplm, last loop"] / speed["transformer_pp"], 3)},
        "looplm / transformer_pp": promise(speed["looplm"] / speed["transformer_pp"], 1.0),
        "looplm / transformer_pp, as many predictions": promise(
            speed["looplm"] / speed["transformer_pp, as many predictions"], 1.0
        ),
    }


def loss_after_every(layers: int, model: Transformer, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean of the cross-entropies after every so many layers, through the same closing norm and head."""
    assert model.head is not None
    config = model.config
    tables = rope(torch.arange(inputs.shape[1]), config.width // config.heads, config.rope_theta)
    weights = torch.full((targets.numel(),), layers / config.layers / targets.numel())
    x, loss = model.embedding(inputs), torch.zeros(())
    for index, block in enumerate(model.blocks, start=1):
        x = block(x, tables)
        if index % layers == 0:
            state = model.norm(x).flatten(0, 1)
            loss = loss + cross_entropy(state, model.head.weight, targets.flatten(), weights)[0]
    return loss
