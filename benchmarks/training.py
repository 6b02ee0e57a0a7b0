"""Training steps of Transformer++, fp32, against `transformers.LlamaForCausalLM` of the same shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.timing import alternate, promise
from models import build_model, preset
from models.language_model import CausalLM

BATCH, CONTEXT, REPEATS = 8, 512, 7
SHAPE: dict[str, Any] = {"width": 256, "layers": 4, "heads": 4, "hidden": 688, "vocab_size": 2048}


def pair() -> tuple[CausalLM, LlamaForCausalLM]:
    """Both models, with as many parameters."""
    ours = build_model(preset("transformer_pp_tiny", **SHAPE)).train()
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SHAPE["vocab_size"],
            hidden_size=SHAPE["width"],
            intermediate_size=SHAPE["hidden"],
            num_hidden_layers=SHAPE["layers"],
            num_attention_heads=SHAPE["heads"],
            num_key_value_heads=SHAPE["heads"],
            use_cache=False,
        )
    ).train()
    theirs.set_attn_implementation("sdpa")
    return ours, theirs


def run(peak: float) -> dict[str, Any]:
    """Tokens per second of both sides: forward, loss, backward and the AdamW step, fp32."""
    ours, theirs = pair()
    window = torch.randint(SHAPE["vocab_size"], (BATCH, CONTEXT + 1))
    inputs, targets = window[:, :-1].contiguous(), window[:, 1:].contiguous()
    sides = {
        "transformer_pp": step(ours, lambda: ours.training_loss(inputs, targets)[0]),
        "llama": step(theirs, lambda: cross_entropy(theirs(inputs).logits, targets)),
    }
    tokens = BATCH * CONTEXT
    speed = {name: tokens / seconds for name, seconds in alternate(sides, REPEATS).items()}
    flops = ours.cost(CONTEXT).total_training_flops
    measured = {
        "tokens_per_second": {name: round(value) for name, value in speed.items()},
        "fraction_of_matmul_peak": {name: round(value * flops / peak, 3) for name, value in speed.items()},
        "transformer_pp / llama": promise(speed["transformer_pp"] / speed["llama"], 1.0),
    }
    return {f"step of {BATCH} x {CONTEXT} tokens": measured}


def step(model: torch.nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """One optimizer step of `model`, as a call without arguments."""
    optimizer = AdamW(model.parameters(), lr=1e-4)

    def once() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        optimizer.step()

    return once


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss `CausalLM.training_loss` computes."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
