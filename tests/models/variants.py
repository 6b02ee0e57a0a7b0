"""Every option of every family, on models small enough to try them all. `test_contract.py` runs over this list."""

from dataclasses import dataclass, field
from typing import Any

from models.configuration import config_from
from models.language_model import ModelConfig
from models.presets import family


@dataclass(frozen=True)
class Variant:
    family: str
    fields: dict[str, Any] = field(default_factory=dict)
    length: int = 41  # tokens in a test sequence: several chunks or windows, and not a multiple of them

    def config(self) -> ModelConfig:
        return config_from(family(self.family).CONFIG, self.fields)


def _transformer(length: int = 41, **fields: Any) -> Variant:
    shape = {"vocab_size": 31, "width": 16, "layers": 2, "heads": 4, "hidden": 24}
    return Variant("transformer", {**shape, **fields}, length)


def _looplm(**fields: Any) -> Variant:
    shape = {"vocab_size": 31, "width": 16, "layers": 2, "loops": 3, "heads": 4, "hidden": 24}
    return Variant("looplm", {**shape, **fields}, length=23)


def _melt(**fields: Any) -> Variant:
    """In chunks of one token: other chunks depend on where they are cut (`looped/test_melt.py`)."""
    shape = {"vocab_size": 31, "width": 16, "layers": 1, "loops": 3, "heads": 4, "hidden": 24, "chunk": 1}
    return Variant("melt", {**shape, **fields}, length=11)


VARIANTS: dict[str, Variant] = {
    "transformer": _transformer(length=70),  # more than a cache holds at first
    "transformer_grouped": _transformer(kv_heads=2),
    "transformer_tied": _transformer(tie_embeddings=True),
    "transformer_window": _transformer(window=8),
    "transformer_window_grouped": _transformer(window=7, kv_heads=1),
    "transformer_window_shortest": _transformer(window=2),
    "transformer_chunk": _transformer(chunk=8),
    "transformer_chunk_grouped": _transformer(chunk=16, kv_heads=2),
    "looplm": _looplm(),
    "looplm_grouped": _looplm(kv_heads=2),
    "looplm_leaving": _looplm(exit_threshold=0.6),
    "melt": _melt(),
    "melt_grouped": _melt(gate="scalar", kv_heads=1),
    "melt_mean": _melt(gate="mean"),
    "melt_ema": _melt(gate="ema"),
    "melt_last": _melt(gate="last"),
    "melt_first": _melt(gate="first"),
}
