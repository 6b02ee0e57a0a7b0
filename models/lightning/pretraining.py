"""Pretraining of any `CausalLM` as a Lightning module.

Special here:
- the module knows the step it starts from, so that a resumed run is an ordinary run that begins later;
- a gradient that is not finite stops the run before it reaches the weights;
- losses stay on the device until someone asks for them.

Shapes: `B` sequences, `T` context length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from models.language_model import CausalLM
from models.lightning.optimizers import build_optimizer, learning_rate_factor


class NonFiniteError(ArithmeticError):
    """The gradient became NaN or infinite; `step` is the optimizer step (from 1) that was not taken."""

    def __init__(self, step: int, loss: float, norm: float) -> None:
        super().__init__(f"loss {loss} and gradient norm {norm} at step {step}")
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
    clip: float
    warmup: float
    final_lr: float


class Pretraining(lightning.LightningModule):
    """Next-token training; batches are `[B, T + 1]` tokens, the last T being the targets of the first T.

    Args:
        model: trained in place.
        recipe: of the whole run, not of what is left of it.
        first_step: optimizer steps already taken by the weights that will be restored.
        compiled: run forward and loss through `torch.compile`.
    """

    def __init__(self, model: CausalLM, recipe: Recipe, first_step: int = 0, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        self.recipe = recipe
        self.first_step = first_step
        self.compiled = compiled
        self._losses: list[Tensor] = []
        self._scalars: list[Mapping[str, Tensor]] = []
        self._norm = torch.zeros(())

    @property
    def step(self) -> int:
        """Optimizer steps taken since the run began, those before a resume included."""
        return self.first_step + self.global_step

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

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self._losses, self._scalars = [], []
        loss, scalars = self.loss_of(batch[:, :-1], batch[:, 1:])
        self._losses.append(loss.detach())
        self._scalars.append(scalars)
        return loss

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Clip the global norm. Called once per step, after the gradients of all devices were averaged."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self._norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not torch.isfinite(self._norm):
            raise NonFiniteError(self.step + 1, self.last_loss(), float(self._norm))

    def last_loss(self) -> float:
        """The training loss of the latest step, on this device's sequences."""
        return float(torch.stack(self._losses).mean())

    def last_scalars(self) -> dict[str, float]:
        """The latest step over all devices: `loss`, `gradient_norm`, and what the family logs beside them."""
        means = {name: torch.stack([each[name] for each in self._scalars]).mean() for name in self._scalars[0]}
        means = {"loss": self.last_loss()} | {name: float(value) for name, value in means.items()}
        averaged = {name: self._over_devices(value, "mean") for name, value in means.items()}
        return averaged | {"gradient_norm": float(self._norm)}

    def learning_rate(self, step: int) -> float:
        """The AdamW learning rate of optimizer step `step`, counted from 1."""
        recipe = self.recipe
        return recipe.lr * learning_rate_factor(step - 1, recipe.steps, recipe.warmup, recipe.final_lr)

    @torch.no_grad()
    def held_out_loss(self, windows: Tensor, batch_size: int) -> float:
        """Mean loss over `windows [R, T + 1]`, in nats per token; every device takes its share of the batches."""
        ranks, batches = self.trainer.world_size, windows.split(batch_size)
        total = 0.0
        self.model.eval()
        for turn in range(-(-len(batches) // ranks)):  # the same number of forward passes on every device
            place = turn * ranks + self.trainer.global_rank
            batch = batches[min(place, len(batches) - 1)].to(self.device)
            with self.trainer.precision_plugin.val_step_context():
                loss = self.model.cross_entropy(batch[:, :-1], batch[:, 1:])
            total += len(batch) * float(loss) * (place < len(batches))
        self.model.train()
        return self._over_devices(total, "sum") / len(windows)

    def _over_devices(self, value: float, how: str) -> float:
        """The sum or mean of a number over all devices."""
        return float(self.trainer.strategy.reduce(torch.tensor(value, device=self.device), reduce_op=how))

    def configure_optimizers(self) -> Any:
        recipe = self.recipe
        optimizer = build_optimizer(
            self.model, recipe.optimizer, recipe.lr, recipe.muon_lr, recipe.betas, recipe.weight_decay
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, recipe.steps, recipe.warmup, recipe.final_lr)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
