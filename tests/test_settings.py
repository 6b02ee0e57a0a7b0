"""The suite's own settings hold: they are what other tests silently rely on."""

import torch


def test_memory_nobody_wrote_is_nan():
    x = torch.ones(2)
    for tensor in (torch.empty(3), torch.empty_like(x), x.new_empty(3), torch.empty(3, dtype=torch.bfloat16)):
        assert tensor.isnan().all()
    assert torch.empty(3, dtype=torch.int64).shape == (3,)
    assert torch.empty(3, requires_grad=True).isnan().all()


def test_tests_run_on_one_thread():
    assert torch.get_num_threads() == 1
