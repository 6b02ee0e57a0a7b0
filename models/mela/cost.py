"""What Mela costs: parameters, FLOPs and state bytes, from the model's shapes alone.

A sequence of T tokens is what `forward` runs: only patches that some token can see are encoded, and the last memory
chunk among them is read but not written, as nobody reads it afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from models.language_model import Cost
from models.mela.config import MelaConfig
from models.mela.layout import chunks_written, memory_rows, patch_capacity, patches_read, pieces
from models.transformer import attention_flops

if TYPE_CHECKING:
    from models.mela.mela import Mela


def mela_cost(model: Mela, context: int) -> Cost:
    """Costs for sequences of `context` tokens."""
    config, memory = model.config, model.memory
    head = 2.0 * config.width * config.vocab_size * context
    flops = {"decoder": _decoder_flops(config, context), "head": (head, 3 * head)}
    patches = patches_read(config, context)
    if memory is not None and patches:
        encoder = 2.0 * patches * config.patch_size * config.width**2
        flops = {
            "patches": (encoder, 3 * encoder),
            **memory.flops(patches, chunks_written(config, patches)),
            **flops,
        }
    parts: dict[str, list[nn.Module | None]] = {"embedding": [model.embedding]}
    if memory is not None:
        parts |= {
            "patches": [memory.patches],
            "l_module": [memory.l_module],
            "h_module": [memory.h_module],
            "fusion": [memory.fusion, memory.skip],
            "initial_tokens": [memory.initial],
        }
    parts |= {"decoder": [model.decoder], "head": [model.head]}
    return Cost(
        parameters={name: sum(map(_size, modules)) for name, modules in parts.items()},
        forward_flops={name: forward / context for name, (forward, _) in flops.items()},
        training_flops={name: training / context for name, (_, training) in flops.items()},
        state_bytes=_state_bytes(model),
    )


def _decoder_flops(config: MelaConfig, context: int) -> tuple[float, float]:
    """FLOPs of the decoder on one sequence: forward, and forward with backward."""
    forward = training = 0.0
    for piece in pieces(config, 0, context):
        rows = piece.length + memory_rows(config, piece.length)
        attention = attention_flops(config.width, config.kv_width, rows)
        mlp = 6.0 * config.width * config.hidden
        forward += config.decoder_layers * piece.chunks * rows * (attention[0] + mlp)
        training += config.decoder_layers * piece.chunks * rows * (attention[1] + 3 * mlp)
    return forward, training


def _state_bytes(model: Mela) -> int:
    """Bytes of the buffers of one row: all of fixed size."""
    config, dtype = model.config, model.embedding.weight.dtype
    rows = config.text_chunk + memory_rows(config, config.text_chunk)
    total = 2 * config.decoder_layers * rows * config.kv_width * dtype.itemsize
    if model.memory is None:
        return total
    held = patch_capacity(config) + config.stacked * config.memory_tokens
    memories = model.memory.state_numbers() * torch.promote_types(dtype, torch.float32).itemsize
    return total + (config.patch_size - 1) * torch.int64.itemsize + held * config.width * dtype.itemsize + memories


def _size(module: nn.Module | None) -> int:
    return sum(parameter.numel() for parameter in module.parameters()) if module is not None else 0
