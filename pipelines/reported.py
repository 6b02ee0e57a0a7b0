"""What the two papers reported, as data: printed beside our numbers, never mixed with them.

The files `papers/mela.yaml` and `papers/melt.yaml` also say where each figure comes from and what no paper reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

SIZES = {"400m": "400M", "800m": "800M", "1b2": "1.2B"}  # as the Mela paper's table 5 names them, and as printed
PAPERS = Path(__file__).parent / "papers"


@dataclass(frozen=True)
class Curve:
    """Perplexity against context length, as a paper reported it."""

    size: str  # "400m"
    model: str  # "mela"
    perplexity: dict[int, float]  # context length in tokens -> perplexity


@cache
def paper(name: str) -> dict[str, Any]:
    """Everything in `papers/<name>.yaml`: `title`, `source`, `provenance`, and one key per table."""
    return yaml.safe_load((PAPERS / f"{name}.yaml").read_text(encoding="utf-8"))


def citation(name: str) -> str:
    """Where the figures of a paper come from, in one line."""
    return f"{paper(name)['title']}, {paper(name)['source']}, {paper(name)['provenance']}"


def length_curves() -> list[Curve]:
    """Table 5 (and figure 4) of the Mela paper: every size and model, mean over disjoint windows."""
    table = paper("mela")["table5_length"]
    return [Curve(size, model, points) for size in SIZES for model, points in table[size].items()]
