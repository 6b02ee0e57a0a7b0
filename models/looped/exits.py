"""After which loop a token leaves: Ouro's exit distribution, and the choice at inference.

Source: Ouro; lambda_r is the probability of leaving after loop r, for a token that got there.

Shapes: `R` loops; `...` is any arrangement of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def exit_log_probabilities(logits: Tensor) -> Tensor:
    """log p of leaving after each loop: `p_r = lambda_r prod_{s<r} (1 - lambda_s)`, the last loop takes the remainder.

    Args:
        logits: `[R - 1, ...]`, lambda_r = sigmoid(logits_r); the last loop needs none.
    Returns:
        `[R, ...]`; the probabilities add up to 1 over the loops.
    """
    certain = logits.new_zeros(1, *logits.shape[1:])
    leave = torch.cat((functional.logsigmoid(logits), certain))
    stay = torch.cat((certain, functional.logsigmoid(-logits).cumsum(0)))
    return leave + stay


def exit_loop(logits: Tensor, threshold: float) -> Tensor:
    """The loop (from 0) after which each token leaves: the first whose cumulated exit probability reaches `threshold`.

    Args:
        logits: `[R - 1, ...]`, as in `exit_log_probabilities`.
        threshold: in (0, 1].
    Returns:
        `[...]` int64; R - 1 where no earlier loop reaches it.
    """
    left = -torch.expm1(functional.logsigmoid(-logits).cumsum(0))
    return (left < threshold).sum(0)  # `left` only grows with the loops, so counting finds the first that reaches it
