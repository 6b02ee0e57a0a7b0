"""Decoding with a shared cache: where it must not differ from LoopLM, where it must, and MELT as its oracle."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models import build_model, preset
from models.looped.looplm import LoopLM
from models.looped.sharing import as_melt, decode_with_shared_cache

SHAPE: dict[str, Any] = {"vocab_size": 31, "width": 16, "layers": 2, "heads": 4, "hidden": 24}


def looplm(loops: int) -> LoopLM:
    model = build_model(preset("looplm_tiny", **SHAPE, loops=loops), seed=1)
    assert isinstance(model, LoopLM)
    return model.double()


def tokens(length: int = 9) -> Tensor:
    return torch.randint(31, (2, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("loop", ["first", "last"])
@pytest.mark.parametrize("keep_prompt", [True, False])
@torch.no_grad()
def test_with_one_loop_there_is_nothing_to_share(loop, keep_prompt):
    model = looplm(1)
    logits = decode_with_shared_cache(model, tokens(), 4, loop, keep_prompt)
    torch.testing.assert_close(logits, model(tokens())[:, 4:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("loop", ["first", "last"])
@torch.no_grad()
def test_the_token_after_a_kept_prompt_is_exact_but_for_the_loops_it_shares_itself(loop):
    model = looplm(3)
    kept = decode_with_shared_cache(model, tokens(), 4, loop, keep_prompt=True)
    exact = model(tokens())[:, 4:]
    if loop == "last":  # its own row is that of the loop at hand
        torch.testing.assert_close(kept[:, 0], exact[:, 0], rtol=0, atol=1e-12)
    assert not torch.allclose(kept[:, 1:], exact[:, 1:])
    shared = decode_with_shared_cache(model, tokens(), 4, loop, keep_prompt=False)
    assert not torch.allclose(shared[:, 0], exact[:, 0])


@pytest.mark.parametrize("loop", ["first", "last"])
@torch.no_grad()
def test_after_a_prompt_of_one_token_it_is_melt_with_that_gate(loop):
    """One token sees itself alone in every loop, so LoopLM leaves the row that MELT keeps."""
    model = looplm(3)
    logits = decode_with_shared_cache(model, tokens(), 1, loop, keep_prompt=False)
    torch.testing.assert_close(logits, as_melt(model, loop)(tokens())[:, 1:], rtol=0, atol=1e-12)


@torch.no_grad()
def test_the_weights_are_those_of_the_model():
    model = looplm(3)
    student = as_melt(model, "last")
    assert student.embedding.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert not any(parameter.is_meta for parameter in student.parameters())
