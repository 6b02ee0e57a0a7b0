"""Every benchmark in turn: lines for people, then one JSON object as the last line.

    python -m benchmarks [--threads N] [NAME ...]

The exit code is 0 when everything could be measured, whether or not a promise was met: read `met`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import time
from typing import Any

import torch

from pipelines.measurement import matmul_flops_per_second

BENCHMARKS = ("training", "neural_memory", "prefill", "looped_training", "decode", "chunk_training")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Every benchmark in turn.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all if left out")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of both sides")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; choose from {', '.join(BENCHMARKS)}")
    try:
        modules = {name: importlib.import_module(f"benchmarks.{name}") for name in options.names or BENCHMARKS}
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is not installed, and is what we are compared with: pip install -e '.[test]'")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    peak = matmul_flops_per_second()
    print(f"{platform.processor() or platform.machine()}, {options.threads} threads, torch {torch.__version__}")
    print(f"matmul peak {peak / 1e9:.1f} GFLOP/s (measured, fp32)\n", flush=True)
    results: dict[str, Any] = {"threads": options.threads, "torch": torch.__version__, "matmul_flops_per_second": peak}
    ratios = []
    for name, benchmark in modules.items():
        start = time.perf_counter()
        results[name] = benchmark.run(peak)
        print(f"{name}: {str(benchmark.__doc__).splitlines()[0]} ({time.perf_counter() - start:.0f} s)")
        for case, measured in results[name].items():
            ratios += tell(case, measured)
    results["promises"] = {"made": len(ratios), "met": sum(ratio["met"] for ratio in ratios)}
    print(f"{results['promises']['met']} of {len(ratios)} promises met\n")
    print(json.dumps(results))


def tell(case: str, measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Print one case; returns its promised ratios."""
    print(f"  {case}")
    for name, value in measured.items():
        text = (
            ", ".join(f"{side} {number:,}" for side, number in value.items())
            if "met" not in value
            else (f"{value['ratio']} (wanted {value['wanted']}) met: {str(value['met']).lower()}")
        )
        print(f"    {name.replace('_', ' ')}: {text}", flush=True)
    print()
    return [value for value in measured.values() if "met" in value]


if __name__ == "__main__":
    main()
