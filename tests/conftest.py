"""Settings of the whole suite: offline, one thread, the same examples every time, and no memory read before written."""

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    MLFLOW_DISABLE_TELEMETRY="true",
    DVC_NO_ANALYTICS="1",
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
    GOMP_SPINCOUNT="1000",
)

import pytest
import torch
from hypothesis import settings
from torch import Tensor

torch.set_num_threads(1)
settings.register_profile("suite", derandomize=True, database=None, deadline=None, max_examples=20)
settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def _uninitialised_memory_is_nan():
    """`torch.empty` and its relatives hold NaN, so that a result that reads what nobody wrote is seen to be wrong."""

    def poisoned(allocate):
        def allocate_nan(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.detach().fill_(float("nan"))
            return tensor

        return allocate_nan

    with torch.device("meta"):
        torch.empty(0)  # torch remembers at first use which functions take a default device: let it see the real ones
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield


@pytest.fixture(autouse=True)
def _one_thread():
    """Stages set the number of threads of their process; here that must not reach the next test."""
    yield
    torch.set_num_threads(1)
