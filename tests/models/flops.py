"""What a call executes, counted by `torch.utils.flop_counter`."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def _attention(query, key, value, *args, out_shape=None, **kwargs) -> int:
    return 2 * prod(query[:3]) * key[2] * (query[3] + value[3])


def _attention_backward(grad_out, query, key, value, *args, out_shape=None, **kwargs) -> int:
    """Scores and grad of values, scores, queries and keys: five products for the two of the forward pass."""
    return 2 * prod(query[:3]) * key[2] * (3 * query[3] + 2 * value[3])


_aten: Any = torch.ops.aten
_FUSED_ON_CPU = {  # torch counts the fused attention of GPUs only
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def counted_flops(call: Callable[[], object]) -> int:
    """FLOPs of the matrix products that `call()` executes."""
    with FlopCounterMode(display=False, custom_mapping=_FUSED_ON_CPU) as counter:
        call()
    return counter.get_total_flops()
