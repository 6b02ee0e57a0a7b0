"""The suite's own settings hold: they are what other tests silently rely on."""

import os
import subprocess
import sys

import torch


def test_memory_nobody_wrote_is_nan():
    x = torch.ones(2)
    for tensor in (torch.empty(3), torch.empty_like(x), x.new_empty(3), torch.empty(3, dtype=torch.bfloat16)):
        assert tensor.isnan().all()
    assert torch.empty(3, dtype=torch.int64).shape == (3,)
    assert torch.empty(3, requires_grad=True).isnan().all()


def test_tests_run_on_one_thread():
    assert torch.get_num_threads() == 1


def test_waiting_threads_sleep_soon_unless_the_user_says_otherwise():
    said = "import sys, pipelines; assert 'torch' not in sys.modules; import os; print(os.environ['GOMP_SPINCOUNT'])"
    for told, expected in (({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7")):
        environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"} | told
        ran = subprocess.run([sys.executable, "-c", said], env=environment, capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == expected
