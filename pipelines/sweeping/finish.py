"""The end of a launch: the table in the terminal, in its folder and in the ledger; failures told by the exit code."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

from mlflow.entities import RunTag
from rich.console import Console

from pipelines.config import StageError, TrackingConfig
from pipelines.ledger import Run, connect, one_line, open_run
from pipelines.sweeping import pages
from pipelines.sweeping.ablation import Ablation
from pipelines.sweeping.ledger import CELL_KEY, entry_of
from pipelines.sweeping.plan import Plan
from pipelines.sweeping.queue import Queue
from pipelines.sweeping.run_cell import tags
from pipelines.sweeping.search import trials

MOST_NAMED = 5  # failed runs named in the last line
BATCH = 100  # tags in one request to the ledger, at most


def collect(plan: Plan, queue: Queue) -> Ablation:
    """What the queue knows, as a table's data. Seeds of earlier, larger launches count, too."""
    proposed = {attempt.cell: attempt.choices or {} for attempt in trials(queue)}
    cells = {cell.name for cell in plan.sweep.cells()} | set(proposed)
    outcomes = [each for each in queue.outcomes() if each.cell in cells]
    seeds = sorted({*range(plan.sweep.seeds), *(outcome.seed for outcome in outcomes)})
    ended = all(outcome.status in ("done", "failed", "pruned") for outcome in outcomes)  # others get their verdicts
    judged = plan.sweep.verdicts is not None and ended
    return Ablation(
        name=plan.name,
        study=plan.study,
        values=plan.values,
        seeds=tuple(seeds),
        looks=queue.looks(len(seeds) if judged else None),
        outcomes=tuple(sorted(outcomes, key=lambda outcome: (outcome.cell, outcome.seed))),
        curves={
            f"{cell} · seed {seed}": result.curve
            for (cell, seed), attempts in sorted(queue.history().items())
            if (result := attempts[-1].result) and cell in cells
        },
        tuning=queue.tuning(),
        trials=proposed,
    )


def finish(plan: Plan, queue: Queue, tracking: TrackingConfig, parent: Run) -> None:
    """Write, show and record the table; `parent` is the ledger's run of the whole sweep.

    Raises:
        StageError: when runs failed, naming them.
    """
    ablation = collect(plan, queue)
    page = pages.write(ablation, pages.ABLATIONS / plan.name)
    _print(ablation)
    _record(ablation, tracking, parent, page.parent)
    _refer(plan, ablation, tracking, parent.run_id)
    print(page)
    failed = ablation.failed
    if failed:
        named = [f"{each.cell} · seed {each.seed} ({each.reason})" for each in failed[:MOST_NAMED]]
        more = f" and {len(failed) - MOST_NAMED} more" if len(failed) > MOST_NAMED else ""
        raise StageError(f"{len(failed)} of {len(ablation.outcomes)} runs failed: {'; '.join(named)}{more}")
    parent.finish()


def _print(ablation: Ablation) -> None:
    console = Console(soft_wrap=True)
    for table in [
        ablation.effects_table() if ablation.sweep.verdicts else ablation.measures_table(),
        *([ablation.claims_table()] if ablation.judgements else []),
    ]:
        console.print(table.text(), markup=False, highlight=False)
        console.print(table.caption, style="dim", markup=False, highlight=False)


def _record(ablation: Ablation, tracking: TrackingConfig, parent: Run, folder: Path) -> None:
    """Mean, interval and verdict of every cell as metrics and tags of the parent run, the table as its artifact."""
    metrics, verdicts = {}, []
    for effect in ablation.effects(ablation.measures[0]):
        name = "".join(c if c.isalnum() or c in "-._" else "_" for c in effect.cell)
        numbers = {"mean": effect.mean, "difference": effect.difference, "low": effect.low, "high": effect.high}
        metrics |= {f"{kind}/{name}": value for kind, value in numbers.items() if isfinite(value)}
        verdicts.append(RunTag(f"verdict.{name}"[:250], effect.text))
    parent.record([(0, metrics)], correct=True)
    client, _ = connect(tracking)
    with one_line("write to", tracking.uri):
        for start in range(0, len(verdicts), BATCH):
            client.log_batch(parent.run_id, tags=verdicts[start : start + BATCH])
        client.log_artifacts(parent.run_id, str(folder), "table")


def _refer(plan: Plan, ablation: Ablation, tracking: TrackingConfig, parent: str) -> None:
    """A child run for each result that lies in another table's experiment, so that this one is whole, too."""
    _, experiment = connect(tracking)
    cells = {cell.name: cell for cell in plan.sweep.cells()}
    for outcome in ablation.outcomes:
        entry = entry_of(tracking, outcome.provenance["run_id"]) if outcome.status == "done" else None
        if entry is None or entry.info.experiment_id == experiment.experiment_id:
            continue
        choices = ablation.trials.get(outcome.cell)
        task = plan.trial_task(outcome.cell, choices) if choices else plan.task(cells[outcome.cell], outcome.seed)
        named = {name: value for name, value in tags(plan, task, parent).items() if name != CELL_KEY}
        data = {"name": "tokens", "digest": outcome.provenance["data_digest"]}
        told = {**named, "seed": str(outcome.seed), "measured.by": entry.info.run_id}
        run = open_run(tracking, f"{plan.study}/{task.key}", task.label, told, entry.data.params, data)
        with run.running():
            run.record([(0, outcome.values)])
            run.finish()
