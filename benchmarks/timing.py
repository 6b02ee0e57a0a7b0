"""How a comparison is timed: every side in the same process, in turn, and the fastest turns compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

Sides = Mapping[str, Callable[[], object]]


def alternate(sides: Sides, repeats: int, warmup: int = 1) -> dict[str, float]:
    """Seconds of the fastest turn of each side: what other programs do can only slow one down.

    The sides take turns, so that a slow moment of the machine hits all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(warmup + repeats):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in seconds.items()}


def promise(ratio: float, bound: float, at_least: bool = True) -> dict[str, float | bool | str]:
    """A measured ratio beside the bound it was promised to keep."""
    met = ratio >= bound if at_least else ratio <= bound
    return {"ratio": round(ratio, 3), "wanted": f"{'>=' if at_least else '<='} {bound}", "met": met}
