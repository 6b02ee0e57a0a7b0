"""The neural memory, forward and backward with Newton-Schulz, fp32, against `titans-pytorch` at equal shapes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.timing import alternate, promise
from models.mela.neural_memory import NeuralMemory

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from titans_pytorch import MemoryMLP
    from titans_pytorch import NeuralMemory as TitansMemory

WIDTH, HEADS, CHUNK, REPEATS = 128, 8, 8, 15
SHAPES = {"a training batch of mela_tiny": (16, 64), "longer sequences, same patches": (4, 256)}  # rows, patches


def run(peak: float) -> dict[str, Any]:
    """Patches per second, for memories of one and of two layers.

    `titans` updates its weights after every chunk, as we do. `titans, lazy` is its default: it takes the gradients of
    all chunks at the weights before the first: less to do one after the other, but another computation.
    """
    return {
        f"{name} ({rows} x {patches}), depth {depth}": compare(rows, patches, depth, peak)
        for name, (rows, patches) in SHAPES.items()
        for depth in (1, 2)
    }


def compare(rows: int, patches: int, depth: int, peak: float) -> dict[str, Any]:
    """Speeds, and fractions of the peak; the FLOPs are ours on every side."""
    x = torch.randn(rows, patches, WIDTH, requires_grad=True)
    ours, theirs, lazy = NeuralMemory(WIDTH, HEADS, CHUNK, depth), titans(depth, CHUNK), titans(depth, None)
    sides = {
        "ours": step(ours, x, lambda x: ours(x, ours.init_state(rows), patches // CHUNK)[0]),
        "titans": step(theirs, x, lambda x: theirs(x)[0]),
        "titans, lazy": step(lazy, x, lambda x: lazy(x)[0]),
    }
    with FlopCounterMode(display=False) as counter:
        sides["ours"]()
    flops, seconds = counter.get_total_flops(), alternate(sides, REPEATS)
    return {
        "patches_per_second": {side: round(rows * patches / each) for side, each in seconds.items()},
        "fraction_of_matmul_peak": {side: round(flops / each / peak, 3) for side, each in seconds.items()},
        "ours / titans": promise(seconds["titans"] / seconds["ours"], 3.0),
    }


def titans(depth: int, batch: int | None) -> TitansMemory:
    """Their memory with our arithmetic: plain network, momentum, decay, Newton-Schulz on every update."""
    return TitansMemory(
        dim=WIDTH,
        dim_head=WIDTH // HEADS,
        heads=HEADS,
        chunk_size=CHUNK,
        batch_size=batch,
        model=MemoryMLP(WIDTH // HEADS, depth=depth, expansion_factor=1.0),
        mem_model_norm_add_residual=False,
        spectral_norm_surprises=True,
        post_rmsnorm=True,
        pre_rmsnorm=False,
    )


def step(model: nn.Module, x: Tensor, forward: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """Forward and backward to the input and every parameter, as a call without arguments."""

    def once() -> None:
        model.zero_grad(set_to_none=True)
        x.grad = None
        forward(x).square().mean().backward()

    return once
