"""Newton-Schulz orthogonalisation: `U S V^T -> U f(S) V^T`, with f pushing every singular value towards 1.

Special here:
- always fp32 or wider, whatever autocast says: chunk gradients have low rank, and bf16 rounding in their null space
  would be amplified by `a^steps` (about 485 in five steps);
- zero-safe: a zero matrix gives zero, and a zero gradient;
- the backward pass is written out: it shares the Gram matrices of the forward pass, so that a step costs four products
  where autograd makes six.

Source: the quintic of Muon (Jordan et al. 2024), which Mela applies to the momentum of its memory
(`M_t = alpha M_{t-1} + NewtonSchulz_k(S_t)`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c of f(s) = a s + b s^3 + c s^5
SMALLEST_NORM = 1e-7  # a matrix below it counts as zero


def newton_schulz(x: Tensor, steps: int = 5) -> Tensor:
    """Orthogonalise each matrix of `x [..., m, n]`, in fp32 (fp64 stays fp64).

    Singular values above about 0.01 of the Frobenius norm come out in [0.65, 1.2] after five steps; their subspaces
    stay. A matrix whose norm is below `SMALLEST_NORM` gives zero.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = x if x.shape[-2] <= x.shape[-1] else x.mT  # the Gram matrix of the shorter side is the smaller one
    result = _NewtonSchulz.apply(wide.reshape(-1, *wide.shape[-2:]), steps).view(wide.shape)
    return result if wide is x else result.mT


def newton_schulz_flops(m: int, n: int, steps: int) -> tuple[float, float]:
    """FLOPs of one `[m, n]` matrix: forward, and forward with backward."""
    short, long = min(m, n), max(m, n)
    rectangular, square = 2.0 * short * short * long, 2.0 * short**3
    return steps * (2 * rectangular + square), steps * (5 * rectangular + 2 * square)


def full_precision(device: torch.device) -> AbstractContextManager:
    """Autocast off, on devices that have it."""
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()


def newton_schulz_saves(steps: int) -> int:
    """How many tensors `orthogonalise` returns for the backward pass, which 0 steps do not have."""
    return 1 + 3 * steps if steps else 0


def orthogonalise(x: Tensor, steps: int) -> tuple[Tensor, list[Tensor]]:
    """`X /= ||X||`, then `steps` times `X <- P X` with `P = a I + b G + c G^2`, `G = X X^T`; `x [N, m, n]`, m <= n.

    Also returns what `orthogonalise_backward` needs.
    """
    a, b, c = COEFFICIENTS
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    scale = torch.where(norm > SMALLEST_NORM, 1 / norm, 0.0)
    iterates, grams, polynomials = [x * scale], [], []
    with full_precision(x.device):
        for _ in range(steps):
            x = iterates[-1]
            gram = torch.bmm(x, x.mT)
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            polynomial.diagonal(dim1=1, dim2=2).add_(a)
            iterates.append(torch.bmm(polynomial, x))
            grams.append(gram)
            polynomials.append(polynomial)
    return iterates.pop(), [scale, *iterates, *grams, *polynomials]


def orthogonalise_backward(gradient: Tensor, saved: Sequence[Tensor]) -> Tensor:
    """Gradient of the input of `orthogonalise` from that of its output, both `[N, m, n]`."""
    _, b, c = COEFFICIENTS
    scale, *saved = saved
    steps = len(saved) // 3
    with full_precision(gradient.device):
        for step in reversed(range(steps)):
            x, gram, polynomial = saved[step::steps]
            product = torch.bmm(gradient, x.mT)  # dP
            symmetric = product + product.mT
            half = torch.baddbmm(symmetric, symmetric, gram, beta=b / 2, alpha=c)
            to_gram = half + half.mT  # dG + dG^T, as G holds X twice
            gradient = torch.bmm(polynomial, gradient)
            torch.baddbmm(gradient, to_gram, x, out=gradient)
    unit = saved[0]
    along = torch.linalg.vecdot(gradient.flatten(1), unit.flatten(1))[:, None, None]
    return torch.addcmul(gradient, unit, along, value=-1) * scale


class _NewtonSchulz(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, steps: int) -> Tensor:  # type: ignore[override]
        y, saved = orthogonalise(x, steps)
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return orthogonalise_backward(gradient, ctx.saved_tensors), None
