"""Losses against a vocabulary for states of every loop, without ever holding the logits of every loop.

Special here: logits, loss and gradients of a block of tokens are worked out together, then the logits are dropped. What
a call keeps for the backward pass is the gradient of its states `[n, D]` and of the head `[V, D]`; the logits `[n, V]`
would be more as soon as n exceeds D, so a call should have many tokens: all of a loop.

Shapes: `n` tokens of any arrangement, `D` width, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 256  # tokens whose logits are held at a time

Losses = Callable[[slice, Tensor], tuple[Tensor, Tensor]]


def cross_entropy(state: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy weighted per token, differentiable in the state, the head and the weights.

    Args:
        state: `[n, D]` normed states.
        head: `[V, D]` weight of the head.
        targets: `[n]` next tokens.
        weights: `[n]`.
    Returns:
        The sum of `weights * CE`, and the CE of each token in nats `[n]` (no gradient).
    """

    def losses(block: slice, log_p: Tensor) -> tuple[Tensor, Tensor]:
        target = targets[block, None]
        loss = -log_p.gather(1, target)[:, 0]
        error = log_p.exp_()
        return loss, error.scatter_add_(1, target, error.new_full(target.shape, -1.0))

    return _HeadLoss.apply(state, head, weights, losses)  # type: ignore[return-value]


def distillation(state: Tensor, head: Tensor, teacher_state: Tensor, teacher_head: Tensor) -> Tensor:
    """`KL(teacher || student)` in nats at temperature 1, mean over tokens, differentiable in the student.

    Args:
        state: `[n, D]`, `head`: `[V, D]`, of the student.
        teacher_state: `[n, D']`, `teacher_head`: `[V, D']`.
    """

    def losses(block: slice, log_p: Tensor) -> tuple[Tensor, Tensor]:
        log_q = functional.linear(teacher_state[block], teacher_head).log_softmax(-1, dtype=log_p.dtype)
        q = log_q.exp()
        loss = (q * log_q.sub_(log_p)).sum(-1)
        return loss, log_p.exp_().sub_(q)

    weights = torch.full((len(state),), 1 / len(state), dtype=_wide(state.dtype), device=state.device)
    return _HeadLoss.apply(state, head, weights, losses)[0]  # type: ignore[index]


class _HeadLoss(torch.autograd.Function):
    """`sum weights * loss`, where `losses(block, log_p)` gives loss `[b]` and its gradient by the logits `[b, V]`."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, head: Tensor, weights: Tensor, losses: Losses) -> tuple[Tensor, Tensor]:
        wide = _wide(state.dtype)
        values = state.new_empty(len(state), dtype=wide)
        backward = any(ctx.needs_input_grad)
        state_grads, head_grad = [], torch.zeros_like(head, dtype=wide)
        for start in range(0, len(state), BLOCK):
            block = slice(start, start + BLOCK)
            log_p = functional.linear(state[block], head).log_softmax(-1, dtype=wide)
            values[block], error = losses(block, log_p)
            if backward:
                error = error.mul_(weights[block, None]).to(state.dtype)
                state_grads.append(error @ head.to(state.dtype))
                head_grad += error.T @ state[block]
        if backward:
            ctx.save_for_backward(torch.cat(state_grads).to(state.dtype), head_grad.to(head.dtype), values)
        ctx.mark_non_differentiable(values)
        return (weights * values).sum(), values

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        state_grad, head_grad, values = ctx.saved_tensors
        return grad * state_grad, grad * head_grad, grad * values, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
