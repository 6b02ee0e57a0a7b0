"""Language models in pure PyTorch: Transformer++, Mela and the looped models."""

from models.presets import build_model, preset
from models.serialization import load_model, save_model

__all__ = ["build_model", "load_model", "preset", "save_model"]
