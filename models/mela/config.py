"""Every switch of Mela, with the papers' names. "Assumption" marks what the paper leaves open and we decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from models.configuration import require
from models.language_model import ModelConfig
from models.transformer import require_heads


@dataclass(frozen=True)
class MelaConfig(ModelConfig):
    """Defaults are the tiny scale. A part that is switched off leaves the fields that describe it without effect."""

    family: ClassVar[str] = "mela"

    # Patches and chunks
    patch_size: int = 8  # P: tokens per patch
    memory_chunk: int = 8  # C: patches per memory update
    text_chunk: int = 64  # W: tokens the decoder sees at once, a multiple of P; C * P need not equal W (assumption)
    memory_tokens: int = 8  # M: memory tokens before each text chunk (assumption: W / P, the chunk before)
    memory: Literal["on", "none"] = "on"  # none: the same decoder with no memory at all, the control

    # Hierarchical memory
    recursion: Literal["hlr", "hrm", "trm", "titans"] = "hlr"  # hrm, trm: output h only; titans: h_module called once
    h_cycles: int = 2  # H: outer cycles
    l_cycles: int = 2  # L: calls of the L-module per outer cycle
    h_blocks: int = 2  # memory blocks in the H-module
    l_blocks: int = 1  # memory blocks in the L-module (trm has none: one module plays both roles)
    fusion: Literal["mlp", "weighted_sum", "none"] = "mlp"  # z from (h, l); none: z = h
    patch_skip: bool = True  # beyond the paper: add a linear map of the patch to the last z

    # Memory block
    attention: bool = True  # attention inside a memory chunk
    heads: int = 4  # its heads (assumption)
    gate: Literal["elementwise", "headwise", "none"] = "elementwise"  # on the attention output (assumption)
    neural_memory: bool = True
    memory_heads: int = 8  # independent memories per block (assumption)
    memory_depth: Literal[1, 2] = 1  # layers of a memory (assumption): 1 is the plain matrix
    memory_expansion: int = 1  # hidden width of a two-layer memory, in head widths (assumption)
    newton_schulz_steps: int = 5  # 0 writes the raw momentum
    retention_init: float = 0.95  # alpha at the start (assumption)
    retention_bound: float = 0.99  # alpha stays below it, so ||M|| stays below 1.2 / (1 - bound) (assumption)
    noop_gate: bool = False  # beyond the paper: a chunk whose loss is below a learned threshold writes nothing

    # Decoder
    decoder_layers: int = 4  # (assumption, like the three below)
    decoder_heads: int = 4
    decoder_kv_heads: int | None = None  # null: one per head
    hidden: int = 344  # inner width of its SwiGLU
    memstack: Literal["add", "learned", "none"] = "add"  # z of cycle a onto the memory tokens after layer a
    memory_view: Literal["previous", "causal"] = "previous"  # causal, beyond the paper: text also sees the states of
    # its own chunk's patches that are complete
    rope_theta: float = 10000.0

    def validate(self) -> None:
        super().validate()
        for name in _COUNTS:
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name}={value} must be at least 1")
        require(
            self.text_chunk % self.patch_size == 0,
            f"text_chunk={self.text_chunk} must be a multiple of patch_size={self.patch_size}",
        )
        require(self.newton_schulz_steps >= 0, f"newton_schulz_steps={self.newton_schulz_steps} must be at least 0")
        require(0 < self.retention_bound < 1, f"retention_bound={self.retention_bound} must be between 0 and 1")
        require(
            0 < self.retention_init < self.retention_bound,
            f"retention_init={self.retention_init} must be between 0 and retention_bound={self.retention_bound}",
        )
        require(self.rope_theta > 0, f"rope_theta={self.rope_theta} must be above 0")
        require(
            self.attention or self.neural_memory,
            "attention=False and neural_memory=False leave the memory blocks empty: set memory=none instead",
        )
        require(
            self.memstack == "none" or self.h_cycles - 1 <= self.decoder_layers,
            f"h_cycles={self.h_cycles} needs h_cycles - 1 <= decoder_layers={self.decoder_layers} when "
            f"memstack={self.memstack}: every cycle but the last feeds one layer",
        )
        require_heads(self.width, self.decoder_heads, self.decoder_kv_heads)
        require_heads(self.width, self.heads)
        require(self.width % self.memory_heads == 0, f"memory_heads={self.memory_heads} must divide width={self.width}")
        require(
            self.memory_depth == 2 or self.memory_expansion == 1,
            f"memory_expansion={self.memory_expansion} needs memory_depth=2",
        )

    @property
    def cycles(self) -> int:
        """Outer cycles that run: the Titans baseline has one."""
        return 1 if self.recursion == "titans" else self.h_cycles

    @property
    def stacked(self) -> int:
        """Outer cycles whose z the decoder reads: the last, and those MemStack adds to its first layers."""
        return 1 if self.memstack == "none" else self.cycles

    @property
    def kv_width(self) -> int:
        """Width of the keys of one token in a decoder layer, over all its heads."""
        return (self.decoder_kv_heads or self.decoder_heads) * (self.width // self.decoder_heads)


_COUNTS = (
    "patch_size",
    "memory_chunk",
    "text_chunk",
    "memory_tokens",
    "h_cycles",
    "l_cycles",
    "h_blocks",
    "l_blocks",
    "heads",
    "memory_heads",
    "memory_expansion",
    "decoder_layers",
    "decoder_heads",
    "decoder_kv_heads",
    "hidden",
)
