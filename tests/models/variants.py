"""Every option of every family, on models small enough to try them all. `test_contract.py` runs over this list."""

from dataclasses import dataclass, field
from typing import Any

from models.configuration import config_from
from models.families import family
from models.language_model import ModelConfig


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
    """In chunks of one token: what other chunks give depends on where they are cut (`looped/test_melt.py`)."""
    shape = {"vocab_size": 31, "width": 16, "layers": 1, "loops": 3, "heads": 4, "hidden": 24}
    shape |= {"chunk": 1, "inference_chunk": 1}
    return Variant("melt", {**shape, **fields}, length=11)


def _mela(length: int = 29, **fields: Any) -> Variant:
    """Memory chunks of 6 tokens beside text chunks of 8; `mela/test_mela.py` goes through the options one by one."""
    patches = {"patch_size": 2, "memory_chunk": 3, "text_chunk": 8, "memory_tokens": 4, "heads": 2, "memory_heads": 2}
    shape = {"vocab_size": 31, "width": 16, "h_blocks": 1, "decoder_layers": 2, "decoder_heads": 2, "hidden": 24}
    return Variant("mela", {**patches, **shape, **fields}, length)


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
    "mela": _mela(h_blocks=2),
    "mela_no_memory": _mela(memory="none"),
    "mela_hrm_causal": _mela(recursion="hrm", memory_view="causal", memory_depth=2, memory_expansion=2),
    "mela_trm": _mela(recursion="trm", gate="headwise", noop_gate=True, memstack="none"),
    "mela_titans": _mela(recursion="titans", attention=False, decoder_kv_heads=1),
    "mela_weighted_sum": _mela(fusion="weighted_sum", gate="none", newton_schulz_steps=1),
    "mela_slow_state_only": _mela(fusion="none", patch_skip=False, neural_memory=False),
    "mela_learned_memstack": _mela(memstack="learned", h_cycles=3, l_cycles=1),
    "mela_causal": _mela(memory_view="causal", patch_size=4, memory_chunk=2, memory_tokens=1, length=43),
    "mela_long_memory_chunk": _mela(memory_chunk=7, memory_tokens=2, newton_schulz_steps=0, length=53),
    "mela_patches_of_one_token": _mela(patch_size=1, memory_chunk=2, text_chunk=5, memory_tokens=7),
}
