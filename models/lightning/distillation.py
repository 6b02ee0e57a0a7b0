"""Distillation of a LoopLM into a MELT as a Lightning module: two phases in one run.

Special here:
- phase and interpolation weight follow from the optimizer step alone, so that a resumed run is one that begins later;
- body and memory gates have learning rates of their own; each phase has its own warmup and cosine (our assumption);
- the frozen teacher is not a part of the module: it is in no checkpoint and in no optimizer.

Source: MELT, section 3.3 and table 6. The exit gate stays the teacher's: no distillation loss reaches it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.lightning.optimizers import learning_rate_factor
from models.lightning.training import Training
from models.looped.distillation import Objective, distill, interpolation_weight
from models.looped.looplm import LoopLM
from models.looped.melt import Melt


@dataclass(frozen=True)
class DistillationRecipe:
    """How the weights move; see the section `distill` of `params.yaml` for each field."""

    phase1_steps: int
    phase2_steps: int
    interpolation: bool
    every_loop: bool
    alignment: float
    lr: float
    gate_lr: float
    betas: tuple[float, ...]
    weight_decay: float
    clip: float
    warmup: float
    final_lr: float

    @property
    def steps(self) -> int:
        return self.phase1_steps + self.phase2_steps

    def objective(self, step: int) -> Objective:
        """What optimizer step `step` (from 0) minimises."""
        if step >= self.phase1_steps:
            return Objective(every_loop=self.every_loop, alignment=self.alignment)
        weight = interpolation_weight(step, self.phase1_steps) if self.interpolation else 1.0
        return Objective(weight, self.every_loop)

    def factor(self, step: int) -> float:
        """The fraction of the peak learning rates at optimizer step `step` (from 0)."""
        start, steps = (0, self.phase1_steps) if step < self.phase1_steps else (self.phase1_steps, self.phase2_steps)
        return learning_rate_factor(step - start, steps, self.warmup, self.final_lr)


class Distillation(Training):
    """A student learns from its teacher: the first T of a batch's T + 1 tokens are read.

    Args:
        student: trained in place, from the weights it has (`models.looped.distillation.start_from`).
        teacher: frozen.
        recipe: of the whole run, not of what is left of it.
        first_step: optimizer steps already taken by the weights that will be restored.
    """

    model: Melt

    def __init__(self, student: Melt, teacher: LoopLM, recipe: DistillationRecipe, first_step: int = 0) -> None:
        super().__init__(student, first_step, recipe.clip)
        self.recipe = recipe
        if student.exit_gate is not None:
            student.exit_gate.requires_grad_(False)
        self._teacher = (teacher.requires_grad_(False),)  # a tuple keeps it from becoming a submodule

    def on_fit_start(self) -> None:
        self._teacher[0].to(self.device)

    def loss(self, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        objective = self.recipe.objective(self.step)
        result = distill(self.model, self._teacher[0], batch[:, :-1], objective)
        return result.loss, result.scalars() | {"interpolation": torch.tensor(objective.weight)}

    def configure_optimizers(self) -> Any:
        recipe = self.recipe
        gates = [parameter for layer in self.model.layers for parameter in _gate_of(layer)]
        among = {id(parameter) for parameter in gates}
        body = [p for p in self.model.parameters() if p.requires_grad and id(p) not in among]
        groups = [*_groups(body, recipe.lr), *_groups(gates, recipe.gate_lr)]
        optimizer = torch.optim.AdamW(
            groups, lr=recipe.lr, betas=(recipe.betas[0], recipe.betas[1]), weight_decay=recipe.weight_decay
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def learning_rate(self, step: int) -> float:
        """The body's learning rate at optimizer step `step`, counted from 1."""
        return self.recipe.lr * self.recipe.factor(step - 1)


def _gate_of(layer: nn.Module) -> Iterable[nn.Parameter]:
    return (parameter for name, parameter in layer.named_parameters() if name.startswith("gate."))


def _groups(parameters: list[nn.Parameter], lr: float) -> list[dict[str, Any]]:
    """Matrices, which decay, and the rest, which does not."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "lr": lr},
        {"params": [p for p in parameters if p.ndim < 2], "lr": lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
