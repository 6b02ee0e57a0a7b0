"""Named model configurations.

No model needs this file to run: a preset that is added or changed makes no finished run stale but its own.
"""

from __future__ import annotations

from typing import Any

from models.configuration import ConfigError, config_from, nearest
from models.families import family
from models.language_model import ModelConfig

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

_MELA: dict[str, Any] = {  # what every size of the paper shares, and our widths and depths where it is silent
    "vocab_size": 32000,
    "patch_size": 32,
    "memory_chunk": 64,
    # W is our assumption. At 2048 the 4,096 tokens of training would never read what memory has written. At 1024 they
    # hold one write, so eta, which carries momentum from write to write, first learns from longer texts.
    "text_chunk": 1024,
    "memory_tokens": 64,
    "h_cycles": 4,
    "l_cycles": 4,
    "h_blocks": 8,
    "memory_depth": 2,
    "patch_skip": False,
}


def _mela(width: int, l_blocks: int, decoder_layers: int, hidden: int) -> tuple[str, dict[str, Any]]:
    """Mela at a size of the paper, every head 64 wide."""
    heads = dict.fromkeys(("heads", "memory_heads", "decoder_heads"), width // 64)
    sizes = {"width": width, "l_blocks": l_blocks, "decoder_layers": decoder_layers, "hidden": hidden}
    return "mela", {**_MELA, **heads, **sizes}


def _transformer_pp(width: int, layers: int, hidden: int) -> tuple[str, dict[str, Any]]:
    """Transformer++ of as many parameters as Mela at a size of the paper, in proportions usual for it."""
    return "transformer", {
        "vocab_size": 32000,
        "width": width,
        "layers": layers,
        "heads": width // 64,
        "hidden": hidden,
    }


PRESETS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (family, fields that differ from its defaults)
    "transformer_pp_tiny": ("transformer", {}),
    "transformer_pp_tiny_window": ("transformer", {"window": 64}),
    "transformer_pp_tiny_chunk": ("transformer", {"chunk": 64}),
    "transformer_pp_400m": _transformer_pp(width=1024, layers=28, hidden=2816),
    "transformer_pp_800m": _transformer_pp(width=1536, layers=24, hidden=4288),
    "transformer_pp_1b2": _transformer_pp(width=2048, layers=22, hidden=5248),
    "mela_tiny": ("mela", {}),
    "titans_tiny": ("mela", {"recursion": "titans"}),
    "mela_400m": _mela(width=896, l_blocks=4, decoder_layers=24, hidden=2688),
    "mela_800m": _mela(width=1152, l_blocks=8, decoder_layers=28, hidden=3456),
    "mela_1b2": _mela(width=1408, l_blocks=8, decoder_layers=30, hidden=4096),
    "looplm_tiny": ("looplm", {"exit_entropy": 1.0}),  # at 0.1 a short training leaves the later loops unused
    "melt_tiny": ("melt", {"chunk": 16}),  # larger ones are further from decoding, which is chunks of 1
    "ouro_1b4": ("looplm", _OURO_1B4),
    "melt_1b6": ("melt", {**_OURO_1B4, "chunk": 500}),
    "qwen3_1b7": ("transformer", _QWEN3_1B7),
}


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
