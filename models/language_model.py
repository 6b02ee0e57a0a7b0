"""The contract every language model here keeps: parallel training, streaming inference, honest costs.

Special here:
- `forward` (whole sequence) and `extend` (any segmentation) give the same logits;
- weights are initialised per module **name**, so two arms of an ablation share every weight they have in common;
- a model states its own costs, by part, and a test compares them with a FLOP counter.

Shapes: `B` batch, `T` tokens, `D` width, `V` vocabulary.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.configuration import Config, ConfigError, nearest


@dataclass(frozen=True)
class ModelConfig(Config):
    """Fields every language model has; each family extends it."""

    family: ClassVar[str]

    vocab_size: int = 2048  # V
    width: int = 128  # D

    def validate(self) -> None:
        for name in ("vocab_size", "width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")


class State(Protocol):
    """What a model carries between calls of `extend`. Consumed by the call: keep only the returned one."""

    def tensors(self) -> Iterator[Tensor]:
        """Every live tensor (a pre-allocated buffer yields the view that is in use)."""
        ...


def state_bytes(state: State) -> int:
    """Measured size of a streaming state in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.tensors())


@dataclass(frozen=True)
class Cost:
    """What a model costs at one context length, by named part.

    FLOPs count a multiply-add as two and cover matrix products only (as `torch.utils.flop_counter` does).
    """

    parameters: Mapping[str, int]  # part -> number of parameters
    forward_flops: Mapping[str, float]  # part -> FLOPs per token of one forward pass
    training_flops: Mapping[str, float]  # part -> FLOPs per token of forward and backward, as executed
    state_bytes: int  # streaming state of one sequence after `context` tokens

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def total_forward_flops(self) -> float:
        return sum(self.forward_flops.values())

    @property
    def total_training_flops(self) -> float:
        return sum(self.training_flops.values())


class CausalLM(nn.Module):
    """Base class of the language models. Changing token t changes no logit before t, bit for bit."""

    config: ModelConfig
    controls: ClassVar[tuple[str, ...]] = ("on",)  # evaluation-time controls; the first is normal operation
    control: str = "on"

    @abstractmethod
    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens [B, T]` (int64, any T >= 1) -> logits `[B, T, V]`."""

    @abstractmethod
    def init_state(self, batch_size: int) -> Any:
        """The state before the first token, on the device and in the dtype of the weights."""

    @abstractmethod
    def extend(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """`tokens [B, t]`, t >= 1, after `state` (consumed) -> logits `[B, t, V]` and the next state."""

    @abstractmethod
    def cost(self, context: int) -> Cost:
        """Costs for sequences of `context` tokens; depends on the config alone, so it works on the meta device."""

    def unused(self, context: int) -> str | None:
        """What of the model no sequence of `context` tokens ever runs, and what would run it; None if all runs."""
        return None

    @property
    def grain(self) -> int:
        """Tokens at a time, or whole multiples of it, that `extend` must be fed to give the logits of `forward`."""
        return 1

    def training_loss(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What training minimises, in nats per token.

        Args:
            inputs: `[B, T]` tokens.
            targets: `[B, T]` the tokens that follow them.
        Returns:
            The scalar to minimise, and named scalars to log beside it (a family with its own objective overrides this).
        """
        return self.cross_entropy(inputs, targets), {}

    def cross_entropy(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean next-token cross-entropy of `forward`, in nats: what validation compares any two models by."""
        logits = self(inputs)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def set_control(self, control: str) -> None:
        """Switch an evaluation-time control, such as Mela's `zero`; `ConfigError` for one the family has not."""
        if control not in self.controls:
            known = list(self.controls)
            raise ConfigError(f"control={control!r}{nearest(control, known)}; choose from {', '.join(known)}")
        self.control = control

    def init_weights(self, seed: int) -> None:
        """Reset every module under a generator keyed by (seed, module name): our assumption, so that arms pair."""
        with torch.random.fork_rng(devices=[]):
            for name, module in self.named_modules():
                reset = getattr(module, "reset_parameters", None)
                if reset is not None:
                    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                    torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
                    reset()
