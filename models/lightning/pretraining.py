"""Pretraining of any `CausalLM` as a Lightning module.

Special here: a loss that is not finite stops the run at once, before it reaches the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import lightning
import torch
from torch import Tensor

from models.language_model import CausalLM
from models.lightning.optimizers import build_optimizer, learning_rate_factor


class NonFiniteLossError(ArithmeticError):
    """The loss became NaN or infinite; `step` is the optimizer step (from 0) that was not taken."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"loss={loss} at step {step}")
        self.step = step


@dataclass(frozen=True)
class Recipe:
    """How the weights move; see the section `pretrain` of `params.yaml` for each field."""

    steps: int
    optimizer: str
    lr: float
    muon_lr: float
    betas: tuple[float, ...]
    weight_decay: float
    warmup: float
    final_lr: float


class Pretraining(lightning.LightningModule):
    """Next-token training; batches are `[B, T + 1]` tokens, the last T being the targets of the first T."""

    def __init__(self, model: CausalLM, recipe: Recipe) -> None:
        super().__init__()
        self.model = model
        self.recipe = recipe

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss, extras = self.model.training_loss(batch[:, :-1], batch[:, 1:])
        if not torch.isfinite(loss):
            raise NonFiniteLossError(self.global_step, loss.item())
        self.log("train/loss", loss.detach())
        self.log_dict({f"train/{name}": value.detach() for name, value in extras.items()})
        return loss

    def validation_step(self, batch: Tensor, _: int) -> None:
        loss = self.model.training_loss(batch[:, :-1], batch[:, 1:])[0]
        self.log("validation/loss", loss, on_epoch=True, batch_size=batch.shape[0])

    def configure_optimizers(self) -> dict:
        recipe = self.recipe
        optimizer = build_optimizer(
            self.model, recipe.optimizer, recipe.lr, recipe.muon_lr, recipe.betas, recipe.weight_decay
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, recipe.steps, recipe.warmup, recipe.final_lr)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
