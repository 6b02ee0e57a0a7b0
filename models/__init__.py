"""Language models in pure PyTorch: Transformer++, Mela and the looped models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from models.families import build_model
from models.serialization import load_model, save_model

if TYPE_CHECKING:
    from models.presets import preset

__all__ = ["build_model", "load_model", "preset", "save_model"]


def __getattr__(name: str) -> Any:
    """`preset`, when it is asked for: a model that runs does not depend on the table of presets."""
    if name == "preset":
        return importlib.import_module("models.presets").preset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
