"""The parts of the contract that hold for any model: paired weights, controls, the loss."""

import math

import pytest
import torch

from models import build_model, preset
from models.configuration import ConfigError
from models.language_model import CausalLM, ModelConfig
from models.layers import Linear


class Pair(CausalLM):
    """Just enough of a model to draw weights for: an arm may have a map more than the other."""

    def __init__(self, extra: bool) -> None:
        super().__init__()
        if extra:
            self.before = Linear(4, 4)
        self.first, self.second = Linear(4, 4), Linear(4, 4)


def test_weights_depend_on_seed_and_name_alone():
    arms = [Pair(extra) for extra in (False, True)]
    for arm in arms:
        arm.init_weights(seed=5)
    assert torch.equal(arms[0].first.weight, arms[1].first.weight)
    assert torch.equal(arms[0].second.weight, arms[1].second.weight)
    assert not torch.equal(arms[0].first.weight, arms[0].second.weight)


def test_building_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    build_model(preset("transformer_pp_tiny", layers=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_meta_device_holds_no_weights():
    with torch.device("meta"):
        model = build_model(preset("transformer_pp_tiny"))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_an_unknown_control_is_refused():
    model = build_model(preset("transformer_pp_tiny", layers=1))
    model.set_control("on")
    with pytest.raises(ConfigError, match=r"control='off'.*on"):
        model.set_control("off")


def test_loss_of_a_fresh_model_is_about_that_of_a_guess():
    model = build_model(preset("transformer_pp_tiny", layers=1, vocab_size=256))
    tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(0))
    loss, logged = model.training_loss(tokens[:, :-1], tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(256), rel=0.15)
    assert logged == {}


def test_loss_is_the_mean_negative_log_probability():
    model = build_model(preset("transformer_pp_tiny", layers=1, vocab_size=32)).double()
    tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(0))
    loss, _ = model.training_loss(tokens[:, :-1], tokens[:, 1:])
    probabilities = model(tokens[:, :-1]).softmax(-1).gather(-1, tokens[:, 1:, None])
    torch.testing.assert_close(loss.double(), -probabilities.log().mean(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("field", ["vocab_size", "width"])
def test_sizes_are_positive(field):
    with pytest.raises(ConfigError, match=f"{field}=0"):
        ModelConfig(**{field: 0})
