"""What LoopLM and MELT share: config, layer, embedding to head, training objective, costs.

Special here:
- N layers are applied R times with the same weights; the closing norm runs after **every** loop and its output feeds
  the next one; the embedding is not injected again;
- norms around each branch: `x += N2(Attn(N1(x))); x += N4(MLP(N3(x)))`;
- every loop has logits, and a gate that says how likely a token leaves after it (`exits`).

Source: Ouro (LoopLM). Our assumptions: the weight of the exit entropy; at the start, linear maps of unit variance and
small branches.

Shapes: `B` batch, `T` tokens, `R` loops (the papers' T), `D` width, `H` query heads, `G` key/value heads,
`K` head width, `V` vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from models.configuration import require
from models.language_model import CausalLM, Cost, ModelConfig
from models.layers import (
    Embedding,
    KVCache,
    Linear,
    RMSNorm,
    SwiGLU,
    attend,
    attend_one,
    merge_heads,
    rope,
    rotate,
    split_heads,
)
from models.looped.exits import exit_log_probabilities
from models.looped.head_losses import cross_entropy
from models.transformer import attention_flops, require_heads

Cache = TypeVar("Cache", bound=KVCache)
CosSin = tuple[Tensor, Tensor]  # rotary tables of the positions at hand, each [T, K]


@dataclass(frozen=True)
class LoopedConfig(ModelConfig):
    """Fields of every looped model."""

    layers: int = 2  # N
    loops: int = 4  # R: times the layers are applied, with the same weights
    heads: int = 4  # H
    kv_heads: int | None = None  # G; null: one per query head
    hidden: int = 344  # inner width of the SwiGLU
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    branch_gain: float = 0.1  # of N2 and N4 at the start: loops refine their input instead of replacing it
    exit_entropy: float = 0.1  # beta: weight of the entropy of the exit distribution in the training objective
    exit_threshold: float = 1.0  # inference: leave once exit probabilities add up to this; 1 runs every loop

    def validate(self) -> None:
        super().validate()
        for name in ("layers", "loops", "heads", "kv_heads", "hidden"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name}={value} must be at least 1")
        require_heads(self.width, self.heads, self.kv_heads)
        for name in ("rope_theta", "norm_eps", "branch_gain"):
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be above 0")
        require(self.exit_entropy >= 0, f"exit_entropy={self.exit_entropy} must be at least 0")
        require(0 < self.exit_threshold <= 1, f"exit_threshold={self.exit_threshold} must be above 0 and at most 1")

    @property
    def groups(self) -> int:
        """G: key/value heads."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """K: width of one head."""
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        """Width of the keys of one token, over all its heads."""
        return self.groups * self.head_width


class SandwichLayer(nn.Module):
    """`x += N2(Attn(N1(x))); x += N4(MLP(N3(x)))` on `[B, T, D]`, in the parts each model puts together."""

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.heads, self.groups = config.heads, config.groups
        self.attention_norm = RMSNorm(config.width, config.norm_eps)  # N1
        self.q_proj = Linear(config.width, config.width)
        self.k_proj = Linear(config.width, config.kv_width)
        self.v_proj = Linear(config.width, config.kv_width)
        self.o_proj = Linear(config.width, config.width)
        self.attention_out_norm = RMSNorm(config.width, config.norm_eps, config.branch_gain)  # N2
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)  # N3
        self.mlp = SwiGLU(config.width, config.hidden)
        self.mlp_out_norm = RMSNorm(config.width, config.norm_eps, config.branch_gain)  # N4

    def queries(self, stream: Tensor, cos_sin: CosSin) -> Tensor:
        """`[B, T, D] -> [B, H, T, K]`."""
        return rotate(split_heads(self.q_proj(stream), self.heads), cos_sin)

    def keys_values(self, stream: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """`[B, T, D] ->` keys and values, each `[B, G, T, K]`."""
        keys = rotate(split_heads(self.k_proj(stream), self.groups), cos_sin)
        return keys, split_heads(self.v_proj(stream), self.groups)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attended values `[B, T, D]`; `queries [B, H, T, K]` belong to the last T of the rows of keys and values."""
        if queries.shape[2] == 1:
            return merge_heads(attend_one(queries, keys, values))
        return merge_heads(attend(queries, keys, values, mask, causal=mask is None))

    def close(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer, both residual branches: `x [B, T, D]` and the attended values `[B, T, D]`."""
        x = x + self.attention_out_norm(self.o_proj(attended).to(x.dtype))
        return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x)).to(x.dtype))


def causal_mask(new: int, rows: int, device: torch.device) -> Tensor | None:
    """`[new, rows]`, True where the last `new` of `rows` positions may look; None when no mask is needed."""
    if new == 1 or new == rows:
        return None
    return torch.ones(new, rows, dtype=torch.bool, device=device).tril(rows - new)


@dataclass
class Trace:
    """What a pass did inside, for those who ask: distillation and the gate statistics."""

    attended: list[Tensor] = field(default_factory=list)  # loop by loop, layer by layer: [B, T, D] before `o_proj`
    gates: list[Tensor] = field(default_factory=list)  # MELT, second loop on: [B, T, D], [B, T, 1] or [1, 1, 1]


class LoopedModel(CausalLM):
    """Embedding, the looped layers with the closing norm, exit gate and head; a family adds how a loop runs."""

    config: LoopedConfig
    layer_type: ClassVar[type[SandwichLayer]]

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(self.layer_type(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.exit_gate = nn.Linear(config.width, 1) if config.loops > 1 else None
        self.head = Linear(config.width, config.vocab_size)

    @abstractmethod
    def loop_states(self, tokens: Tensor) -> list[Tensor]:
        """Whole sequences `[B, T]` -> the normed states `[B, T, D]` after each of the R loops, none left early."""

    def loop_logits(self, tokens: Tensor) -> Tensor:
        """`tokens [B, T]` -> the logits of every loop, `[R, B, T, V]`."""
        return self.head(torch.stack(self.loop_states(tokens)))

    def exit_logits(self, states: list[Tensor]) -> Tensor:
        """The exit gate after each loop but the last, `[R - 1, B, T]`."""
        if self.exit_gate is None:
            return states[0].new_empty(0, *states[0].shape[:-1])
        return torch.stack([self.exit_gate(state)[..., 0] for state in states[:-1]])

    def training_loss(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """`sum_r p_r CE_r - beta * entropy(p)`, mean over tokens, in nats; logs cross-entropy and p of every loop."""
        states, targets = self.loop_states(inputs), targets.flatten()
        log_p = exit_log_probabilities(self.exit_logits(states)).flatten(1)
        p = log_p.exp()
        loss = self.config.exit_entropy * (p * log_p).sum()
        scalars = {}
        for loop, state in enumerate(states):
            expected, losses = cross_entropy(state.flatten(0, 1), self.head.weight, targets, p[loop])
            loss = loss + expected
            scalars[f"cross_entropy/loop_{loop + 1}"] = losses.mean()
            scalars[f"exit_probability/loop_{loop + 1}"] = p[loop].detach().mean()
        return loss / len(targets), scalars

    def _rope(self, start: int, length: int) -> CosSin:
        config = self.config
        positions = torch.arange(start, start + length, device=self.embedding.weight.device)
        return rope(positions, config.head_width, config.rope_theta)

    def _caches(self, batch_size: int, kind: type[Cache]) -> list[Cache]:
        """One cache per layer."""
        config, weight = self.config, self.embedding.weight
        return [kind.empty(batch_size, config.groups, config.head_width, weight) for _ in self.layers]

    def cost_at(
        self,
        span: float,
        training_span: float,
        rows: int,
        exits: bool,
        gate_flops: float = 0.0,
        gate_parameters: int = 0,
    ) -> Cost:
        """Costs of a token that every loop and layer scores against `span` keys.

        Args:
            span: keys per token, at inference.
            training_span: in training.
            rows: cache rows per layer of one sequence at the end.
            exits: whether inference looks at the exit gate.
            gate_flops: of one layer's memory gate; it runs in every loop but the first.
            gate_parameters: of the memory gates of all layers.
        """
        config = self.config
        runs, gate_runs = config.layers * config.loops, config.layers * (config.loops - 1)
        attention, _ = attention_flops(config.width, config.kv_width, span)
        _, attention_training = attention_flops(config.width, config.kv_width, training_span)
        mlp, head = 6.0 * config.width * config.hidden, 2.0 * config.width * config.vocab_size
        exit_gate = 2.0 * config.width * (config.loops - 1)
        mlp_parameters = config.layers * (3 * config.hidden + 2) * config.width
        return Cost(
            parameters={
                "embedding": _size(self.embedding),
                "attention": _size(self.layers) - mlp_parameters - gate_parameters,
                "memory gate": gate_parameters,
                "mlp": mlp_parameters,
                "exit gate": _size(self.exit_gate),
                "head": _size(self.norm) + _size(self.head),
            },
            forward_flops={
                "attention": runs * attention,
                "memory gate": gate_runs * gate_flops,
                "mlp": runs * mlp,
                "exit gate": exits * exit_gate,
                "head": head,
            },
            training_flops={
                "attention": runs * attention_training,
                "memory gate": 3 * gate_runs * gate_flops,
                "mlp": 3 * runs * mlp,
                "exit gate": 3 * exit_gate,
                "head": 3 * config.loops * head,
            },
            state_bytes=2 * config.layers * rows * config.kv_width * self.embedding.weight.element_size(),
        )


def _size(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())
