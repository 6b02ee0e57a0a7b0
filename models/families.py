"""The model families, and a model from its config.

Families are named by module and imported when first asked for, so that what a run depends on is its own family only.
A family module exposes `CONFIG` (its config class) and `MODEL` (its `CausalLM` class).
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from models.configuration import ConfigError, nearest
from models.language_model import CausalLM, ModelConfig

FAMILIES: dict[str, str] = {
    "transformer": "models.transformer",
    "mela": "models.mela.mela",
    "looplm": "models.looped.looplm",
    "melt": "models.looped.melt",
}


def family(name: str) -> ModuleType:
    """The module of a model family; `ConfigError` for a name that is none."""
    if name not in FAMILIES:
        known = list(FAMILIES)
        raise ConfigError(f"family={name!r} is unknown{nearest(name, known)}; choose from {', '.join(known)}")
    return importlib.import_module(FAMILIES[name])


def build_model(config: ModelConfig, seed: int = 0) -> CausalLM:
    """The module a config describes, its weights drawn from `seed`; under `torch.device("meta")` none are drawn.

    The global random state stays as it was.
    """
    with torch.random.fork_rng(devices=[]):
        model = family(config.family).MODEL(config)
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.init_weights(seed)
    return model
