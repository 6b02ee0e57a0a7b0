"""MELT: a looped model whose key/value cache does not grow with its loops.

Special here:
- each layer keeps one memory per token, `h_t = z_t * h_{t-1} + (1 - z_t) * x_t` (`gates`); keys and values are made
  from the memory, queries from the current stream: the normed layer input `x_t`;
- **t is the loop.** A token's cache row is written again in every loop; the tokens before it keep their final row;
- chunks run in order. Inside a chunk all tokens run a loop together, and see each other as of that loop: `chunk=1`
  is cached decoding, exactly; `chunk=null` is the paper's "no chunking". Evaluation mode has chunks of its own, the
  same for every way to train, because what counts is decoding;
- a token that decodes alone leaves once its exit probabilities add up to `exit_threshold`: its row stops changing and
  the loops that remain are not computed.

`extend` cuts what it is given into chunks from its first token on: it equals `forward` when fed whole chunks, and
`forward` in chunks of 1 when fed one token at a time.

Source: MELT, equation 1 and section 3.3; layer and objective in `looped_model`. Leaving early is ours.

Shapes: `B` batch, `t` tokens of a chunk, `R` loops (the paper's T), `D` width, `G` key/value heads, `K` head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.configuration import require
from models.language_model import Cost
from models.layers import KVCache
from models.looped.exits import exit_loop
from models.looped.gates import GateName, build_gate, gate_flops, remember
from models.looped.looped_model import CosSin, LoopedConfig, LoopedModel, SandwichLayer, Trace, causal_mask

Past = TypeVar("Past", bound="EarlierRows")
KeysValues = tuple[Tensor, Tensor]  # each [B, G, rows, K]


@dataclass(frozen=True)
class MeltConfig(LoopedConfig):
    family: ClassVar[str] = "melt"

    gate: GateName = "elementwise"
    gate_bias: float = -1.4  # b_z at the start
    ema: float = 0.2  # gate=ema: its constant z
    chunk: int | None = 64  # in training, tokens that run each loop together; null: the whole sequence
    inference_chunk: int = 16  # in evaluation mode, tokens that read a prompt together; 1 is decoding, exactly
    detach_chunks: bool = False  # cut the gradient into earlier chunks

    def validate(self) -> None:
        super().validate()
        require(self.chunk is None or self.chunk >= 1, f"chunk={self.chunk} must be null or at least 1")
        require(self.inference_chunk >= 1, f"inference_chunk={self.inference_chunk} must be at least 1")
        require(0 <= self.ema <= 1, f"ema={self.ema} must be in [0, 1]")


class EarlierRows(Protocol):
    """Keys and values of the tokens before a chunk, in one layer."""

    @property
    def length(self) -> int:
        """Tokens so far."""
        ...

    def join(self, keys: Tensor, values: Tensor, loop: int) -> KeysValues:
        """All rows as `loop` sees them: the earlier ones, then those of the chunk, `[B, G, t, K]`."""
        ...

    def keep(self, keys: Tensor, values: Tensor) -> Self:
        """With the final rows of the chunk."""
        ...


class Rows(KVCache):
    """One row per token, written in place by every loop (inference)."""

    def join(self, keys: Tensor, values: Tensor, loop: int) -> KeysValues:
        """The rows kept so far and `[B, G, t, K]` new ones after them, which the next `join` overwrites."""
        joined = self.append(keys, values)
        self.length -= keys.shape[2]
        return joined

    def keep(self, keys: Tensor, values: Tensor) -> Self:
        """The rows of the last `join` are final."""
        self.length += keys.shape[2]
        return self

    def reserve(self, new: int) -> None:
        """Make room for `new` rows, so that `of` shares memory with the rows to come."""
        if self.length + new > self.keys.shape[2]:
            self.keys, self.values = (self._grown(buffer, self.length + new) for buffer in (self.keys, self.values))

    def of(self, sequence: int) -> Rows:
        """The rows of one sequence of the batch, in the same memory."""
        one = slice(sequence, sequence + 1)
        return Rows(self.keys[one], self.values[one], self.length)


class Chunks(NamedTuple):
    """The rows of earlier chunks, differentiable (training)."""

    rows: KeysValues | None = None  # of all earlier chunks, joined once for all loops

    @property
    def length(self) -> int:
        """Tokens so far."""
        return 0 if self.rows is None else self.rows[0].shape[2]

    def join(self, keys: Tensor, values: Tensor, loop: int) -> KeysValues:
        """All earlier rows and `[B, G, t, K]` new ones."""
        if self.rows is None:
            return keys, values
        return torch.cat((self.rows[0], keys), dim=2), torch.cat((self.rows[1], values), dim=2)

    def keep(self, keys: Tensor, values: Tensor) -> Chunks:
        """With one chunk more."""
        return Chunks(self.join(keys, values, loop=0))


class Base(NamedTuple):
    """Keys and values of a model with a cache per loop, to interpolate with: distillation, phase 1."""

    rows: Sequence[Sequence[KeysValues]]  # by loop and layer: of all tokens up to the end of the chunk
    weight: float  # share of our own keys and values


class Step(NamedTuple):
    """What a layer makes of a chunk in one loop."""

    x: Tensor  # [B, t, D]
    memory: Tensor  # [B, t, D]
    own: KeysValues  # of the memory
    attended: Tensor  # [B, t, D] before `o_proj`
    gate: Tensor | None  # [B, t, D], [B, t, 1] or [1, 1, 1]; None in the first loop


class MeltLayer(SandwichLayer):
    """A sandwich layer whose keys and values come from the memory of each token."""

    def __init__(self, config: MeltConfig) -> None:
        super().__init__(config)
        self.gate = build_gate(config.gate, config.width, config.gate_bias, config.ema) if config.loops > 1 else None

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None,
        loop: int,
        cos_sin: CosSin,
        mask: Tensor | None,
        rows: EarlierRows,
        base: KeysValues | None = None,
        weight: float = 1.0,
    ) -> Step:
        """One loop over t tokens.

        Args:
            x: `[B, t, D]` stream.
            memory: `[B, t, D]`, h of the loop before; None in the first.
            loop: from 0.
            cos_sin: rotary tables of the t positions.
            mask: from `causal_mask`, over the earlier rows with the new ones.
            rows: keys and values of earlier tokens in this layer.
            base: keys and values of another model for all rows, to interpolate with.
            weight: share of our own when there is a base.
        """
        stream, memory, gate = self.update(x, memory, loop)
        own = self.keys_values(memory, cos_sin)
        keys, values = rows.join(*own, loop)
        if base is not None:
            keys, values = base[0].to(keys.dtype).lerp(keys, weight), base[1].to(values.dtype).lerp(values, weight)
        attended = self.attend(self.queries(stream, cos_sin), keys, values, mask)
        return Step(self.close(x, attended), memory, own, attended, gate)

    def update(self, x: Tensor, memory: Tensor | None, loop: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Stream `x_t`, memory `h_t` and gate of a loop; the first has `h_1 = x_1` and needs no gate."""
        stream = self.attention_norm(x)
        if memory is None or self.gate is None:
            return stream, stream, None
        gate = self.gate(stream, memory, loop)
        return stream, remember(stream, memory, gate), gate


