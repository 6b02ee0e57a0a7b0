"""What a memory computes, and the gradient of its loss in closed form: forward, and backward through it.

    f(k) = k M                    one layer
    f(k) = act(k M_1) M_2^T       two layers, act = SiLU (our assumption); M_2 is stored transposed
    loss = sum_t theta_t ||f(k_t) - v_t||^2

No autograd is involved: memory learns under `no_grad` and `inference_mode` as well.

Source: Titans (Behrouz et al. 2025), the loss of the associative memory.

Shapes: `R` rows (of the batch, times heads), `C` patches, `K` head width, `E` hidden width of a memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def read(layers: Sequence[Tensor], queries: Tensor) -> Tensor:
    """`f(q; M)`: `q M` for one layer, `silu(q M_1) M_2^T` for two.

    Args:
        layers: one `[R, K, E]` each.
        queries: `[R, n, K]`.
    Returns:
        `[R, n, K]`.
    """
    hidden = torch.bmm(queries, layers[0])
    return hidden if len(layers) == 1 else torch.bmm(functional.silu(hidden), layers[1].mT)


def descend(layers: Sequence[Tensor], keys: Tensor, values: Tensor, theta: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Minus the gradient of the loss with respect to the layers, and what `descend_backward` needs.

    With `X = 2 diag(theta) (V - f(K))` the descent is `K^T X` for one layer; `dM_1 = K^T ((X M_2) * act'(Z))` and
    `dM_2 = X^T A` for two.

    Args:
        layers: one `[R, K, E]` each.
        keys, values: `[R, C, K]`.
        theta: `[R, C, 1]`.
    Returns:
        `[depth, R, K, E]`, and a list whose first is the error `V - f(K)`, `[R, C, K]`.
    """
    hidden = torch.bmm(keys, layers[0])
    if len(layers) == 1:
        error = values - hidden
        signal = 2 * theta * error
        return torch.bmm(keys.mT, signal)[None], [error, signal]
    sigmoid = hidden.sigmoid()
    active = hidden * sigmoid
    slope = torch.addcmul(active, sigmoid, 1 - active)  # silu'(z)
    error = values - torch.bmm(active, layers[1].mT)
    signal = 2 * theta * error
    back = torch.bmm(signal, layers[1])
    scaled = back * slope
    descent = torch.stack((torch.bmm(keys.mT, scaled), torch.bmm(signal.mT, active)))
    return descent, [error, signal, sigmoid, active, slope, back, scaled]


def descend_backward(
    layers: Sequence[Tensor], keys: Tensor, theta: Tensor, saved: Sequence[Tensor], gradient: Tensor, to_error: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of layers `[depth, R, K, E]`, keys, values and theta.

    Args:
        layers, keys, theta: what `descend` was given.
        saved: what it returned.
        gradient: of its descent, `[depth, R, K, E]`.
        to_error: `[R, C, K]`, the gradient that reaches the error elsewhere.
    """
    error, signal, *inner = saved
    if not inner:
        to_signal = torch.bmm(keys, gradient[0])
        to_values = torch.addcmul(to_error, theta, to_signal, value=2)
        to_keys = _add(torch.bmm(signal, gradient[0].mT), to_values, layers[0].mT, -1)
        to_layers = torch.bmm(keys.mT, to_values).neg_()[None]
        return to_layers, to_keys, to_values, 2 * torch.linalg.vecdot(to_signal, error)[..., None]
    sigmoid, active, slope, back, scaled = inner
    to_scaled = torch.bmm(keys, gradient[0])
    to_back = to_scaled * slope
    to_signal = _add(torch.bmm(active, gradient[1].mT), to_back, layers[1].mT)
    to_values = torch.addcmul(to_error, theta, to_signal, value=2)
    to_active = _add(torch.bmm(signal, gradient[1]), to_values, layers[1], -1)
    curvature = torch.addcmul(2 * sigmoid, active, 1 - 2 * sigmoid) * (1 - sigmoid)  # silu''(z)
    to_hidden = to_active * slope + to_scaled * back * curvature
    to_keys = _add(torch.bmm(scaled, gradient[0].mT), to_hidden, layers[0].mT)
    to_second = _add(torch.bmm(signal.mT, to_back), to_values.mT, active, -1)
    to_layers = torch.stack((torch.bmm(keys.mT, to_hidden), to_second))
    return to_layers, to_keys, to_values, 2 * torch.linalg.vecdot(to_signal, error)[..., None]


def _add(x: Tensor, left: Tensor, right: Tensor, sign: int = 1) -> Tensor:
    """`x + sign * left @ right`, in place (as `baddbmm_`, which no FLOP counter sees)."""
    return torch.baddbmm(x, left, right, alpha=sign, out=x)
