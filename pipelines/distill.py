"""Stage `distill`: a MELT student from a LoopLM teacher, in the two phases of the paper.

    python -m pipelines.distill teacher=artifacts/looplm_tiny model=melt_tiny output=artifacts/melt_tiny

The teacher is a folder that `pretrain` or `import_ouro` wrote. Writes what `pretrain` writes and `gates.csv`, the
distribution of gate values by loop and layer. Stopped and started again it goes on where it was; see `cell_training`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from models import build_model
from models.configuration import require
from models.looped.distillation import gate_histograms, require_pair, start_from, training_flops
from models.looped.looplm import LoopLM
from models.looped.melt import Melt, MeltConfig
from models.serialization import WEIGHTS
from pipelines.cell_training import CellTraining, train_cell
from pipelines.config import PipelineConfig
from pipelines.data import TokenData
from pipelines.files import sha256_file
from pipelines.model_folder import load_as, require_tokenizer
from pipelines.role import ALONE, Role

if TYPE_CHECKING:
    from models.lightning.training import Training

BINS = 20  # of the gate values, between 0 and 1
SAMPLE = 8  # held-out windows whose gate values are counted


class Distill(CellTraining):
    """Two phases from the teacher's weights; the seed draws the memory gates and the order of the data."""

    stage = "distill"

    @cached_property
    def teacher(self) -> LoopLM:
        """The teacher, on the CPU until it trains."""
        return load_as(LoopLM, "teacher", self.config.teacher)

    @cached_property
    def teacher_weights(self) -> str:
        """The SHA-256 of the teacher's weights: says which teacher it was, wherever its folder is."""
        return sha256_file(Path(self.config.teacher) / WEIGHTS)

    def require_fit(self) -> None:
        model, distill = self.config.model, self.config.distill
        require(isinstance(model, MeltConfig), f"model={self.config.model_name} is a {model.family}, not a melt")
        assert isinstance(model, MeltConfig)
        alone = distill.phase2_steps == 0 or distill.alignment == 0
        one_by_one = distill.every_loop or (distill.interpolation and distill.phase1_steps > 0) or not alone
        require_pair(model, self.teacher.config, one_by_one)
        require_tokenizer("teacher", self.config.teacher, self.data)
        require(
            model.chunk is None or model.chunk <= distill.context,
            f"model.chunk={model.chunk} must be at most distill.context={distill.context}; null trains without chunks",
        )
        require(
            self.config.execution.strategy != "fsdp",
            "execution.strategy=fsdp is not for distill, whose chunks call the model many times per step; use ddp",
        )
        super().require_fit()

    def science(self) -> dict[str, Any]:
        return {"teacher": {"weights": self.teacher_weights, "config": asdict(self.teacher.config)}}

    def families(self) -> list[str]:
        return ["melt", "looplm"]

    def module(self, first_step: int) -> Training:
        from models.lightning.distillation import Distillation, DistillationRecipe

        config = self.config
        student = build_model(config.model, config.seed)
        assert isinstance(student, Melt)
        start_from(student, self.teacher)
        student.recompute = config.execution.recompute
        names = [field.name for field in fields(DistillationRecipe)]
        recipe = DistillationRecipe(**{name: getattr(config.distill, name) for name in names})
        return Distillation(student, self.teacher, recipe, first_step)

    def flops_per_token(self) -> float:
        with torch.device("meta"):
            student = build_model(self.config.model)
        assert isinstance(student, Melt)
        return training_flops(student, self.teacher, self.config.distill.context, self.config.distill.every_loop)

    @torch.no_grad()
    def measures(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """Whose student it is, and what its held-out loss is to be compared with."""
        windows = self._held_out()
        losses = [self.teacher.cross_entropy(row[:, :-1], row[:, 1:]) for row in windows.split(1)]
        return {
            "teacher": str(self.config.teacher),
            "teacher_weights": self.teacher_weights,
            "teacher_validation_loss": float(torch.stack(losses).mean()),
        }

    def files(self, weights: Mapping[str, Tensor]) -> dict[str, str]:
        """The distribution of the gate values on held-out text."""
        windows = self._held_out()[:SAMPLE]
        with torch.device("meta"):
            student = build_model(self.config.model)
        assert isinstance(student, Melt)
        student.load_state_dict(weights, assign=True)
        histograms = gate_histograms(student.to(windows.device), windows[:, :-1], BINS)
        rows = [
            f"{loop},{layer},{i / BINS:g},{(i + 1) / BINS:g},{share:.6f}"
            for loop, layers in enumerate(histograms.tolist(), start=2)
            for layer, shares in enumerate(layers, start=1)
            for i, share in enumerate(shares)
        ]
        return {"gates.csv": "\n".join(["loop,layer,from,to,share", *rows, ""])}

    def _held_out(self) -> Tensor:
        """The validation windows `[R, T + 1]`, where the teacher is."""
        section = self.config.distill
        windows = self.data.held_out_windows(section.context, section.validation_tokens)
        return windows.to(self.teacher.head.weight.device)


def run(config: PipelineConfig, role: Role = ALONE) -> dict[str, Any] | None:
    """Distill the model `config.model` from `config.teacher` and export it; returns what `metrics.json` holds.

    Raises as `train_cell` does, and:
        ConfigError: when there is no such teacher, or it and the student do not match.
        StageError: when the teacher's files were altered.
    """
    torch.set_num_threads(config.execution.threads)
    return train_cell(Distill(config, TokenData.open(config.data.directory)), role)


if __name__ == "__main__":
    from pipelines.command import main

    main(run)
