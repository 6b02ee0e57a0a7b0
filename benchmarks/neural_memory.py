"""The neural memory, forward and backward with Newton-Schulz, against `titans-pytorch` at equal shapes."""

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

WIDTH, HEADS, CHUNK, REPEATS = 128, 4, 8, 5
SHAPES = {"a training batch of mela_tiny": (16, 64), "longer sequences, same patches": (4, 256)}  # rows, patches


def run(peak: float) -> dict[str, Any]:
    """Patches per second, for memories of one and of two layers.

    `titans` updates its weights after every chunk, as we do. `titans, lazy` is its default: it takes the gradients of
    all chunks at the weights before the first: less to do one after the other, but another computation.
    """
    result: dict[str, Any] = {"what": f"width {WIDTH}, {HEADS} heads, chunks of {CHUNK} patches, fp32"}
    for name, (rows, patches) in SHAPES.items():
        for depth in (1, 2):
            speeds, fractions, ratio = compare(rows, patches, depth, peak)
            label = f"{name} ({rows} x {patches}), depth {depth}"
            result[f"{label}: patches per second"] = speeds
            result[f"{label}: fraction of matmul peak"] = fractions
            result[f"{label}: ours / titans"] = promise(ratio, 3.0)
    return result


def compare(rows: int, patches: int, depth: int, peak: float) -> tuple[dict[str, int], dict[str, float], float]:
    """Speeds, fractions of the peak (the FLOPs are ours on every side), and our speed over that of `titans`."""
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
    speeds = {side: round(rows * patches / each) for side, each in seconds.items()}
    fractions = {side: round(flops / each / peak, 3) for side, each in seconds.items()}
    return speeds, fractions, seconds["titans"] / seconds["ours"]


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
