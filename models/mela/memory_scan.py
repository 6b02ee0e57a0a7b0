"""The writes of the neural memory, chunk after chunk, with their gradient written out.

    S_c = eta_c S_{c-1} + descent(M_{c-1}; K_c, V_c, theta_c)
    M_c = alpha_c M_{c-1} + NewtonSchulz(S_c)

Special here:
- S is kept raw, never orthogonalised;
- sequential over chunks (Newton-Schulz is not linear, so there is no scan), batched over everything else;
- one node for the whole loop: autograd would build and walk one of a hundred nodes per chunk.

Source: Titans (Behrouz et al. 2025, eq. 8-14) with Mela's Newton-Schulz; the no-op gate is ours.

Shapes: `n` chunks of `C` patches, `R` rows (of the batch, times heads), `K` head width, `E` hidden width of a memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.mela.inner_loss import descend, descend_backward
from models.mela.newton_schulz import full_precision, newton_schulz_saves, orthogonalise, orthogonalise_backward


@dataclass
class MemoryState:
    """Weights and momentum of the memories of all rows and heads; the second layer is stored transposed."""

    weights: Tensor  # M, [depth, R, K, E]
    momentum: Tensor  # S, same shape


def write_chunks(
    keys: Tensor,
    values: Tensor,
    theta: Tensor,
    eta: Tensor,
    alpha: Tensor,
    threshold: Tensor | None,
    state: MemoryState,
    steps: int,
) -> tuple[Tensor, MemoryState]:
    """Write n chunks.

    Args:
        keys, values: `[n, R, C, K]`.
        theta: weight of each patch in the loss, `[n, R, C, 1]`.
        eta, alpha: momentum and retention, `[n, R, 1, 1]`.
        threshold: `[R, 1, 1]`; a chunk whose mean squared error is not above it leaves M and S as they were. Its
            gradient is that of a sigmoid (straight-through, our assumption). None writes always.
        state: M and S before the first chunk.
        steps: of Newton-Schulz; 0 writes the raw momentum.
    Returns:
        M before each chunk, `[depth, n, R, K, E]`, and the state after the last.
    """
    with full_precision(keys.device):
        history, weights, momentum = _WriteChunks.apply(
            keys, values, theta, eta, alpha, threshold, state.weights, state.momentum, steps, torch.is_grad_enabled()
        )  # type: ignore[misc]
    return history, MemoryState(weights, momentum)


class _WriteChunks(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx, keys, values, theta, eta, alpha, threshold, weights, momentum, steps: int, record: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        history, tape = weights.new_empty(weights.shape[0], len(keys), *weights.shape[1:]), []
        for chunk in range(len(keys)):
            history[:, chunk] = weights
            descent, inner = descend(weights.unbind(0), keys[chunk], values[chunk], theta[chunk])
            after = torch.addcmul(descent, eta[chunk], momentum)
            update, outer = _newton_schulz(after, steps)
            written, gate = torch.addcmul(update, alpha[chunk], weights), ()
            if threshold is not None:
                excess = inner[0].square().mean((1, 2), keepdim=True) - threshold
                gate = (excess, written, after)
                written, after = torch.where(excess > 0, written, weights), torch.where(excess > 0, after, momentum)
            if record:
                tape += (momentum, *gate, *inner, *outer)
            weights, momentum = written, after
        ctx.set_materialize_grads(False)
        ctx.steps, ctx.gated = steps, threshold is not None
        ctx.save_for_backward(history, keys, theta, eta, alpha, *tape)
        return history, weights, momentum

    @staticmethod
    @once_differentiable
    def backward(ctx, to_history, to_weights, to_momentum):  # type: ignore[override]
        history, keys, theta, eta, alpha, *tape = ctx.saved_tensors
        to_keys, to_values, to_theta, to_eta, to_alpha = map(torch.zeros_like, (keys, keys, theta, eta, alpha))
        to_threshold = torch.zeros_like(alpha[0]) if ctx.gated else None
        chunks, recorded, nothing = len(keys), len(tape) // len(keys), torch.zeros_like(history[:, 0])
        if to_weights is None and to_momentum is None and to_history is not None:  # the last write was never read
            chunks -= 1
            to_weights = to_history[:, chunks]
        to_weights = nothing if to_weights is None else to_weights
        to_momentum = nothing if to_momentum is None else to_momentum
        for chunk in reversed(range(chunks)):
            before, (momentum, *saved) = history[:, chunk], tape[chunk * recorded : (chunk + 1) * recorded]
            to_error, past_weights, past_momentum = torch.zeros_like(keys[chunk]), nothing, nothing
            if to_threshold is not None:
                excess, written, after, *saved = saved
                to_gate = _dot(to_weights, written - before) + _dot(to_momentum, after - momentum)
                to_excess = to_gate * excess.sigmoid() * (-excess).sigmoid()
                to_threshold -= to_excess
                to_error = saved[0] * to_excess * (2 / to_error[0].numel())
                to_weights, past_weights = _either(excess > 0, to_weights)
                to_momentum, past_momentum = _either(excess > 0, to_momentum)
            outer = len(saved) - newton_schulz_saves(ctx.steps)
            to_after = to_momentum + _newton_schulz_backward(to_weights, saved[outer:])
            to_eta[chunk], to_alpha[chunk] = _dot(to_after, momentum), _dot(to_weights, before)
            to_layers, to_keys[chunk], to_values[chunk], to_theta[chunk] = descend_backward(
                before.unbind(0), keys[chunk], theta[chunk], saved[:outer], to_after, to_error
            )
            to_weights = to_layers.addcmul_(alpha[chunk], to_weights).add_(past_weights)
            to_momentum = torch.addcmul(past_momentum, eta[chunk], to_after)
            if to_history is not None:
                to_weights += to_history[:, chunk]
        return to_keys, to_values, to_theta, to_eta, to_alpha, to_threshold, to_weights, to_momentum, None, None


def _newton_schulz(x: Tensor, steps: int) -> tuple[Tensor, list[Tensor]]:
    """Of `x [depth, R, K, E]`, and what the backward pass needs; in 0 steps nothing happens."""
    if steps == 0:
        return x, []
    y, saved = orthogonalise(x.flatten(0, 1), steps)
    return y.view_as(x), saved


def _newton_schulz_backward(gradient: Tensor, saved: Sequence[Tensor]) -> Tensor:
    return orthogonalise_backward(gradient.flatten(0, 1), saved).view_as(gradient) if saved else gradient


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Over all of a memory: `[depth, R, K, E]` twice -> `[R, 1, 1]`."""
    return (x * y).sum((0, 2, 3))[:, None, None]


def _either(chosen: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """x where `chosen`, and x elsewhere; 0 in the other."""
    return torch.where(chosen, x, 0.0), torch.where(chosen, 0.0, x)
