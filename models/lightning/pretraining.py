"""Pretraining of any `CausalLM` as a Lightning module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from models.language_model import CausalLM
from models.lightning.optimizers import build_optimizer, learning_rate_factor
from models.lightning.training import Training


@dataclass(frozen=True)
class Recipe:
    """How the weights move; see the section `pretrain` of `params.yaml` for each field."""

    steps: int
    optimizer: str
    lr: float
    muon_lr: float
    betas: tuple[float, ...]
    weight_decay: float
    clip: float
    warmup: float
    final_lr: float


class Pretraining(Training):
    """Next-token training: the last T of a batch's T + 1 tokens are the targets of the first T.

    Args:
        model: trained in place.
        recipe: of the whole run, not of what is left of it.
        first_step: optimizer steps already taken by the weights that will be restored.
        compiled: run forward and loss through `torch.compile`.
    """

    def __init__(self, model: CausalLM, recipe: Recipe, first_step: int = 0, compiled: bool = False) -> None:
        super().__init__(model, first_step, recipe.clip)
        self.recipe = recipe
        self.compiled = compiled

    def configure_model(self) -> None:
        """Shard over the devices, under `ModelParallelStrategy`; compile if asked to.

        The model is one unit: gradients and optimizer state stay sharded, and the weights are gathered once per step,
        not at every call of a block that a recursion calls again and again.
        """
        if self.device_mesh is not None:
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"], reshard_after_forward=False)
            if type(self.model).training_loss is not CausalLM.training_loss:  # its own: it does not call `forward`
                register_fsdp_forward_method(self.model, "training_loss")
        self.loss_of = torch.compile(self.model.training_loss) if self.compiled else self.model.training_loss

    def loss(self, batch: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        return self.loss_of(batch[:, :-1], batch[:, 1:])

    def learning_rate(self, step: int) -> float:
        """The AdamW learning rate of optimizer step `step`, counted from 1."""
        recipe = self.recipe
        return recipe.lr * learning_rate_factor(step - 1, recipe.steps, recipe.warmup, recipe.final_lr)

    def configure_optimizers(self) -> Any:
        recipe = self.recipe
        optimizer = build_optimizer(
            self.model, recipe.optimizer, recipe.lr, recipe.muon_lr, recipe.betas, recipe.weight_decay
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, recipe.steps, recipe.warmup, recipe.final_lr)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
