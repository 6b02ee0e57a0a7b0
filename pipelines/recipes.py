"""What choosing a preset sets besides the model: the recipe a paper reports, for models that only need the hardware.

Merged over `params.yaml` and under the command line: `python -m pipelines.distill teacher=artifacts/ouro_1b4
model=melt_1b6 data.vocab_size=49152` runs the paper's two phases on 8 GPUs, once there are tokens of the teacher's
tokenizer, and `distill.lr=1e-5` still changes one of its values.
"""

from __future__ import annotations

from typing import Any

RECIPES: dict[str, dict[str, Any]] = {
    "melt_1b6": {  # MELT, table 6; the chunk of 500 tokens is the model's. Warmup and final rate are our assumptions.
        "teacher": "artifacts/ouro_1b4",
        "distill": {
            "context": 10000,
            "batch_size": 32,  # 320,000 tokens
            "accumulate": 4,  # one sequence at a time on each of 8 GPUs
            "phase1_steps": 500,
            "phase2_steps": 300,
            "alignment": 0.1,
            "lr": 8e-6,
            "gate_lr": 5e-4,
            "betas": [0.9, 0.95],
            "weight_decay": 1e-4,
            "clip": 1.0,
            "log_every": 1,
            "validate_every": 50,
            "validation_tokens": 320000,
            "checkpoint_every": 50,
        },
        "execution": {"accelerator": "gpu", "devices": 8, "strategy": "ddp", "recompute": True},
    }
}
