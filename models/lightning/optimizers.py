"""Optimizers and learning-rate schedule of pretraining.

Special here:
- AdamW decays the matrices of linear maps and embeddings only; norms, biases, scales and learned initial states are
  left alone;
- Muon orthogonalises the momentum of hidden matrices with the project's own Newton-Schulz, fp32 on every device;
- both live in one optimizer, so that one schedule, one clipping and one checkpoint serve either.

Source: AdamW (Loshchilov and Hutter 2019), Muon (Jordan et al. 2024) with the update scale `0.2 sqrt(max(m, n))` of
Moonlight (Liu et al. 2025), which gives Muon the update size of AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from models.mela.newton_schulz import newton_schulz

MUON_MOMENTUM = 0.95


def build_optimizer(
    model: nn.Module, name: str, lr: float, muon_lr: float, betas: tuple[float, ...], weight_decay: float
) -> torch.optim.Optimizer:
    """The optimizer `name` (`adamw` or `muon`) over the parameters of `model`.

    Muon takes the matrices of linear maps, the output head apart; AdamW takes the rest, and decays its matrices.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ends = {id(module.weight) for key, module in model.named_modules() if _is_end(key, module)}
    matrices = ends | {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    taken = matrices - ends if name == "muon" else set()
    rest = [p for p in parameters if id(p) not in taken]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if id(p) in taken], "lr": muon_lr, "muon": True},
        {"params": [p for p in rest if id(p) in matrices], "lr": lr, "muon": False},
        {"params": [p for p in rest if id(p) not in matrices], "lr": lr, "muon": False, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return MuonAdamW(groups, lr=lr, betas=(betas[0], betas[1]), weight_decay=weight_decay)


def _is_end(key: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) or key.rpartition(".")[2] == "head"


class MuonAdamW(torch.optim.AdamW):
    """AdamW whose groups marked `muon` take Muon steps instead."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["muon"]]
        super().step()
        self.param_groups = groups
        for group in groups:
            if group["muon"]:
                self._muon_step(group)
        return loss

    def _muon_step(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())  # AdamW looks for it in every state it loads
                state["momentum"] = torch.zeros_like(parameter)
            state["step"] += 1
            state["momentum"].lerp_(parameter.grad, 1 - MUON_MOMENTUM)
            direction = newton_schulz(parameter.grad.lerp(state["momentum"], MUON_MOMENTUM))  # Nesterov
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(direction.to(parameter.dtype), alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def learning_rate_factor(step: int, steps: int, warmup: float, final: float) -> float:
    """The fraction of the peak learning rate at optimizer step `step` of `steps` (counted from 0).

    Linear warmup over the first `warmup` of the steps, then a cosine that ends at `final` with the last step.
    """
    rising = round(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    progress = (step - rising) / max(1, steps - 1 - rising)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
