"""Named model configurations, and the families they belong to.

Families are named by module and imported when first asked for, so that what a run depends on is its own family only.
A family module exposes `CONFIG` (its config class) and `MODEL` (its `CausalLM` class).
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from models.configuration import ConfigError, config_from, nearest
from models.language_model import CausalLM, ModelConfig

FAMILIES: dict[str, str] = {
    "transformer": "models.transformer",
    "mela": "models.mela.mela",
    "looplm": "models.looped.looplm",
    "melt": "models.looped.melt",
}

_OURO_1B4: dict[str, Any] = {
    "vocab_size": 49152,
    "width": 2048,
    "layers": 24,
    "loops": 4,
    "heads": 16,
    "hidden": 5632,
    "rope_theta": 1e6,
}

_QWEN3_1B7: dict[str, Any] = {  # its shape, for memory tables: Qwen3 also norms queries and keys
    "vocab_size": 151936,
    "width": 2048,
    "layers": 28,
    "heads": 16,
    "kv_heads": 8,
    "hidden": 6144,
    "rope_theta": 1e6,
    "tie_embeddings": True,
}

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (family, fields that differ from its defaults)
    "transformer_pp_tiny": ("transformer", {}),
    "transformer_pp_tiny_window": ("transformer", {"window": 64}),
    "transformer_pp_tiny_chunk": ("transformer", {"chunk": 64}),
    "mela_tiny": ("mela", {}),
    "titans_tiny": ("mela", {"recursion": "titans"}),
    "looplm_tiny": ("looplm", {}),
    "melt_tiny": ("melt", {}),
    "ouro_1b4": ("looplm", _OURO_1B4),
    "melt_1b6": ("melt", {**_OURO_1B4, "chunk": 500}),
    "qwen3_1b7": ("transformer", _QWEN3_1B7),
}


def family(name: str) -> ModuleType:
    """The module of a model family; `ConfigError` for a name that is none."""
    if name not in FAMILIES:
        known = list(FAMILIES)
        raise ConfigError(f"family={name!r} is unknown{nearest(name, known)}; choose from {', '.join(known)}")
    return importlib.import_module(FAMILIES[name])


def preset(name: str, **overrides: Any) -> ModelConfig:
    """The frozen config of a preset, with some fields replaced.

    Raises:
        ConfigError: for an unknown preset or field, a mistyped value, or values that do not go together.
    """
    if name not in PRESETS:
        known = sorted(PRESETS)
        raise ConfigError(f"model={name!r} is unknown{nearest(name, known)}; choose from {', '.join(known)}")
    family_name, fields = PRESETS[name]
    return config_from(family(family_name).CONFIG, {**fields, **overrides}, where="model")


def build_model(config: ModelConfig, seed: int = 0) -> CausalLM:
    """The module a config describes, its weights drawn from `seed`; under `torch.device("meta")` none are drawn.

    The global random state stays as it was.
    """
    with torch.random.fork_rng(devices=[]):
        model = family(config.family).MODEL(config)
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.init_weights(seed)
    return model
