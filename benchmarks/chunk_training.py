"""Training steps of MELT by chunk size, fp32: pretraining, and both phases of distillation.

Chunks run one after the other, so small ones are dear. What each size is worth is what the sweep
`sweeps/melt_chunk.yaml` measures: its table has perplexity beside the speed.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.timing import alternate
from benchmarks.training import step
from models import build_model, preset
from models.looped.distillation import Objective, distill, training_flops
from models.looped.looplm import LoopLM
from models.looped.melt import Melt

BATCH, CONTEXT, REPEATS = 4, 512, 2
CHUNKS: tuple[int | None, ...] = (16, 32, 64, 128, 256, None)
OBJECTIVES: dict[str, Objective | None] = {
    "pretraining": None,
    "distillation, phase 1": Objective(weight=0.5),
    "distillation, phase 2": Objective(alignment=0.1),
}


def run(peak: float) -> dict[str, Any]:
    """Tokens per second at each chunk size: forward, loss, backward and the AdamW step."""
    teacher = cast(LoopLM, build_model(preset("looplm_tiny"))).eval().requires_grad_(False)
    students = {
        "one chunk" if chunk is None else str(chunk): cast(Melt, build_model(preset("melt_tiny", chunk=chunk))).train()
        for chunk in CHUNKS
    }
    window = torch.randint(teacher.config.vocab_size, (BATCH, CONTEXT + 1))
    inputs, targets = window[:, :-1].contiguous(), window[:, 1:].contiguous()

    measured = {}
    for name, objective in OBJECTIVES.items():

        def loss(student: Melt, objective: Objective | None = objective) -> Tensor:
            if objective is None:
                return student.training_loss(inputs, targets)[0]
            return distill(student, teacher, inputs, objective).loss

        def flops(student: Melt, objective: Objective | None = objective) -> float:
            if objective is None:
                return student.cost(CONTEXT).total_training_flops
            return training_flops(student, teacher, CONTEXT, objective.every_loop)

        sides = {chunk: step(student, partial(loss, student)) for chunk, student in students.items()}
        speed = {chunk: BATCH * CONTEXT / seconds for chunk, seconds in alternate(sides, REPEATS).items()}
        measured[f"{name}, steps of {BATCH} x {CONTEXT} tokens, by tokens per chunk"] = {
            "tokens_per_second": {chunk: round(value) for chunk, value in speed.items()},
            "fraction_of_matmul_peak": {
                chunk: round(value * flops(students[chunk]) / peak, 3) for chunk, value in speed.items()
            },
        }
    return measured
