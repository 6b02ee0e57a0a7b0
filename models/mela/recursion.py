"""Recursion over a fast and a slow module: who is called when, and which calls are differentiated.

    hlr     h = l = x;  H times:  L times l = low(l + h + x),  then h = high(h + l)
            every cycle but the last runs under no_grad; both l and h are handed on
    hrm     the same calls; only the last call of each module is differentiated (its one-step gradient)
    trm     the same calls and gradients as hlr, with one module in both roles
    titans  h = high(x), once: no hierarchy

Source: Mela's hierarchical latent recursion; HRM (Wang et al. 2025); TRM (Jolicoeur-Martineau 2025); Titans (MAC).
Re-injecting x at every low call is our assumption, and needed: without it no gradient reaches what made x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Module = Callable[[Tensor], Tensor]


def recurse(
    kind: Literal["hlr", "hrm", "trm", "titans"], low: Module, high: Module, x: Tensor, h_cycles: int, l_cycles: int
) -> list[tuple[Tensor, Tensor]]:
    """`(h, l)` after each outer cycle; states of all cycles but the last carry no gradient.

    Args:
        low, high: the modules, `[..., D] -> [..., D]`.
        x: patch states `[..., D]`.
        h_cycles: H, outer cycles.
        l_cycles: L, low calls per outer cycle.
    """
    if kind == "titans":
        return [(high(x), x)]
    differentiating = torch.is_grad_enabled()
    h = l = x  # noqa: E741
    states = []
    for cycle in range(h_cycles):
        last = cycle == h_cycles - 1
        for step in range(l_cycles):
            with torch.set_grad_enabled(differentiating and last and (kind != "hrm" or step == l_cycles - 1)):
                l = low(l + h + x)  # noqa: E741
        with torch.set_grad_enabled(differentiating and last):
            h = high(h + l)
        states.append((h, l))
    return states


def differentiated(kind: str, h_cycles: int, l_cycles: int) -> tuple[int, int, int, int]:
    """Calls of (low without gradient, low with, high without, high with) in one recursion."""
    if kind == "titans":
        return 0, 0, 0, 1
    low = 1 if kind == "hrm" else l_cycles
    return h_cycles * l_cycles - low, low, h_cycles - 1, 1
