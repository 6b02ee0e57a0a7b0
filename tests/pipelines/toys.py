"""Language models whose loss at every target has a closed form, for tests of the stages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from models.language_model import CausalLM, Cost, ModelConfig

VOCAB = 11


@dataclass(frozen=True)
class ToyConfig(ModelConfig):
    family: ClassVar[str] = "toy"


@dataclass
class Seen:
    """The state of `Positional`: how many tokens were read."""

    count: Tensor

    def tensors(self) -> Iterator[Tensor]:
        yield self.count


class Positional(CausalLM):
    """Its logit for token 0 is the number of tokens read so far, 0 for the others: every loss tells its position."""

    controls: ClassVar[tuple[str, ...]] = ("on", "shuffle")

    def __init__(self) -> None:
        super().__init__()
        self.config = ToyConfig(vocab_size=VOCAB, width=1)
        self.anchor = nn.Parameter(torch.zeros(()))
        self.calls: list[tuple[str, str, tuple[int, ...]]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls.append(("forward", self.control, tuple(tokens.shape)))
        return self.logits(tokens, 0)

    def init_state(self, batch_size: int) -> Seen:
        return Seen(torch.zeros(batch_size, dtype=torch.long))

    def extend(self, tokens: Tensor, state: Seen) -> tuple[Tensor, Seen]:
        self.calls.append(("extend", self.control, tuple(tokens.shape)))
        return self.logits(tokens, int(state.count[0])), Seen(state.count + tokens.shape[1])

    def cost(self, context: int) -> Cost:
        return Cost({"anchor": 1}, {"all": 0.0}, {"all": 0.0}, 8)

    def logits(self, tokens: Tensor, seen: int) -> Tensor:
        logits = self.anchor + torch.zeros(*tokens.shape, VOCAB)
        logits[..., 0] = torch.arange(1, tokens.shape[1] + 1) + seen
        return logits


class Bigram(Positional):
    """Logits are a row of a table, looked up by the current token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))

    def logits(self, tokens: Tensor, seen: int) -> Tensor:
        return self.table[tokens]


def positional_loss(position: int, target: int) -> float:
    """Closed form of `Positional` after `position + 1` tokens."""
    seen = position + 1
    return math.log(math.exp(seen) + VOCAB - 1) - (seen if target == 0 else 0)
