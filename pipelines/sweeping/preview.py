"""What a sweep would cost: every cell with parameters, FLOPs, tokens, memory and hours here, and what is done already.

Special here: hours and memory come from short training steps per cell on one sequence, taken on this machine now; the
fastest counts, so that a busy moment does not. A cell too large for that is estimated from its family's tiny preset,
which is pessimistic: large products run faster.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from functools import cache

import torch
from rich.console import Console
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from models import build_model
from models.language_model import CausalLM, ModelConfig
from models.looped.distillation import training_flops
from models.looped.looplm import LoopLM, LoopLMConfig
from models.looped.melt import Melt
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
STEPS = 4  # taken for a calibration, after one that warms up


@dataclass(frozen=True)
class Step:
    """One training step on one sequence."""

    flops: float
    seconds: float
    saved_bytes: int  # tensors kept for the backward pass


@dataclass(frozen=True)
class Training:
    """What a stage computes for one cell and seed."""

    context: int  # tokens of a sequence
    sequences: int  # of a micro-batch
    tokens: int
    flops_per_token: float
    weight_bytes: int  # and what belongs to them, for as long as it trains


def preview(plan: Plan, local: Local, options: Options) -> None:
    """Print the table; run nothing but the calibration."""
    sweep, rows, total, tuned, searched = plan.sweep, [], 0.0, 0.0, 0.0
    tasks, tuning = plan.tasks(range(sweep.seeds)), plan.tuning_tasks()
    found = find([*tasks, *tuning], local.tracking)
    to_tune = {task.cell.name for task in tuning if task.key not in found}
    torch.set_num_threads(local.execution.threads)
    for cell in sweep.cells():
        config = plan.config(cell, 0)
        with torch.device("meta"):
            model = build_model(config.model)
        training = training_of(sweep.stage, model, config)
        flops = training.flops_per_token * training.tokens + evaluation_flops(model, config)
        small = model.cost(training.context).total_training_flops * training.context <= LARGEST
        step = calibrate(config.model if small else preset(TINY[config.model.family]), training.context)
        done = sum(task.key in found for task in tasks if task.cell.name == cell.name)
        seconds = flops * step.seconds / step.flops
        total += seconds * (sweep.seeds - done)
        if sweep.tune:
            tuned += seconds * len(to_tune & {tried.name for tried in sweep.tuning_cells(cell)})
        if cell.name == sweep.baseline_name:
            searched = seconds * (sweep.n_trials or 0)
        kept = training.sequences * step.saved_bytes
        memory = size(training.weight_bytes + kept) if small else f"over {size(training.weight_bytes)}"
        rows.append(
            [
                cell.name,
                count(model.cost(training.context).total_parameters),
                count(training.flops_per_token),
                count(training.tokens),
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
        f"Time per seed: FLOPs at the speed of a training step, {local.execution.threads} threads."
    )
    printed = table(sweep.title, columns, rows, caption)
    console = Console(soft_wrap=True)
    console.print(printed.text(), markup=False, highlight=False)
    console.print(caption, style="dim", markup=False, highlight=False)
    if tuning:
        print(f"tuning: {len(tuning)} more runs, {len(tuning) - len(to_tune)} of them done: {duration(tuned)} to go")
    if sweep.n_trials:
        print(f"search: at most {sweep.n_trials} trials, each as long as the baseline: {duration(searched)}")
    total += tuned + searched
    print(f"{plan.study}: {duration(total / options.workers)} to go with workers={options.workers}")


def training_of(stage: str, model: CausalLM, config: PipelineConfig) -> Training:
    """What `stage` computes for `model`, which may be on the meta device; a teacher has the shape of its student."""
    section = getattr(config, stage)
    sequences, weights = section.batch_size // section.accumulate, OPTIMIZER_BYTES * _parameters(model)
    if stage == "pretrain":
        flops = model.cost(section.context).total_training_flops
        return Training(section.context, sequences, section.tokens, flops, weights)
    assert isinstance(model, Melt)
    shape = {field.name: getattr(model.config, field.name) for field in fields(LoopLMConfig)}
    with torch.device("meta"):
        teacher = LoopLM(LoopLMConfig(**shape))
    tokens = section.steps * section.batch_size * section.context
    flops = training_flops(model, teacher, section.context, section.every_loop)
    return Training(section.context, sequences, tokens, flops, weights + 4 * _parameters(teacher))


def evaluation_flops(model: CausalLM, config: PipelineConfig) -> float:
    """Of scoring every window at every context length, under the controls only the piece that ends a window.

    Recall, timing and the one document that is streamed are not counted.
    """
    windows, contexts = config.evaluate.windows, config.evaluate.contexts
    controls = len(model.controls) - 1 if config.evaluate.controls else 0
    tokens = {context: windows * (contexts[-1] + controls * context) for context in contexts}
    return sum(model.cost(context).total_forward_flops * tokens[context] for context in contexts)


@cache
def calibrate(config: ModelConfig, context: int) -> Step:
    """Training steps on one sequence of `context` tokens, the fastest of them."""
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
    seconds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        model.training_loss(tokens[:, :-1], tokens[:, 1:])[0].backward()
        seconds.append(time.perf_counter() - started)
    return Step(model.cost(context).total_training_flops * context, min(seconds), saved)


def _parameters(model: CausalLM) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
