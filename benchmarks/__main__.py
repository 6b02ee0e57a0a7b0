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

BENCHMARKS = ("training", "neural_memory", "prefill")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Every benchmark in turn.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all if left out")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of both sides")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; choose from {', '.join(BENCHMARKS)}")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    peak = matmul_flops_per_second()
    print(f"{platform.processor() or platform.machine()}, {options.threads} threads, torch {torch.__version__}")
    print(f"matmul peak {peak / 1e9:.1f} GFLOP/s (measured, fp32)\n", flush=True)
    results: dict[str, Any] = {"threads": options.threads, "torch": torch.__version__, "matmul_flops_per_second": peak}
    for name in options.names or BENCHMARKS:
        start = time.perf_counter()
        results[name] = importlib.import_module(f"benchmarks.{name}").run(peak)
        print(f"{name}: {time.perf_counter() - start:.0f} s")
        tell(results[name])
    print(json.dumps(results))


def tell(result: dict[str, Any]) -> None:
    """A result as indented lines; a promise as `ratio 1.03 (wanted >= 1.0) met: true`."""
    for key, value in result.items():
        if isinstance(value, dict) and "met" in value:
            value = f"{value['ratio']} (wanted {value['wanted']}) met: {str(value['met']).lower()}"
        elif isinstance(value, dict):
            value = ", ".join(f"{name} {each:,}" for name, each in value.items())
        print(f"  {key}: {value}")
    print(flush=True)


if __name__ == "__main__":
    main()
