"""The presets: how large each is, to the parameter, and that those compared with each other are equally large."""

import pytest
import torch

from models import build_model, preset
from models.families import FAMILIES, family
from models.presets import PRESETS

PARAMETERS = {
    "transformer_pp_tiny": 1_969_792,
    "transformer_pp_tiny_window": 1_969_792,
    "transformer_pp_tiny_chunk": 1_969_792,
    "transformer_pp_400m": 425_255_936,
    "transformer_pp_800m": 799_090_176,
    "transformer_pp_1b2": 1_209_624_576,
    "mela_tiny": 1_972_552,
    "titans_tiny": 1_770_416,
    "mela_400m": 424_579_064,
    "mela_800m": 797_880_672,
    "mela_1b2": 1_206_510_624,
    "looplm_tiny": 920_833,
    "melt_tiny": 986_625,
    "ouro_1b4": 1_434_652_673,
    "melt_1b6": 1_636_028_417,
    "qwen3_1b7": 1_720_567_808,
}
PARTNERS = [
    ("mela_400m", "transformer_pp_400m"),
    ("mela_800m", "transformer_pp_800m"),
    ("mela_1b2", "transformer_pp_1b2"),
    ("mela_tiny", "transformer_pp_tiny"),
    ("mela_tiny", "transformer_pp_tiny_window"),
    ("mela_tiny", "transformer_pp_tiny_chunk"),
]


def test_every_preset_has_its_size_asserted():
    assert set(PARAMETERS) == set(PRESETS)


@pytest.mark.parametrize("name", list(PRESETS))
def test_parameters(name):
    with torch.device("meta"):
        model = build_model(preset(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert model.cost(1024).total_parameters == PARAMETERS[name]


@pytest.mark.parametrize(("name", "partner"), PARTNERS)
def test_partners_are_equally_large(name, partner):
    assert PARAMETERS[partner] == pytest.approx(PARAMETERS[name], rel=0.01)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_families_name_themselves(name):
    module = family(name)
    assert module.CONFIG.family == name
    assert module.MODEL.__module__ == FAMILIES[name]
