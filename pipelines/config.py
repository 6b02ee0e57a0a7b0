"""The typed configuration: `params.yaml` as frozen dataclasses, checked once at the edge.

Every section mirrors the section of the same name in `params.yaml`, where each field is explained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from models.configuration import Config, require
from models.language_model import ModelConfig


class StageError(RuntimeError):
    """A stage cannot go on (altered shard, NaN loss, full disk): one line that says what happened and what is kept."""

    exit_code = 1


class BusyError(StageError):
    """Another process is at the same work."""


class StoppedError(StageError):
    """A signal asked the stage to stop, and it did so in good order."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal


@dataclass(frozen=True)
class DataConfig(Config):
    corpus: Literal["service_docs", "files", "huggingface"]
    paths: tuple[str, ...]
    field: str
    dataset: str
    subset: str | None
    documents: int | None
    tokenizer: str
    vocab_size: int
    held_out: float
    shard_tokens: int
    directory: str

    def validate(self) -> None:
        require(0 < self.held_out < 1, f"held_out={self.held_out} must be between 0 and 1")
        require(self.shard_tokens >= 1, f"shard_tokens={self.shard_tokens} must be at least 1")
        require(self.documents is None or self.documents >= 2, f"documents={self.documents} must be null or at least 2")
        require(self.corpus != "files" or bool(self.paths), "paths=[] must name at least one glob when corpus=files")
        require(self.vocab_size >= 257, f"vocab_size={self.vocab_size} must be at least 257 (256 bytes, one separator)")


@dataclass(frozen=True)
class PretrainConfig(Config):
    context: int
    batch_size: int
    tokens: int
    accumulate: int
    optimizer: Literal["adamw", "muon"]
    lr: float
    muon_lr: float
    betas: tuple[float, ...]
    weight_decay: float
    clip: float
    warmup: float
    final_lr: float
    log_every: int
    validate_every: int
    validation_tokens: int
    checkpoint_every: int

    @property
    def steps(self) -> int:
        """Optimizer steps the token budget pays for."""
        return self.tokens // (self.context * self.batch_size)

    def validate(self) -> None:
        _require_training(self)
        require(self.muon_lr > 0, f"muon_lr={self.muon_lr} must be above 0")
        require(
            self.steps >= 1,
            f"tokens={self.tokens} must pay for one step of batch_size * context = {self.batch_size * self.context}",
        )


@dataclass(frozen=True)
class DistillConfig(Config):
    context: int
    batch_size: int
    accumulate: int
    phase1_steps: int
    phase2_steps: int
    interpolation: bool
    every_loop: bool
    alignment: float
    lr: float
    gate_lr: float
    betas: tuple[float, ...]
    weight_decay: float
    clip: float
    warmup: float
    final_lr: float
    log_every: int
    validate_every: int
    validation_tokens: int
    checkpoint_every: int

    @property
    def steps(self) -> int:
        """Optimizer steps of both phases."""
        return self.phase1_steps + self.phase2_steps

    def validate(self) -> None:
        _require_training(self)
        for name in ("phase1_steps", "phase2_steps", "alignment"):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must be at least 0")
        require(self.gate_lr > 0, f"gate_lr={self.gate_lr} must be above 0")
        require(self.steps >= 1, "phase1_steps=0 and phase2_steps=0 leave nothing to do")


@dataclass(frozen=True)
class EvaluateConfig(Config):
    contexts: tuple[int, ...]
    score_tokens: int
    windows: int
    controls: bool
    recall: bool
    timing: bool

    def validate(self) -> None:
        require(
            bool(self.contexts) and list(self.contexts) == sorted(set(self.contexts)) and self.contexts[0] > 0,
            f"contexts={list(self.contexts)} must be increasing lengths of at least 1",
        )
        require(
            0 < self.score_tokens <= self.contexts[0],
            f"score_tokens={self.score_tokens} must be in 1..{self.contexts[0]} (the shortest context)",
        )
        require(
            all(self.contexts[-1] % n == 0 for n in self.contexts),
            f"contexts={list(self.contexts)} must all divide the longest, so that windows hold the same text",
        )
        require(self.windows >= 1, f"windows={self.windows} must be at least 1")


def _require_training(section: PretrainConfig | DistillConfig) -> None:
    """What every training asks of its section."""
    for name in ("context", "batch_size", "accumulate", "log_every", "validate_every", "checkpoint_every"):
        require(getattr(section, name) >= 1, f"{name}={getattr(section, name)} must be at least 1")
    for name in ("lr", "clip"):
        require(getattr(section, name) > 0, f"{name}={getattr(section, name)} must be above 0")
    for name in ("warmup", "final_lr"):
        require(0 <= getattr(section, name) <= 1, f"{name}={getattr(section, name)} must be in [0, 1]")
    require(section.weight_decay >= 0, f"weight_decay={section.weight_decay} must be at least 0")
    require(
        len(section.betas) == 2 and all(0 <= beta < 1 for beta in section.betas),
        f"betas={list(section.betas)} must hold two numbers in [0, 1)",
    )
    require(
        section.batch_size % section.accumulate == 0,
        f"accumulate={section.accumulate} must divide batch_size={section.batch_size}",
    )
    require(
        section.validation_tokens >= section.context,
        f"validation_tokens={section.validation_tokens} must be at least context={section.context}",
    )


@dataclass(frozen=True)
class TrackingConfig(Config):
    uri: str
    experiment: str


@dataclass(frozen=True)
class ExecutionConfig(Config):
    accelerator: Literal["auto", "cpu", "gpu"]
    devices: int
    nodes: int
    strategy: Literal["auto", "ddp", "fsdp"]
    precision: Literal["auto", "32-true", "bf16-mixed"]
    threads: int
    workers: int
    compile: bool
    recompute: bool
    checkpoints: str
    rerun: bool

    @property
    def resolved_precision(self) -> Literal["32-true", "bf16-mixed"]:
        """What `auto` means here: bf16-mixed on a GPU that has it, else fp32 (bf16 is ten times slower on a CPU)."""
        if self.precision != "auto":
            return self.precision
        gpu = self.accelerator != "cpu" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        return "bf16-mixed" if gpu else "32-true"

    def validate(self) -> None:
        for name in ("devices", "nodes", "threads", "workers"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True)
class PipelineConfig(Config):
    """Everything a stage may read.

    `model_name` is the preset of `model`; `models` and `students` are what `dvc repro` pretrains and distills.
    """

    seed: int
    output: str | None
    checkpoint: str | None
    teacher: str
    model_name: str
    model: ModelConfig
    models: dict[str, ModelConfig]
    students: dict[str, ModelConfig]
    data: DataConfig
    pretrain: PretrainConfig
    distill: DistillConfig
    evaluate: EvaluateConfig
    tracking: TrackingConfig
    execution: ExecutionConfig

    def validate(self) -> None:
        require(0 <= self.seed < 2**63, f"seed={self.seed} must be at least 0 and below 2**63")
        twice = sorted(self.models.keys() & self.students.keys())
        require(
            not twice, f"{', '.join(twice)}: in models and in students; a model is pretrained or distilled, not both"
        )
        for name, student in self.students.items():
            require(student.family == "melt", f"students.{name} is a {student.family}; only a melt is distilled")
