"""Stage `pretrain`: train one model on the token data and export it.

    python -m pipelines.pretrain model=mela_tiny model.h_cycles=2 seed=1 output=artifacts/mela_tiny

Writes, in `output`, `model.safetensors` and `config.json` (the model), the tokenizer's file, `loss.csv` and, last,
`metrics.json`. Stopped and started again it goes on where it was; see `cell_training`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from models import build_model
from models.configuration import require
from models.language_model import CausalLM
from pipelines.cell_training import CellTraining, train_cell
from pipelines.config import PipelineConfig
from pipelines.data import TokenData
from pipelines.role import ALONE, Role

if TYPE_CHECKING:
    from models.lightning.training import Training


class Pretrain(CellTraining):
    """Next-token training from the weights of a seed."""

    stage = "pretrain"

    def module(self, first_step: int) -> Training:
        from models.lightning.pretraining import Pretraining, Recipe

        config = self.config
        recipe = Recipe(**{field.name: getattr(config.pretrain, field.name) for field in fields(Recipe)})
        return Pretraining(build_model(config.model, config.seed), recipe, first_step, config.execution.compile)

    def flops_per_token(self) -> float:
        return self._on_meta().cost(self.config.pretrain.context).total_training_flops

    def require_fit(self) -> None:
        super().require_fit()
        context = self.config.pretrain.context
        unused = self._on_meta().unused(context)
        require(unused is None, f"pretrain.context={context} {unused}")
        require(
            (self.config.execution.strategy, self.config.pretrain.optimizer) != ("fsdp", "muon"),
            "execution.strategy=fsdp cuts the matrices that pretrain.optimizer=muon needs whole; use adamw or ddp",
        )

    def _on_meta(self) -> CausalLM:
        with torch.device("meta"):
            return build_model(self.config.model)


def run(config: PipelineConfig, role: Role = ALONE) -> dict[str, Any] | None:
    """Train the model `config.model` and export it; returns what `metrics.json` holds. Raises as `train_cell` does."""
    torch.set_num_threads(config.execution.threads)
    return train_cell(Pretrain(config, TokenData.open(config.data.directory)), role)


if __name__ == "__main__":
    from pipelines.command import main

    main(run)
