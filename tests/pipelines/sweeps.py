"""Small sweeps for tests: a plan as a launch would freeze it, without Hydra and without token data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from models.families import FAMILIES
from pipelines.config import ExecutionConfig, TrackingConfig
from pipelines.sweep_file import DEFAULTS
from pipelines.sweeping.plan import Local, Plan, code_of
from tests.pipelines.settings import PARAMS

BUDGET = {
    "preset": "transformer_pp_tiny",
    "config": {
        "pretrain": {"context": 512, "batch_size": 4, "tokens": 192 * 4 * 512},
        "evaluate": {"contexts": [512], "score_tokens": 128},
    },
}


def values(factors: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A sweep over the layers of a Transformer++, with some fields changed."""
    stated = {
        "title": "Layers",
        "source": "ours",
        "factors": {"model": factors or {"layers": [1, 2]}},
        "baseline": {name: levels[0] for name, levels in (factors or {"layers": [1]}).items()},
        "measures": ["ppl/window_mean/1x"],
        "budgets": {"tiny": BUDGET},
    }
    return DEFAULTS | stated | changes


def plan(factors: dict[str, Any] | None = None, name: str = "layers", **changes: Any) -> Plan:
    base = yaml.safe_load(PARAMS.read_text("utf-8")) | {"models": {}, "students": {}}
    del base["defaults"]
    model = {"model_name": "transformer_pp_tiny", "model": {"vocab_size": "${data.vocab_size}"}}
    code = dict.fromkeys(FAMILIES, "0" * 64) | {"transformer": code_of("pretrain", "transformer")}
    stated = values(factors, **changes)
    return Plan(name, stated, {"transformer_pp_tiny": base | model}, {base["data"]["directory"]: "d" * 64}, code)


def local(folder: Path, uri: str = "none") -> Local:
    """Execution in `folder`, with one thread."""
    params = yaml.safe_load(PARAMS.read_text("utf-8"))
    execution = params["execution"] | {"checkpoints": str(folder), "threads": 1, "accelerator": "cpu"}
    return Local(TrackingConfig(uri, "layers"), ExecutionConfig(**execution))
