"""How MELT's memory of a token changes from loop to loop: `h_t = z_t * h_{t-1} + (1 - z_t) * x_t`.

Special here:
- with `h_0 = x_1` (our assumption) the first loop gives `h_1 = x_1` whatever the gate says, so no gate runs in it;
- `mean`, `ema`, `last` and `first` are gates too: constants that depend on the loop alone.

Source: MELT, equation 1 and table 3. Our assumptions: bias -1.4 (a mean gate of about 0.2), small weights at
the start.

Shapes: `B` batch, `T` tokens, `D` width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from models.layers import Linear

GateName = Literal["elementwise", "scalar", "mean", "ema", "last", "first"]


class LearnedGate(nn.Module):
    """`z_t = sigmoid(x_t W_z + h_{t-1} U_z + b_z)`, one value per feature (`elementwise`) or per token (`scalar`)."""

    def __init__(self, width: int, values: int, bias: float) -> None:
        super().__init__()
        self.start = bias
        self.w_z = Linear(width, values, scale=0.1)
        self.u_z = Linear(width, values, scale=0.1)
        self.b_z = nn.Parameter(torch.empty(values))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.b_z, self.start)

    def forward(self, stream: Tensor, memory: Tensor, loop: int) -> Tensor:
        """z of `x_t` and `h_{t-1}`, both `[B, T, D]`: `[B, T, D]` or `[B, T, 1]`; the same in every loop from 1 on."""
        return torch.sigmoid(self.w_z(stream) + self.u_z(memory) + self.b_z)


class FixedGate(nn.Module):
    """A gate without parameters: `mean` of all loops so far, `ema` with a constant, the `last` or the `first` loop."""

    def __init__(self, name: GateName, ema: float) -> None:
        super().__init__()
        self.name, self.ema = name, ema

    def forward(self, stream: Tensor, memory: Tensor, loop: int) -> Tensor:
        """z as `[1, 1, 1]`, in `loop` (from 0)."""
        value = {"mean": loop / (loop + 1), "ema": self.ema, "last": 0.0, "first": 1.0}[self.name]
        return stream.new_full((1, 1, 1), value)


def build_gate(name: GateName, width: int, bias: float, ema: float) -> LearnedGate | FixedGate:
    """The gate of one layer."""
    if name in ("elementwise", "scalar"):
        return LearnedGate(width, width if name == "elementwise" else 1, bias)
    return FixedGate(name, ema)


def gate_flops(name: GateName, width: int) -> float:
    """FLOPs per token of one gate in one loop."""
    return {"elementwise": 4.0 * width * width, "scalar": 4.0 * width}.get(name, 0.0)


def remember(stream: Tensor, memory: Tensor, gate: Tensor) -> Tensor:
    """`z * h + (1 - z) * x` as `x + z (h - x)`: exactly x at z = 0 and exactly h at z = 1."""
    return torch.lerp(stream, memory, gate)
