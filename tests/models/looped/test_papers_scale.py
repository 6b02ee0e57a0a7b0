"""What looping costs at the papers' sizes, computed on the meta device: the README quotes these figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from models import build_model, preset
from models.transformer import Transformer

LOOPS = 4


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Ouro 1.4B, MELT 1.6B, and Transformer++ with a layer of its own for each that they run."""
    config: Any = preset("ouro_1b4")
    shape = {name: getattr(config, name) for name in ("width", "heads", "kv_heads", "hidden", "vocab_size")}
    assert config.loops == LOOPS
    with torch.device("meta"):
        return {
            "looplm": build_model(config),
            "melt": build_model(preset("melt_1b6")),
            "unlooped": build_model(preset("transformer_pp_tiny", **shape, layers=LOOPS * config.layers)),
        }


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_four_predictions_take_more_training_flops_than_one(models: dict[str, Any]):
    looped, unlooped = (models[name].cost(4096).total_training_flops for name in ("looplm", "unlooped"))
    assert looped / unlooped == pytest.approx(1.044, abs=5e-4)


def test_a_token_of_melt_reads_more_than_four_of_a_transformer_of_as_many_layers(models: dict[str, Any]):
    looplm, melt, unlooped = models["looplm"], models["melt"], models["unlooped"]
    assert isinstance(unlooped, Transformer)
    blocks, head = parameters(unlooped.blocks) / LOOPS, parameters(looplm.head)  # of a Transformer++ of N layers
    layers = parameters(looplm.layers)
    gates = parameters(melt.layers) - layers
    rows = 2 * looplm.config.layers * looplm.config.kv_width * 8192
    token_of_melt = LOOPS * (layers + rows) + (LOOPS - 1) * gates + head  # the first loop needs no gate
    tokens_of_transformer = LOOPS * (blocks + rows + head)
    assert 2e-9 * token_of_melt == pytest.approx(17.7, abs=0.05)  # bf16
    assert 2e-9 * tokens_of_transformer == pytest.approx(17.1, abs=0.05)