@dataclass
class MeltState:
    """A cache per layer."""

    rows: list[Rows]

    def tensors(self) -> Iterator[Tensor]:
        for rows in self.rows:
            yield from rows.tensors()


class Melt(LoopedModel):
    """The memory-efficient looped Transformer."""

    config: MeltConfig
    layer_type = MeltLayer
    recompute = False  # training: keep no activations inside a layer, compute them again in the backward pass

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[B, T, V]`. With `exit_threshold` below 1 the model is for inference: no gradient."""
        if torch.is_grad_enabled() and self.config.exit_threshold == 1:
            return self.head(self.loop_states(tokens)[-1])
        with torch.no_grad():
            return self.extend(tokens, self.init_state(tokens.shape[0]))[0]

    def loop_states(self, tokens: Tensor) -> list[Tensor]:
        rows = [Chunks()] * self.config.layers
        states = [self.run_chunk(chunk, rows) for chunk in self.chunks(tokens)]
        return [torch.cat(loop, dim=1) for loop in zip(*states, strict=True)]

    def chunks(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """`tokens [B, T]` cut into the chunks that run together, in the mode the model is in."""
        chunk = self.config.chunk if self.training else self.config.inference_chunk
        return tokens.split(chunk or tokens.shape[1], dim=1)

    @property
    def grain(self) -> int:
        return (self.training and self.config.chunk) or self.config.inference_chunk

    def run_chunk(
        self,
        tokens: Tensor,
        rows: list[Past],
        base: Base | None = None,
        trace: Trace | None = None,
        leave: bool = False,
    ) -> list[Tensor]:
        """All loops of one chunk.

        Args:
            tokens: `[B, t]`.
            rows: by layer, of the tokens before; the final rows of these tokens are added.
            base: another model's keys and values to interpolate with.
            trace: filled with what happens inside.
            leave: for a single token: stop once `exit_threshold` is reached.
        Returns:
            The normed states of every loop that ran, each `[B, t, D]`.
        """
        config, start, length = self.config, rows[0].length, tokens.shape[1]
        cos_sin = self._rope(start, length)
        mask = causal_mask(length, start + length, tokens.device)
        x, states = self.embedding(tokens), []
        memories: list[Tensor | None] = [None] * config.layers
        own: list[KeysValues] = [(x, x)] * config.layers
        for loop in range(config.loops):
            for i, layer in enumerate(self.layers):
                mixed = () if base is None else (base.rows[loop][i], base.weight)
                step = self._step(layer, x, memories[i], loop, cos_sin, mask, rows[i], *mixed)
                x, memories[i], own[i] = step.x, step.memory, step.own
                if trace is not None:
                    trace.attended.append(step.attended)
                    trace.gates.extend(() if step.gate is None else (step.gate,))
            x = self.norm(x)
            states.append(x)
            if leave and exit_loop(self.exit_logits([*states, x]), config.exit_threshold) <= loop:
                break
        for i, (keys, values) in enumerate(own):
            rows[i] = rows[i].keep(*((keys.detach(), values.detach()) if config.detach_chunks else (keys, values)))
        return states

    def init_state(self, batch_size: int) -> MeltState:
        return MeltState(self._caches(batch_size, Rows))

    def extend(self, tokens: Tensor, state: MeltState) -> tuple[Tensor, MeltState]:
        leaving = self.config.exit_threshold < 1
        states = []
        for chunk in self.chunks(tokens):
            if leaving and chunk.shape[1] == 1:
                states.append(self._decode_and_leave(chunk, state))
            else:
                states.append(self.run_chunk(chunk, state.rows)[-1])
        return self.head(torch.cat(states, dim=1)), state

    def cost(self, context: int) -> Cost:
        """Inference in evaluation mode; every loop is counted, also where tokens may leave early."""
        config = self.config
        return self.cost_at(
            _span(context, config.inference_chunk),
            self.training_span(context),
            rows=context,
            exits=config.exit_threshold < 1 and config.inference_chunk == 1,
            gate_flops=gate_flops(config.gate, config.width),
            gate_parameters=sum(parameter.numel() for name, parameter in self.named_parameters() if ".gate." in name),
        )

    def training_span(self, context: int) -> float:
        """Keys that a token is scored against in training, on average over `context` tokens."""
        return _span(context, self.config.chunk or context)

    def _decode_and_leave(self, tokens: Tensor, state: MeltState) -> Tensor:
        """One token `[B, 1]` per sequence -> the state `[B, 1, D]` each leaves with.

        One sequence at a time: who is still inside never changes what another computes.
        """
        for rows in state.rows:
            rows.reserve(1)
        left = []
        for sequence, token in enumerate(tokens.split(1)):
            rows = [each.of(sequence) for each in state.rows]
            left.append(self.run_chunk(token, rows, leave=True)[-1])
        for rows in state.rows:
            rows.length += 1
        return torch.cat(left)

    def _step(self, layer: nn.Module, *arguments: Any) -> Step:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(layer, *arguments, use_reentrant=False)  # type: ignore[return-value]
        return layer(*arguments)


def _span(context: int, chunk: int) -> float:
    ends = [min(start + chunk, context) for start in range(0, context, chunk)]
    return sum((end - start) * end for start, end in zip([0, *ends], ends, strict=False)) / context


CONFIG, MODEL = MeltConfig, Melt
