"""The exit distribution and the loop a token leaves after, against the definitions written out."""

import pytest
import torch

from models.looped.exits import exit_log_probabilities, exit_loop


def test_three_loops_written_out():
    logits = torch.tensor([[-0.7, 3.0], [1.2, -2.0]], dtype=torch.float64)
    first, second = torch.sigmoid(logits)
    expected = torch.stack([first, second * (1 - first), (1 - first) * (1 - second)])
    torch.testing.assert_close(exit_log_probabilities(logits).exp(), expected, rtol=0, atol=1e-15)


def test_probabilities_add_up_to_one_and_stay_finite_for_extreme_gates():
    logits = torch.tensor([[-200.0, 200.0, 0.0], [200.0, -200.0, 0.0], [-200.0, -200.0, 0.0]])
    log_p = exit_log_probabilities(logits)
    assert log_p.isfinite().all()
    torch.testing.assert_close(log_p.exp().sum(0), torch.ones(3))


def test_a_single_loop_is_certain():
    assert torch.equal(exit_log_probabilities(torch.empty(0, 5)), torch.zeros(1, 5))
    assert torch.equal(exit_loop(torch.empty(0, 5), 0.5), torch.zeros(5, dtype=torch.long))


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.9, 0.999])
def test_a_token_leaves_after_the_first_loop_that_reaches_the_threshold(threshold):
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = exit_log_probabilities(logits).exp()
    for token, chosen in enumerate(exit_loop(logits, threshold).tolist()):
        total = 0.0
        for loop in range(5):
            total += p[loop, token].item()
            if total >= threshold or loop == 4:
                break
        assert chosen == loop
