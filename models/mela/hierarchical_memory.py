"""Hierarchical memory: patches in, fused memory states out, for every outer cycle of the recursion.

Special here:
- every call of a module starts its memories from the incoming state, never from another cycle's final one: that would
  leak the future. Streaming therefore keeps one state per call, `H * (L + 1)` of them;
- fusion runs with gradient for every cycle, also for those whose (h, l) carry none.

Source: Mela, hierarchical memory module. Our assumptions: RMSNorm after the patch convolution, SiLU between the two
layers of the fusion.

Shapes: `B` rows, `T` tokens, `P` tokens per patch, `N` patches, `D` width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers import Linear, RMSNorm
from models.mela.config import MelaConfig
from models.mela.memory_block import MemoryModule
from models.mela.neural_memory import MemoryState
from models.mela.recursion import differentiated, recurse

CallStates = list[list[MemoryState | None]]  # per call of a module in a recursion, per block


class PatchEncoder(nn.Module):
    """`Conv1d(D, D, kernel=P, stride=P)`, written as the matrix product it is, and RMSNorm."""

    def __init__(self, width: int, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.conv = Linear(patch_size * width, width)
        self.norm = RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, N * P, D] -> [B, N, D]`."""
        batch, length, width = x.shape
        patches = self.conv(x.reshape(batch, length // self.patch_size, self.patch_size * width))
        return self.norm(patches.to(self.norm.weight.dtype))


class Fusion(nn.Module):
    """`z = Fuse(h, l)`, each `[..., D]`."""

    def __init__(self, width: int, kind: Literal["mlp", "weighted_sum"]) -> None:
        super().__init__()
        self.mlp = kind == "mlp"
        if self.mlp:
            self.up_proj = Linear(2 * width, width)
            self.down_proj = Linear(width, width)
        else:
            self.weights = nn.Parameter(torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.mlp:
            nn.init.constant_(self.weights, 0.5)

    def forward(self, h: Tensor, l: Tensor) -> Tensor:  # noqa: E741
        if self.mlp:
            return self.down_proj(functional.silu(self.up_proj(torch.cat((h, l), dim=-1))))
        return self.weights[0] * h + self.weights[1] * l


class InitialTokens(nn.Module):
    """Learned memory tokens that stand where no patch is: before the text."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(count, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.tokens, std=self.tokens.shape[1] ** -0.5)


class HierarchicalMemory(nn.Module):
    """Patch states to memory states, `[B, N, D] -> [stacked, B, N, D]`: one per outer cycle that the decoder reads."""

    def __init__(self, config: MelaConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = PatchEncoder(config.width, config.patch_size)
        self.initial = InitialTokens(config.memory_tokens, config.width)
        self.h_module = MemoryModule(config, config.h_blocks)
        self.l_module = MemoryModule(config, config.l_blocks) if config.recursion in ("hlr", "hrm") else None
        self.fusion = None
        if config.recursion == "hlr" and config.fusion != "none":
            self.fusion = Fusion(config.width, config.fusion)
        self.skip = Linear(config.width, config.width) if config.patch_skip else None

    def init_state(self, batch_size: int) -> CallStates:
        """M_0 and no momentum for every call, in the order of the calls."""
        high = self.h_module.init_state(batch_size)
        if self.config.recursion == "titans":
            return [high]
        low = self.l_module.init_state(batch_size) if self.l_module is not None else high
        return ([low] * self.config.l_cycles + [high]) * self.config.h_cycles

    def before_text(self, batch_size: int) -> Tensor:
        """The states of the M patches before the text, `[stacked, B, M, D]`: learned tokens; MemStack adds 0."""
        tokens = self.initial.tokens.expand(1, batch_size, -1, -1)
        return torch.cat((tokens.new_zeros(self.config.stacked - 1, *tokens.shape[1:]), tokens))

    def forward(self, x: Tensor, state: CallStates, writes: int) -> tuple[Tensor, CallStates]:
        """Memory states of patches that start at a memory-chunk boundary.

        Args:
            x: patch states `[B, N, D]`, N >= 1.
            state: the memories before the first of them.
            writes: how many whole chunks update the memories.
        Returns:
            `z [stacked, B, N, D]` of the cycles the decoder reads (the last one last), and the memories after `writes`
            chunks.
        """
        before, after = iter(state), []

        def call(module: MemoryModule, x: Tensor) -> Tensor:
            y, states = module(x, next(before), writes)
            after.append(states)
            return y

        low = self.l_module or self.h_module
        cycles = recurse(
            self.config.recursion,
            lambda x: call(low, x),
            lambda x: call(self.h_module, x),
            x,
            self.config.h_cycles,
            self.config.l_cycles,
        )
        z = [h if self.fusion is None else self.fusion(h, l) for h, l in cycles[-self.config.stacked :]]  # noqa: E741
        if self.skip is not None:
            z[-1] = z[-1] + self.skip(x)
        return torch.stack(z), after

    def state_numbers(self) -> int:
        """Numbers in the memories of one row, over all calls."""
        calls = self.init_state(1)
        memories = (memory for call in calls for memory in call if memory is not None)
        return sum(memory.weights.numel() + memory.momentum.numel() for memory in memories)

    def flops(self, length: int, writes: int) -> dict[str, tuple[float, float]]:
        """FLOPs of `forward` on one row, by part: forward, and forward with backward as executed."""
        parts: dict[str, tuple[float, float]] = {}
        low_without, low_with, high_without, high_with = differentiated(
            self.config.recursion, self.config.h_cycles, self.config.l_cycles
        )
        low = self.l_module or self.h_module
        for module, without, with_gradient in ((low, low_without, low_with), (self.h_module, high_without, high_with)):
            for name, (forward, training) in module.flops(length, writes).items():
                total, trained = parts.get(name, (0.0, 0.0))
                calls = without + with_gradient
                parts[name] = (total + calls * forward, trained + without * forward + with_gradient * training)
        square = 2.0 * length * self.config.width**2
        maps, trained = 0, 0  # in squares; a cycle whose (h, l) carry no gradient has none to send back to them
        if self.fusion is not None and self.fusion.mlp:
            maps, trained = 3 * self.config.stacked, 7 * (self.config.stacked - 1) + 9
        if self.skip is not None:
            maps, trained = maps + 1, trained + 3
        return {**parts, "fusion": (square * maps, square * trained)}
