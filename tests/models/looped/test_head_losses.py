"""The blocked losses against autograd through all logits at once."""

import pytest
import torch
from torch.nn import functional

from models.looped import head_losses


@pytest.fixture(params=[1, 7, 256])
def block(request, monkeypatch):
    """Blocks of one token, blocks that do not divide the tokens, one block for all."""
    monkeypatch.setattr(head_losses, "BLOCK", request.param)


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.usefixtures("block")
def test_cross_entropy_and_its_gradients():
    state, head, weights = leaves((23, 6), (11, 6), (23,))
    targets = torch.arange(23) % 11
    loss, values = head_losses.cross_entropy(state, head, targets, weights)
    expected = functional.cross_entropy(state @ head.T, targets, reduction="none")
    torch.testing.assert_close(values, expected.detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(loss, (weights * expected).sum(), rtol=0, atol=1e-13)
    for ours, theirs in zip(
        torch.autograd.grad(3 * loss, (state, head, weights)),
        torch.autograd.grad(3 * (weights * expected).sum(), (state, head, weights)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert not values.requires_grad


@pytest.mark.usefixtures("block")
def test_distillation_is_the_divergence_from_the_teacher():
    state, head, teacher_state, teacher_head = leaves((23, 6), (11, 6), (23, 4), (11, 4))
    loss = head_losses.distillation(state, head, teacher_state, teacher_head)
    student, teacher = (state @ head.T).log_softmax(-1), (teacher_state @ teacher_head.T).log_softmax(-1)
    expected = functional.kl_div(student, teacher.detach(), reduction="batchmean", log_target=True)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-13)
    for ours, theirs in zip(
        torch.autograd.grad(loss, (state, head)), torch.autograd.grad(expected, (state, head)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_distillation_sends_nothing_to_the_teacher():
    state, head, teacher_state, teacher_head = leaves((5, 6), (11, 6), (5, 6), (11, 6))
    head_losses.distillation(state, head, teacher_state, teacher_head).backward()
    assert [leaf.grad is None for leaf in (state, head, teacher_state, teacher_head)] == [False, False, True, True]


def test_a_student_that_is_its_teacher_has_no_loss_and_no_gradient():
    state, head = leaves((5, 6), (11, 6))
    loss = head_losses.distillation(state, head, state.detach(), head.detach())
    loss.backward()
    assert abs(loss.item()) < 1e-15
    assert state.grad is not None
    assert state.grad.abs().max() < 1e-15


def test_half_precision_losses_are_worked_out_in_single_precision():
    state, head, weights = (leaf.detach().bfloat16() for leaf in leaves((23, 6), (11, 6), (23,)))
    state.requires_grad_(True)
    loss, values = head_losses.cross_entropy(state, head, torch.zeros(23, dtype=torch.long), weights.float())
    loss.backward()
    assert values.dtype == torch.float32
    assert state.grad is not None
    assert state.grad.dtype == torch.bfloat16
