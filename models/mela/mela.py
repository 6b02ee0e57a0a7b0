"""Mela: a chunk-local decoder that reads what a hierarchical memory has learned from the text before.

Special here:
- tokens -> patches -> hierarchical memory (`hierarchical_memory.py`) -> memory tokens -> decoder (`decoder.py`);
- the memory tokens of a text chunk are the states of the last M patches that **end before the chunk starts**: this
  shift makes the model causal;
- `forward` runs all chunks at once; `extend` carries a state of fixed size and gives the same logits however the text
  is cut.

Source: Mela (arXiv 2605.10537) as its reviews describe it; `config.py` marks what we assumed. The controls are ours:
`zero` (memory states are 0), `reset` (every memory chunk starts from M_0), `shuffle` (the memory of another row).

Shapes: `B` rows, `T` tokens, `D` width, `V` vocabulary, `P` tokens per patch, `N` patches, `C` patches per memory
chunk, `W` tokens per text chunk, `M` memory tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.configuration import require
from models.language_model import CausalLM, Cost
from models.layers import Embedding, KVCache, Linear
from models.mela.config import MelaConfig
from models.mela.cost import mela_cost
from models.mela.decoder import Decoder
from models.mela.hierarchical_memory import CallStates, HierarchicalMemory
from models.mela.layout import (
    chunks_written,
    least_context,
    memory_rows,
    memory_span,
    patch_capacity,
    patches_read,
    pieces,
    positions,
)

PREFILL = 4096  # tokens, over all rows, that `extend` takes in at once: a long prompt needs no more activations


@dataclass
class MemoryStream:
    """What the memory keeps between calls, in tensors of fixed size, some of them partly in use."""

    tokens: Tensor  # [B, P - 1] of the unfinished patch
    patches: Tensor  # [B, patch_capacity, D] that no written memory chunk holds
    settled: Tensor  # [stacked, B, M, D] memory states of the M patches before those
    memories: CallStates  # after the last written memory chunk
    written: int = 0  # patches in written memory chunks

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.tokens, self.patches, self.settled)
        for memory in (memory for call in self.memories for memory in call):
            if memory is not None:
                yield from (memory.weights, memory.momentum)


@dataclass
class MelaState:
    """Its size does not depend on the text read: caches are allocated for a whole chunk and count whole."""

    caches: list[KVCache]  # per decoder layer: the rows of the text chunk under way
    memory: MemoryStream | None
    position: int = 0  # tokens read
    rows: list[int] = field(default_factory=list)  # positions of the cached rows inside their chunk

    def tensors(self) -> Iterator[Tensor]:
        for cache in self.caches:
            yield from (cache.keys, cache.values)
        if self.memory is not None:
            yield from self.memory.tensors()

    def open_chunk(self) -> None:
        """Forget the rows of a text chunk that is over: it is never looked at again."""
        self.rows = []
        for cache in self.caches:
            cache.length = 0


class Mela(CausalLM):
    """Embedding, hierarchical memory, decoder, head."""

    config: MelaConfig
    controls = ("on", "zero", "reset", "shuffle")

    def __init__(self, config: MelaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.width)
        self.memory = HierarchicalMemory(config) if config.memory == "on" else None
        self.decoder = Decoder(config)
        self.head = Linear(config.width, config.vocab_size)
        if self.memory is None:
            self.controls = ("on",)  # type: ignore[misc]  # nothing there to zero, reset or shuffle

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        x = self.embedding(tokens)
        if self.memory is None:
            return self._decode(x, 0, None)
        z = self.memory.before_text(batch)
        count = patches_read(self.config, length)
        if count:
            patches = self.memory.patches(x[:, : count * self.config.patch_size])
            states = self.memory.init_state(batch)
            z = torch.cat((z, self._remember(patches, states, chunks_written(self.config, count))[0]), dim=2)
        return self._decode(x, 0, z, -self.config.memory_tokens)

    def unused(self, context: int) -> str | None:
        config, least, read = self.config, least_context(self.config), patches_read(self.config, context)
        if context >= least:
            return None
        part = f"never writes the memory: it reads {read} patches," if read else "never reads the memory,"
        smaller = "model.memory_chunk" if read else "model.text_chunk and model.memory_chunk"
        return (
            f"{part} with model.text_chunk={config.text_chunk} tokens and model.memory_chunk={config.memory_chunk} "
            f"patches of {config.patch_size}; accepted are at least {least}, a smaller {smaller}, or model.memory=none"
        )

    def init_state(self, batch_size: int) -> MelaState:
        config, weight = self.config, self.embedding.weight
        heads = config.decoder_kv_heads or config.decoder_heads
        shape = (batch_size, heads, config.width // config.decoder_heads)
        rows = config.text_chunk + memory_rows(config, config.text_chunk)
        caches = [KVCache.empty(*shape, like=weight, capacity=rows) for _ in range(config.decoder_layers)]
        if self.memory is None:
            return MelaState(caches, None)
        tokens = torch.zeros(batch_size, config.patch_size - 1, dtype=torch.int64, device=weight.device)
        patches = weight.new_zeros(batch_size, patch_capacity(config), config.width)
        settled, memories = self.memory.before_text(batch_size), self.memory.init_state(batch_size)
        return MelaState(caches, MemoryStream(tokens, patches, settled, memories))

    def extend(self, tokens: Tensor, state: MelaState) -> tuple[Tensor, MelaState]:
        size = max(PREFILL // len(tokens), self.config.text_chunk)
        logits = [self._extend(part, state) for part in tokens.split(size, dim=1)]
        return torch.cat(logits, dim=1) if len(logits) > 1 else logits[0], state

    def cost(self, context: int) -> Cost:
        return mela_cost(self, context)

    def _extend(self, tokens: Tensor, state: MelaState) -> Tensor:
        begin = state.position
        state.position += tokens.shape[1]
        x = self.embedding(tokens)
        if state.memory is None:
            return self._decode(x, begin, None, state=state)
        first = state.memory.written - self.config.memory_tokens
        return self._decode(x, begin, self._advance(tokens, begin, state.memory), first, state)

    def _remember(self, patches: Tensor, memories: CallStates, writes: int) -> tuple[Tensor, CallStates]:
        """Memory states of patches `[B, N, D]` under the control, `[stacked, B, N, D]`, and the memories after them."""
        assert self.memory is not None
        z, memories = self.memory(patches, memories, 0 if self.control == "reset" else writes)
        if self.control == "zero":
            z = torch.zeros_like(z)
        if self.control == "shuffle":
            require(len(patches) > 1, "control='shuffle' exchanges memories between rows: it needs at least 2, not 1")
            z = z.roll(1, dims=1)
        return z, memories

    def _advance(self, tokens: Tensor, begin: int, stream: MemoryStream) -> Tensor:
        """Take in `tokens [B, t]`, the first at `begin`; memory states `[stacked, B, n, D]` from the settled ones on.

        The memory runs only when a row of the decoder needs it: at the start of a text chunk, and in the causal view
        when a patch is complete. It then starts again from the last written chunk, so that nothing inside a memory
        chunk has to be kept but its patches.
        """
        assert self.memory is not None
        config, end = self.config, begin + tokens.shape[1]
        tokens = torch.cat((stream.tokens[:, : begin % config.patch_size], tokens), dim=1)
        whole = tokens.shape[1] // config.patch_size * config.patch_size
        patches = stream.patches[:, : begin // config.patch_size - stream.written]
        if whole:
            patches = torch.cat((patches, self.memory.patches(self.embedding(tokens[:, :whole]))), dim=1)
        z = stream.settled
        opens = (end - 1) // config.text_chunk * config.text_chunk >= begin
        seen = patches_read(config, end) - stream.written
        if seen > 0 and (opens or (whole and config.memory_view == "causal")):
            writes = seen // config.memory_chunk
            states, stream.memories = self._remember(patches[:, :seen], stream.memories, writes)
            z = torch.cat((z, states), dim=2)
            done = writes * config.memory_chunk
            stream.settled = z[:, :, done : done + config.memory_tokens].clone()
            stream.written += done
            patches = patches[:, done:].clone()
        stream.patches[:, : patches.shape[1]] = patches
        stream.tokens[:, : tokens.shape[1] - whole] = tokens[:, whole:]
        return z

    def _decode(
        self, x: Tensor, begin: int, z: Tensor | None, first: int = 0, state: MelaState | None = None
    ) -> Tensor:
        """Logits of the text `x [B, T, D]` from token `begin` on, with memory states `z` from patch `first` on."""
        config, batch = self.config, len(x)
        if z is None:
            z = x.new_empty(1, batch, 0, config.width)
        decoded, taken = [], 0
        for piece in pieces(config, begin, begin + x.shape[1]):
            opens = piece.start % config.text_chunk == 0
            lower, upper = memory_span(config, piece)
            stride = config.text_chunk // config.patch_size
            memory = _windows(z[:, :, lower - first :], upper - lower, stride, piece.chunks)
            text = x[:, taken : taken + piece.tokens].reshape(-1, piece.length, config.width)
            places = rows = positions(config, piece)
            caches = None
            if state is not None and not (opens and piece.length == config.text_chunk):
                if opens:
                    state.open_chunk()
                state.rows += places
                caches, rows = state.caches, state.rows
            here = torch.tensor(places, device=x.device)
            mask = None
            if config.memory_view == "causal":
                mask = torch.tensor(rows, device=x.device) <= here[:, None]
            y = self.decoder(memory, text, here, mask, caches)
            decoded.append(y.reshape(batch, piece.tokens, config.width))
            taken += piece.tokens
        return self.head(torch.cat(decoded, dim=1))


def _windows(z: Tensor, size: int, stride: int, count: int) -> Tensor:
    """`[stacked, B, N, D] -> [stacked, B * count, size, D]`: stretches of `size` states, `stride` apart."""
    if count == 1 or size == 0:
        return z[:, :, :size].repeat_interleave(count, dim=1)
    windows = z.unfold(2, size, stride)[:, :, :count]  # [stacked, B, count, D, size]
    return windows.transpose(3, 4).flatten(1, 2)


CONFIG, MODEL = MelaConfig, Mela
