"""What every training here shares, as a Lightning module: steps, losses, clipping, validation.

Special here:
- the module knows the step it starts from, so that a resumed run is an ordinary run that begins later;
- a gradient that is not finite stops the run before it reaches the weights;
- losses stay on the device until someone asks for them.

Shapes: `B` sequences, `T` context length.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.language_model import CausalLM


class NonFiniteError(ArithmeticError):
    """The gradient became NaN or infinite; `step` is the optimizer step (from 1) that was not taken."""

    def __init__(self, step: int, loss: float, norm: float) -> None:
        super().__init__(f"loss {loss} and gradient norm {norm} at step {step}")
        self.step = step


class Training(lightning.LightningModule):
    """A training of `model`, in place; batches are `[B, T + 1]` tokens.

    Args:
        first_step: optimizer steps already taken by the weights that will be restored.
        clip: global gradient norm.
    """

    def __init__(self, model: CausalLM, first_step: int, clip: float) -> None:
        super().__init__()
        self.model = model
        self.first_step = first_step
        self.clip = clip
        self._losses: list[Tensor] = []
        self._scalars: list[Mapping[str, Tensor]] = []
        self._norm = torch.zeros(())

    @abstractmethod
    def loss(self, batch: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """What to minimise for `batch [B, T + 1]`, and named scalars to log beside it."""

    @abstractmethod
    def learning_rate(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 1."""

    @property
    def step(self) -> int:
        """Optimizer steps taken since the run began, those before a resume included."""
        return self.first_step + self.global_step

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self._losses, self._scalars = [], []
        loss, scalars = self.loss(batch)
        self._losses.append(loss.detach())
        self._scalars.append(scalars)
        return loss

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Clip the global norm. Called once per step, after the gradients of all devices were averaged."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
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
