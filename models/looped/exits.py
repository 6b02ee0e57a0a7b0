"""After which loop a token leaves: Ouro's exit distribution, its training objective, and the choice at inference.

Special here: the expected cross-entropy needs logits of **every** loop, so the head and the loss run on blocks of
tokens, gradients included, and no more than one block of logits is ever held.

Source: Ouro, entropy-regularised objective `sum_r p_r CE_r - beta * H(p)`.

Shapes: `B` batch, `T` tokens, `R` loops, `D` width, `V` vocabulary, `n` tokens of any arrangement.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 256  # tokens whose logits are held at a time


def exit_log_probabilities(logits: Tensor) -> Tensor:
    """log p of leaving after each loop: `p_r = lambda_r prod_{s<r} (1 - lambda_s)`, the last loop takes the remainder.

    Args:
        logits: `[R - 1, ...]`, lambda_r = sigmoid(logits_r); the last loop needs none.
    Returns:
        `[R, ...]`; exp of it adds up to 1 over the loops.
    """
    nothing = torch.zeros_like(logits[:1]) if len(logits) else logits.new_zeros(1, *logits.shape[1:])
    leave = torch.cat((functional.logsigmoid(logits), nothing))
    stay = torch.cat((nothing, functional.logsigmoid(-logits).cumsum(0)))
    return leave + stay


def reached(log_stay: Tensor, threshold: float) -> Tensor:
    """Whether the exit probabilities so far add up to `threshold`, given the log probability of still staying."""
    return -torch.expm1(log_stay) >= threshold


def exit_loop(logits: Tensor, threshold: float) -> Tensor:
    """The loop (from 0) after which each token leaves: the first whose cumulated exit probability reaches `threshold`.

    Args:
        logits: `[R - 1, ...]`, as in `exit_log_probabilities`.
    Returns:
        `[...]` int64; R - 1 where no earlier loop reaches it.
    """
    log_stay = functional.logsigmoid(-logits).cumsum(0)
    return (~reached(log_stay, threshold)).sum(0)  # what is left shrinks from loop to loop, so counting finds the first


def expected_cross_entropy(state: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of one loop, weighted per token, differentiable in the state, the head and the weights.

    Args:
        state: `[n, D]` normed states.
        head: `[V, D]` weight of the head.
        targets: `[n]` next tokens.
        weights: `[n]`, the exit probabilities.
    Returns:
        The sum over tokens of `weights * CE`, and the CE of each token in nats `[n]` (no gradient).
    """
    return _ExpectedCrossEntropy.apply(state, head, targets, weights)  # type: ignore[return-value]


class _ExpectedCrossEntropy(torch.autograd.Function):
    """The gradients of a block follow from its logits at once: `weights * (softmax - onehot)` times head and state."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(state.dtype, torch.float32)
        losses = state.new_empty(len(state), dtype=wide)
        backward = any(ctx.needs_input_grad)
        state_grads, head_grad = [], torch.zeros_like(head, dtype=wide)
        for start in range(0, len(state), BLOCK):
            block = slice(start, start + BLOCK)
            target = targets[block, None]
            log_p = functional.log_softmax(functional.linear(state[block], head), dim=-1, dtype=wide)
            losses[block] = -log_p.gather(1, target)[:, 0]
            if backward:
                error = log_p.exp_()
                error.scatter_add_(1, target, -torch.ones_like(target, dtype=wide))
                error = (error * weights[block, None]).to(state.dtype)
                state_grads.append(error @ head.to(state.dtype))
                head_grad += error.T @ state[block]
        if backward:
            ctx.save_for_backward(torch.cat(state_grads), head_grad.to(head.dtype), losses)
        ctx.mark_non_differentiable(losses)
        return (weights * losses).sum(), losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:  # type: ignore[override]
        state_grad, head_grad, losses = ctx.saved_tensors
        return grad * state_grad, grad * head_grad, None, grad * losses
