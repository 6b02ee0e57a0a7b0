import pytest
import torch
from torch import Tensor

from models.mela.newton_schulz import newton_schulz


def matrices(*shape: int, smallest: float = 0.1, seed: int = 0) -> Tensor:
    """Random matrices with singular values between `smallest` and 1, fp64."""
    generator = torch.Generator().manual_seed(seed)
    u, _, v = torch.linalg.svd(torch.randn(*shape, dtype=torch.float64, generator=generator), full_matrices=False)
    values = torch.rand(u.shape[:-2] + u.shape[-1:], dtype=torch.float64, generator=generator)
    return u * (smallest + (1 - smallest) * values)[..., None, :] @ v


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 2, 6, 17), (2, 17, 6)])
def test_five_steps_bring_singular_values_near_one_and_keep_subspaces(shape):
    x = matrices(*shape)
    y = newton_schulz(x)
    assert y.shape == x.shape
    values = torch.linalg.svdvals(y)
    assert values.min() > 0.65
    assert values.max() < 1.2
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    rotated = u.mT @ y @ v.mT  # diagonal exactly when the singular vectors of y are those of x
    torch.testing.assert_close(rotated, torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("steps", [1, 3, 5, 7])
def test_each_step_is_the_quintic_on_singular_values(steps):
    x = matrices(4, 5, 9)
    u, values, v = torch.linalg.svd(x, full_matrices=False)
    values = values / values.norm(dim=-1, keepdim=True)
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    torch.testing.assert_close(newton_schulz(x, steps), u * values[:, None] @ v)


def test_low_rank_stays_low_rank():
    x = matrices(2, 16, 3) @ matrices(2, 3, 16, seed=1)
    values = torch.linalg.svdvals(newton_schulz(x))
    assert values[:, :3].min() > 0.65
    assert values[:, 3:].max() < 1e-9


@pytest.mark.parametrize("shape", [(2, 4, 4), (2, 3, 5), (5, 3)])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_written_out_gradient_is_the_true_one(shape, steps):
    x = matrices(*shape).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: newton_schulz(x, steps), x)


def test_a_zero_matrix_gives_zero_and_a_finite_gradient():
    x = torch.stack((torch.zeros(6, 4), torch.full((6, 4), 1e-9), torch.ones(6, 4))).requires_grad_()
    y = newton_schulz(x)
    y.sum().backward()
    assert x.grad is not None
    assert not y[:2].any()
    assert not x.grad[:2].any()
    assert y[2].any()
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() < 100


def test_autocast_does_not_reach_it():
    """In bf16 rounding in the null space of a low-rank gradient is amplified: half of the result would be noise."""
    x = (matrices(4, 64, 8) @ matrices(4, 8, 64, seed=1)).float()
    exact = newton_schulz(x.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = newton_schulz(x)
        half = newton_schulz(x.bfloat16())
    assert y.dtype == half.dtype == torch.float32
    assert (y - exact).norm() / exact.norm() < 1e-3


def test_it_learns_under_inference_mode():
    x = matrices(2, 4, 4)
    with torch.inference_mode():
        y = newton_schulz(x)
    assert torch.equal(y, newton_schulz(x))
