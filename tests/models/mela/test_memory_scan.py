"""The written-out gradient of the chunk loop against autograd through the same loop."""

import pytest
import torch
from torch import Tensor

from models.mela.inner_loss import descend
from models.mela.memory_scan import MemoryState, write_chunks
from models.mela.newton_schulz import newton_schulz

CHUNKS, ROWS, PATCHES, WIDTH, HIDDEN = 3, 2, 4, 3, 5


def inputs(depth: int, gated: bool) -> list:
    """Keys, values, theta, eta, alpha, threshold, M and S, fp64; with a gate some chunks write and some do not."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator) / 2

    hidden = WIDTH if depth == 1 else HIDDEN
    keys, values = numbers(CHUNKS, ROWS, PATCHES, WIDTH), numbers(CHUNKS, ROWS, PATCHES, WIDTH)
    theta = numbers(CHUNKS, ROWS, PATCHES, 1).sigmoid()
    eta, alpha = numbers(CHUNKS, ROWS, 1, 1).sigmoid(), numbers(CHUNKS, ROWS, 1, 1).sigmoid()
    weights, momentum = numbers(depth, ROWS, WIDTH, hidden), numbers(depth, ROWS, WIDTH, hidden)
    threshold = torch.tensor([0.1, 2.0], dtype=torch.float64)[:, None, None] if gated else None
    made = [keys, values, theta, eta, alpha, threshold, weights, momentum]
    return [None if tensor is None else tensor.requires_grad_() for tensor in made]


def scan(given: list, steps: int) -> tuple[Tensor, ...]:
    keys, values, theta, eta, alpha, threshold, weights, momentum = given
    history, state = write_chunks(keys, values, theta, eta, alpha, threshold, MemoryState(weights, momentum), steps)
    return history, state.weights, state.momentum


def by_autograd(given: list, steps: int) -> tuple[Tensor, ...]:
    keys, values, theta, eta, alpha, threshold, weights, momentum = given
    history, written = [], []
    for chunk in range(len(keys)):
        history.append(weights)
        descent, (error, *_) = descend(weights.unbind(0), keys[chunk], values[chunk], theta[chunk])
        after = descent + eta[chunk] * momentum
        proposed = alpha[chunk] * weights + (newton_schulz(after, steps) if steps else after)
        if threshold is None:
            weights, momentum = proposed, after
            continue
        excess = error.square().mean((1, 2), keepdim=True) - threshold
        soft = excess.sigmoid()
        gate = (excess > 0).double() + (soft - soft.detach())
        written += (excess > 0).flatten().tolist()
        weights, momentum = torch.lerp(weights, proposed, gate), torch.lerp(momentum, after, gate)
    assert threshold is None or 0 < sum(written) < len(written)
    return torch.stack(history, 1), weights, momentum


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_and_gradients_are_those_of_the_loop(depth, steps, gated):
    given = inputs(depth, gated)
    outputs, expected = scan(given, steps), by_autograd(given, steps)
    torch.testing.assert_close(outputs, expected)
    upstream = [torch.randn(output.shape, dtype=torch.float64) for output in outputs]
    wanted = [tensor for tensor in given if tensor is not None]
    for used in ([0, 1, 2], [0], [1], [2], [0, 2]):

        def gradients(of: tuple[Tensor, ...], used=used) -> tuple[Tensor, ...]:
            loss = torch.stack([(of[index] * upstream[index]).sum() for index in used]).sum()
            return torch.autograd.grad(loss, wanted, retain_graph=True, materialize_grads=True)

        torch.testing.assert_close(gradients(outputs), gradients(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("depth", [1, 2])
def test_gradients_are_those_of_finite_differences(depth):
    given = inputs(depth, gated=False)

    def of(*tensors: Tensor) -> tuple[Tensor, ...]:
        return scan([*tensors[:5], None, *tensors[5:]], 2)

    assert torch.autograd.gradcheck(of, [tensor for tensor in given if tensor is not None])


def test_nothing_is_kept_without_gradients():
    given = [None if tensor is None else tensor.detach() for tensor in inputs(2, gated=True)]
    history, *_ = scan(given, 2)
    assert history.grad_fn is None
