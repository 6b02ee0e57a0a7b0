"""What a sweep would cost: every cell with parameters, FLOPs, tokens, memory and hours here, and what is done already.

Special here: hours and memory come from one training step per cell on one sequence, taken on this machine now. A cell
too large for that is estimated from its family's tiny preset, which is pessimistic: large products run faster.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import torch
from rich.console import Console
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from models import build_model
from models.language_model import CausalLM, ModelConfig
from models.presets import preset
from pipelines.config import PipelineConfig
from pipelines.sweeping.display import duration
from pipelines.sweeping.options import Options
from pipelines.sweeping.plan import Local, Plan
from pipelines.sweeping.run_cell import find
from pipelines.tables import count, size, table

LARGEST = 2e11  # FLOPs of a step that is still taken
TINY = {"transformer": "transformer_pp_tiny", "mela": "mela_tiny", "looplm": "looplm_tiny", "melt": "melt_tiny"}
OPTIMIZER_BYTES = 16  # per parameter, fp32: weight, gradient, two moments


@dataclass(frozen=True)
class Step:
    """One training step on one sequence."""

    flops: float
    seconds: float
    saved_bytes: int  # tensors kept for the backward pass


def preview(plan: Plan, local: Local, options: Options) -> None:
    """Print the table; run nothing but the calibration."""
    sweep, rows, total = plan.sweep, [], 0.0
    tasks = plan.tasks(range(sweep.seeds))
    found = find(tasks, local.tracking)
    torch.set_num_threads(local.execution.threads)
    for cell in sweep.cells():
        config = plan.config(cell, 0)
        with torch.device("meta"):
            model = build_model(config.model)
        cost = model.cost(config.pretrain.context)
        flops = cost.total_training_flops * config.pretrain.tokens + evaluation_flops(model, config)
        small = cost.total_training_flops * config.pretrain.context <= LARGEST
        step = calibrate(config.model if small else preset(TINY[config.model.family]), config.pretrain.context)
        done = sum(task.key in found for task in tasks if task.cell.name == cell.name)
        seconds = flops * step.seconds / step.flops
        total += seconds * (sweep.seeds - done)
        sequences = config.pretrain.batch_size // config.pretrain.accumulate
        fixed = cost.total_parameters * OPTIMIZER_BYTES
        memory = size(fixed + sequences * step.saved_bytes) if small else f"over {size(fixed)}"
        rows.append(
            [
                cell.name,
                count(cost.total_parameters),
                count(cost.total_training_flops),
                count(config.pretrain.tokens),
                count(flops),
                memory,
                duration(seconds),
                f"{done} of {sweep.seeds}",
            ]
        )
    columns = ["cell", "parameters", "FLOPs/token", "tokens", "FLOPs", "memory", "per seed", "done"]
    caption = (
        f"FLOPs/token: training, as executed; FLOPs: training and evaluation of one seed. Memory: {OPTIMIZER_BYTES} "
        "bytes per parameter and what one micro-batch keeps for its backward pass, as measured on one sequence. "
        f"Time per seed: FLOPs at the speed of one training step, {local.execution.threads} threads."
    )
    printed = table(sweep.title, columns, rows, caption)
    console = Console(soft_wrap=True)
    console.print(printed.text(), markup=False, highlight=False)
    console.print(caption, style="dim", markup=False, highlight=False)
    print(f"{plan.study}: {duration(total / options.workers)} to go with workers={options.workers}")


def evaluation_flops(model: CausalLM, config: PipelineConfig) -> float:
    """Of scoring every window at every context length; controls, recall and timing are not counted."""
    contexts = config.evaluate.contexts
    tokens = config.evaluate.windows * contexts[-1]
    return sum(model.cost(context).total_forward_flops * tokens for context in contexts)


@cache
def calibrate(config: ModelConfig, context: int) -> Step:
    """Two training steps on one sequence of `context` tokens; the second one counts."""
    model = build_model(config)
    tokens = torch.randint(config.vocab_size, (1, context + 1), generator=torch.Generator().manual_seed(0))
    seen: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = model.training_loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = sum(bytes_ for place, bytes_ in seen.items() if place not in weights)
    started = time.perf_counter()
    model.training_loss(tokens[:, :-1], tokens[:, 1:])[0].backward()
    seconds = time.perf_counter() - started
    return Step(model.cost(context).total_training_flops * context, seconds, saved)
