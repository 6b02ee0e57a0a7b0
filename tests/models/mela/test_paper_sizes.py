"""The presets at the paper's sizes, on the meta device."""

import pytest
import torch

from models import build_model, preset
from models.mela.config import MelaConfig
from models.mela.layout import chunks_written, patches_read

MEMORY = ("patches", "l_module", "h_module", "fusion", "initial_tokens")


def test_shares_of_the_400m_model():
    """Reported: 27.45 % memory, 65.75 % decoder. Our reading: the head is the decoder's, the embedding neither's."""
    with torch.device("meta"):
        parameters = build_model(preset("mela_400m")).cost(4096).parameters
    total = sum(parameters.values())
    assert 100 * sum(parameters[part] for part in MEMORY) / total == pytest.approx(27.45, abs=2)
    assert 100 * (parameters["decoder"] + parameters["head"]) / total == pytest.approx(65.75, abs=2)


@pytest.mark.parametrize("name", ["mela_400m", "mela_800m", "mela_1b2"])
def test_they_have_the_papers_settings_and_train_their_memory_at_its_context(name):
    config = preset(name)
    assert isinstance(config, MelaConfig)
    assert (config.patch_size, config.memory_chunk, config.h_blocks, config.newton_schulz_steps) == (32, 64, 8, 5)
    assert (config.h_cycles, config.l_cycles, config.fusion) == (4, 4, "mlp")
    assert chunks_written(config, patches_read(config, 4096)) > 0
