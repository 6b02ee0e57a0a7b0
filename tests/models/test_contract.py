"""What every language model promises, tried on every variant of every family (`variants.py`)."""

import json
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models import build_model, load_model, save_model
from models.language_model import CausalLM, state_bytes
from tests.models.flops import counted_flops
from tests.models.variants import VARIANTS

every_variant = pytest.mark.parametrize("name", list(VARIANTS))


@cache
def model_of(name: str, dtype: torch.dtype) -> CausalLM:
    """A fresh model; do not change its weights."""
    with torch.inference_mode(False):  # a cached model serves tests with and without gradients
        return build_model(VARIANTS[name].config(), seed=1).to(dtype)


def tokens_of(name: str, batch: int = 2, length: int | None = None) -> Tensor:
    variant = VARIANTS[name]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(variant.config().vocab_size, (batch, length or variant.length), generator=generator)


def streamed(model: CausalLM, pieces: list[Tensor]) -> Tensor:
    state = model.init_state(pieces[0].shape[0])
    logits = []
    for piece in pieces:
        out, state = model.extend(piece, state)
        logits.append(out)
    return torch.cat(logits, dim=1)


@every_variant
@torch.inference_mode()
def test_changing_a_token_changes_no_earlier_logit_of_its_row_and_none_of_another(name):
    model, length = model_of(name, torch.float32), VARIANTS[name].length
    tokens = tokens_of(name, batch=length)
    changed = tokens.clone()
    changed.diagonal().copy_((tokens.diagonal() + 1) % model.config.vocab_size)  # row t at token t
    for control in model.controls:
        if control == "shuffle":  # rows read each other's memory: the next test
            continue
        model.set_control(control)
        same = (model(changed) == model(tokens)).all(dim=-1)
        for t in range(length):
            assert same[t, :t].all(), f"control={control}: token {t} reached the past"
            assert not same[t, t], f"control={control}: token {t} was not read"
    model.set_control("on")


@every_variant
@torch.inference_mode()
def test_changing_a_token_of_all_rows_changes_no_earlier_logit(name):
    model, tokens = model_of(name, torch.float32), tokens_of(name)
    model.set_control("shuffle" if "shuffle" in model.controls else "on")
    logits = model(tokens)
    for t in range(tokens.shape[1]):
        changed = tokens.clone()
        changed[:, t] = (tokens[:, t] + 1) % model.config.vocab_size
        assert torch.equal(model(changed)[:, :t], logits[:, :t]), f"token {t} reached the past"
    model.set_control("on")


@every_variant
@settings(max_examples=10)
@given(data=st.data())
@torch.inference_mode()
def test_any_segmentation_gives_the_logits_of_forward(name, data):
    model, tokens = model_of(name, torch.float64), tokens_of(name)
    cuts = data.draw(st.sets(st.integers(1, tokens.shape[1] - 1)), label="cuts")
    pieces = list(tokens.tensor_split(sorted(cuts), dim=1))
    torch.testing.assert_close(streamed(model, pieces), model(tokens), rtol=0, atol=1e-9)


@every_variant
@torch.inference_mode()
def test_one_token_at_a_time_under_every_control(name):
    model, tokens = model_of(name, torch.float64), tokens_of(name)
    pieces = list(tokens.split(1, dim=1))
    for control in model.controls:
        model.set_control(control)
        torch.testing.assert_close(streamed(model, pieces), model(tokens), rtol=0, atol=1e-9)
    model.set_control("on")
    single = model_of(name, torch.float32)
    torch.testing.assert_close(streamed(single, pieces), single(tokens), rtol=0, atol=1e-4)


@every_variant
@torch.inference_mode()
def test_a_prefix_gives_the_logits_it_has_in_the_whole(name):
    model, tokens = model_of(name, torch.float64), tokens_of(name)
    logits = model(tokens)
    for length in range(1, tokens.shape[1]):
        torch.testing.assert_close(model(tokens[:, :length]), logits[:, :length], rtol=0, atol=1e-9)


@every_variant
@torch.inference_mode()
def test_state_bytes_are_those_that_cost_states(name):
    model, tokens = model_of(name, torch.float32), tokens_of(name, batch=3)
    state = model.init_state(3)
    for t in range(tokens.shape[1]):
        _, state = model.extend(tokens[:, t : t + 1], state)
        assert state_bytes(state) == 3 * model.cost(t + 1).state_bytes, f"after {t + 1} tokens"


@every_variant
@torch.inference_mode()
def test_permuting_rows_permutes_outputs(name):
    model, tokens = model_of(name, torch.float64), tokens_of(name, batch=4)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(model(tokens[order]), model(tokens)[order], rtol=0, atol=1e-12)
    pieces = list(tokens[order].split(7, dim=1))
    torch.testing.assert_close(streamed(model, pieces), model(tokens)[order], rtol=0, atol=1e-9)


@every_variant
def test_every_parameter_of_a_fresh_model_has_a_gradient(name):
    model, tokens = build_model(VARIANTS[name].config(), seed=0), tokens_of(name)
    loss, _ = model.training_loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{parameter_name} was not used"
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.any(), f"{parameter_name} has a zero gradient"


@every_variant
def test_flops_agree_with_the_counter(name):
    model, longest = model_of(name, torch.float32), VARIANTS[name].length
    for length in (1, longest):
        tokens = tokens_of(name, length=length + 1)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        with torch.no_grad():
            forward = counted_flops(lambda inputs=inputs: model(inputs))
        training = counted_flops(lambda pair=(inputs, targets): model.training_loss(*pair)[0].backward())
        model.zero_grad()
        cost = model.cost(length)
        assert forward / inputs.numel() == pytest.approx(cost.total_forward_flops, rel=0.02)
        assert training / inputs.numel() == pytest.approx(cost.total_training_flops, rel=0.02)


@every_variant
def test_cost_counts_every_parameter(name):
    config = VARIANTS[name].config()
    with torch.device("meta"):
        model = build_model(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert model.cost(VARIANTS[name].length).total_parameters == parameters


@every_variant
def test_a_saved_model_comes_back_bit_for_bit(name, tmp_path):
    model, tokens = model_of(name, torch.float32), tokens_of(name)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config
    assert json.loads((tmp_path / "config.json").read_text())["family"] == VARIANTS[name].family
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    with torch.inference_mode():
        assert torch.equal(loaded(tokens), model(tokens))


@every_variant
def test_a_seed_gives_the_same_weights_again_and_another_seed_others(name):
    first, again, other = (build_model(VARIANTS[name].config(), seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@every_variant
def test_grad_mode_changes_no_logit(name):
    model, tokens = model_of(name, torch.float32), tokens_of(name)
    logits = model(tokens).detach()
    with torch.no_grad():
        assert torch.equal(model(tokens), logits)
    with torch.inference_mode():
        assert torch.equal(model(tokens), logits)


@every_variant
@torch.inference_mode()
def test_a_single_token_is_a_sequence(name):
    model, tokens = model_of(name, torch.float32), tokens_of(name, batch=1, length=1)
    logits = model(tokens)
    assert logits.shape == (1, 1, model.config.vocab_size)
    assert logits.isfinite().all()


@every_variant
@torch.inference_mode()
def test_bfloat16_autocast_is_close_to_float32(name):
    model, tokens = model_of(name, torch.float32), tokens_of(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens).float()
    assert (logits - model(tokens)).abs().mean() < 0.1
