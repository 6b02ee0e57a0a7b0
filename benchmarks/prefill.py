"""Reading a long prompt with Mela: the cost of a token must not grow with the context, nor must the state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import alternate, promise
from models import build_model, preset
from models.language_model import CausalLM, state_bytes

SHORT, LONG, SLICE, REPEATS = 4096, 32768, 4096, 3


def run(peak: float) -> dict[str, Any]:
    """Tokens per second at both lengths, and the bytes of the state left behind."""
    model = build_model(preset("mela_tiny")).eval()
    tokens = torch.randint(model.config.vocab_size, (1, LONG))
    left: dict[int, int] = {}

    def read(length: int) -> None:
        left[length] = state_bytes(prefill(model, tokens[:, :length]))

    sides = {"short": lambda: read(SHORT), "long": lambda: read(LONG)}
    seconds = alternate(sides, REPEATS)
    short, long = seconds["short"] / SHORT, seconds["long"] / LONG
    flops = model.cost(LONG).total_forward_flops
    measured = {
        "tokens_per_second": {str(SHORT): round(1 / short), str(LONG): round(1 / long)},
        "fraction_of_matmul_peak": {
            str(SHORT): round(flops / short / peak, 3),
            str(LONG): round(flops / long / peak, 3),
        },
        "state_bytes": {str(length): size for length, size in left.items()},
        "seconds per token, long / short": promise(long / short, 1.1, at_least=False),
        "state bytes, long / short": promise(left[LONG] / left[SHORT], 1.0, at_least=False),
    }
    return {f"one sequence of {SHORT} and of {LONG} tokens": measured}


def prefill(model: CausalLM, tokens: Tensor) -> Any:
    """The state after `tokens [1, T]`."""
    state = model.init_state(1)
    with torch.inference_mode():
        for part in tokens.split(SLICE, dim=1):
            _, state = model.extend(part, state)
    return state
