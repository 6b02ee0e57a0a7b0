"""Memory of the key/value cache and of the weights, from configurations: `python -m pipelines.kv_table`.

Recomputes table 2 of the MELT paper for `melt_1b6`, its teacher `ouro_1b4` and `qwen3_1b7` in bfloat16, beside the
figures it reported, and measures live caches of the tiny presets against what their configurations say.
Units are decimal: 1 MB = 10^6 bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

import torch
from rich.console import Console

from models import build_model
from models.language_model import state_bytes
from models.presets import preset
from pipelines.reported import paper
from pipelines.tables import Table, table

LARGE = ("melt_1b6", "ouro_1b4", "qwen3_1b7")
TINY = ("melt_tiny", "looplm_tiny", "transformer_pp_tiny")
CONTEXTS = (32768, 32000)  # tokens; the "32k" of the paper are 32,000
MEASURED = 1000  # tokens in a live cache


def computed(name: str) -> dict[str, float]:
    """What the configuration of a preset says, in bfloat16 and under the names of the paper's table."""
    with torch.device("meta"):
        model = build_model(preset(name)).to(torch.bfloat16)
    costs = {context: model.cost(context) for context in (1, *CONTEXTS)}
    return {
        "kv_mb_per_token": costs[1].state_bytes / 1e6,
        "weights_gb": 2 * costs[1].total_parameters / 1e9,
        **{f"kv_{context}_gb": costs[context].state_bytes / 1e9 for context in CONTEXTS},
    }


@torch.no_grad()
def measured(name: str, tokens: int = MEASURED) -> tuple[int, int]:
    """Bytes of the live cache of one sequence in a preset's model, and what its configuration says."""
    model = build_model(preset(name))
    _, state = model.extend(torch.zeros(1, tokens, dtype=torch.long), model.init_state(1))
    return state_bytes(state), model.cost(tokens).state_bytes


def large_table() -> Table:
    """The paper's table 2, computed; what it reported in brackets."""
    figures = paper("melt")["table2_kv_memory"]
    return table(
        "Cache and weights in bfloat16",
        ["model", "KV MB\nper token", "weights\nGB", *(f"KV GB\n{n:,}" for n in CONTEXTS), "total\n32,768"],
        [_row(name, computed(name), figures[name]) for name in LARGE],
        "Computed from the configurations, the paper's own figures in brackets where they differ in the last digit "
        "they print. It counts 1.721 billion weights for Qwen3-1.7B, which has 1,720,574,976; ours leaves out its "
        "7,168 query and key norms.",
    )


def tiny_table(sizes: Mapping[str, tuple[int, int]]) -> Table:
    """Live caches beside the computed ones: model -> `measured(model)`."""
    rows = [
        [name, f"{live:,}", f"{stated:,}", "equal" if live == stated else "different"]
        for name, (live, stated) in sizes.items()
    ]
    return table(f"Live cache after {MEASURED:,} tokens in float32", ["model", "bytes", "computed", ""], rows)


def _row(name: str, values: Mapping[str, float], figures: Mapping[str, float]) -> list[str]:
    digits = {"kv_mb_per_token": 6, "weights_gb": 3, "kv_32768_gb": 5, "kv_32000_gb": 2}
    cells = [_cell(values[key], figures[key], digits[key]) for key in digits]
    total = values["kv_32768_gb"] + values["weights_gb"]
    return [name, *cells, f"{total:.5f}"]


def _cell(value: float, reported: float, digits: int) -> str:
    ours, theirs = f"{value:.{digits}f}", f"{reported:.{digits}f}"
    return ours if ours == theirs else f"{ours} [{theirs}]"


def main() -> None:
    """The command line; fails when a live cache is not what its configuration says."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.kv_table", description="Memory of cache and weights.")
    parser.parse_args()
    sizes = {name: measured(name) for name in TINY}
    console = Console()
    for each in (large_table(), tiny_table(sizes)):
        console.print(each.rich())
        if each.caption:
            console.print(each.caption, style="dim")
    sys.exit(0 if all(live == stated for live, stated in sizes.values()) else 1)


if __name__ == "__main__":
    main()
