"""One run of a sweep, in this process: train unless it is trained, evaluate unless it is evaluated, remember.

    runs/cells/<first 16 of the key>/    cell.json (written last), loss.csv and the files of the evaluation

A finished run is found there, or in the ledger when another machine ran it. A cell that two tables share is trained
once; each of its evaluations is one run of the ledger, the first of them the training's own.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock, Timeout

from models.configuration import ConfigError
from pipelines.cells import ROW, flatten
from pipelines.config import BusyError, PipelineConfig, StageError, TrackingConfig
from pipelines.files import write_json
from pipelines.role import Role
from pipelines.sweeping.ledger import CELL_CODE, CELL_KEY, finished_runs, mark_finished, own_run
from pipelines.sweeping.plan import Local, Plan, Task, data_digest, teacher_digest
from pipelines.sweeping.queue import Result
from pipelines.sweeping.worker import Job, PrunedError, StaleError

CELLS = Path("runs/cells")
FILE = "cell.json"
PROVENANCE = ("run_id", "commit", "dirty", "data_digest", "fingerprint", "family", "code")  # code of both stages
TRAINED = ("parameters", "tokens", "tokens_per_second", "training_flops_per_token", "train_loss", "validation_loss")


def run_cell(job: Job) -> Result:
    """Train and evaluate a run, or find it finished.

    Raises:
        BusyError: when another process is at it.
        PrunedError: when its held-out loss is worse than the pruner allows.
        StaleError: when the data or the teacher here is not what the run is known by.
        ConfigError, StageError: as the stages raise them.
    """
    folder = CELLS / job.task.key[:16]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "lock", blocking=False):
            return find([job.task], job.local.tracking).get(job.task.key) or _run(job, folder)
    except Timeout:
        raise BusyError(f"another process is at this run ({folder})") from None


def find(tasks: Sequence[Task], tracking: TrackingConfig) -> dict[str, Result]:
    """By key, the results of runs that are finished already: here or, as the ledger says, elsewhere."""
    found = {}
    for task in tasks:
        file = CELLS / task.key[:16] / FILE
        if file.is_file():
            kept = json.loads(file.read_text("utf-8"))
            if kept["key"] == task.key:
                found[task.key] = Result(**kept["result"] | {"cached": True})
    others = [task.key for task in tasks if task.key not in found]
    ledger = finished_runs(tracking, others[0] if len(others) == 1 else None) if others else {}
    return found | {key: Result(*ledger[key], cached=True) for key in others if key in ledger}


def tags(plan: Plan, task: Task, parent: str | None) -> dict[str, str]:
    """What the ledger's runs of a table are filtered and grouped by."""
    family = plan.config(task.cell, task.seed).model.family
    levels = {name: str(level) for name, level in task.cell.levels.items()}
    places = [level if name == ROW else f"{name}={level}" for name, level in levels.items()]
    return {
        "table": plan.name,
        "study": plan.study,
        "cell": task.cell.name,
        "row": places[0] if places else task.cell.name,
        "column": places[1] if len(places) > 1 else "",
        "baseline": str(task.cell.name == plan.sweep.baseline_name).lower(),
        CELL_KEY: task.key,
        CELL_CODE: plan.code[family],
        **({"mlflow.parentRunId": parent} if parent else {}),
        **{f"level.{name}": level for name, level in levels.items()},
    }


def local_of(plan: Plan, task: Task, local: Local) -> Local:
    """This machine's settings for a run: the ledger's experiment is the table, and a repetition trains apart."""
    execution = local.execution
    if task.cell.replicate:
        execution = replace(execution, checkpoints=f"{execution.checkpoints}/replicate-{task.cell.replicate}")
    return Local(replace(local.tracking, experiment=plan.name), execution)


def _run(job: Job, folder: Path) -> Result:
    from pipelines import evaluate

    plan, task = job.plan, job.task
    config = plan.config(task.cell, task.seed, local_of(plan, task, job.local))
    _require_same_data(plan, config)
    model = folder / "model"
    role = Role(f"{task.cell.name} seed {task.seed}", tags(plan, task, job.parent), _validated(job, config))
    stage = importlib.import_module(f"pipelines.{plan.sweep.stage}")
    training = stage.run(replace(config, output=str(model)), role)
    run_id = own_run(config.tracking, task.key, role, training)
    write_json(model / evaluate.METRICS, training | {"run_id": run_id})  # the evaluation is logged to this run
    job.progress("evaluating")
    evaluation = evaluate.run(replace(config, checkpoint=str(model), output=str(folder)))
    values = evaluate.logged(evaluation) | {name: float(training[name]) for name in TRAINED}
    shutil.copyfile(model / "loss.csv", folder / "loss.csv")
    source = training | {"run_id": run_id, "code": plan.code[config.model.family]}
    result = Result(
        values=values | _timing(evaluation["timing"]),
        provenance={name: str(source[name]) for name in PROVENANCE},
        curve=_curve(model / "loss.csv"),
        seconds=training["seconds"] + evaluation["timing"]["seconds"],
    )
    mark_finished(config.tracking, run_id, result.values)
    write_json(folder / FILE, {"key": task.key, "table": plan.name, "label": task.label, "result": asdict(result)})
    shutil.rmtree(model)  # its weights stay with the checkpoints
    return result


def _require_same_data(plan: Plan, config: PipelineConfig) -> None:
    """Files may have been replaced since the launch, and another machine may have had others all along."""
    read = {"data.directory": (config.data.directory, data_digest)}
    if plan.sweep.stage == "distill":
        read["teacher"] = config.teacher, teacher_digest
    for field, (folder, digest_of) in read.items():
        try:
            here = digest_of(folder)
        except (ConfigError, StageError) as error:
            raise StaleError(f"{plan.study} cannot be run here: {error}") from None
        if here != plan.data[folder]:
            raise StaleError(
                f"{field}={folder} holds {here[:8]}, {plan.study} was launched with {plan.data[folder][:8]}: "
                "put that back, or launch the sweep again"
            )


def _validated(job: Job, config: PipelineConfig) -> Any:
    """What to do at a held-out loss: show it, and stop the run when the pruner says so."""
    pruner, steps = job.plan.sweep.pruner, getattr(config, job.plan.sweep.stage).steps
    reference: dict[int, float] = {}

    def validated(step: int, loss: float) -> None:
        job.progress(f"step {step:,} of {steps:,}, loss {loss:.3f}")
        if pruner is None or step < pruner.after * steps:
            return
        if not reference and (baseline := job.baseline()):
            reference.update({int(at): value for at, _, value in baseline.curve})
        if loss > reference.get(step, float("inf")) + pruner.margin:
            raise PrunedError(f"at step {step:,}: {loss:.3f}, the baseline had {reference[step]:.3f}")

    return validated


def _curve(file: Path) -> list[list[float]]:
    rows = pd.read_csv(file).dropna(subset="validation_loss")
    return rows[["step", "tokens", "validation_loss"]].values.tolist()


def _timing(timing: Mapping[str, Any]) -> dict[str, float]:
    """Speeds by the ledger's names; they are never the same twice."""
    speeds = {name: value for name, value in timing.items() if name != "seconds"}
    return {name.replace(".", "/"): float(value) for name, value in flatten(speeds).items()}
