"""One launch of a sweep: what is missing goes into the queue, workers empty it, the table is written.

A table may come in parts, each of which needs the one before: nuisance values are tuned, the cells run, seeds are added
where a verdict is open, a search proposes.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.addresses import masked
from pipelines.cell_training import CellTraining
from pipelines.cells import flatten
from pipelines.config import StageError
from pipelines.data import TokenData
from pipelines.fairness import choose
from pipelines.sweep_file import TUNING_SEED
from pipelines.sweeping.crew import Crew
from pipelines.sweeping.display import Display
from pipelines.sweeping.finish import collect, finish
from pipelines.sweeping.ledger import open_parent
from pipelines.sweeping.options import Options
from pipelines.sweeping.plan import Local, Plan, Task
from pipelines.sweeping.queue import Queue, Result
from pipelines.sweeping.run_cell import find, local_of
from pipelines.sweeping.search import trials
from pipelines.sweeping.storage import one_line, open_storage
from pipelines.sweeping.worker import RUN_CELL, Settings
from pipelines.verdicts import allocate

TICK = 0.5  # seconds between looks at the queue
Jobs = Callable[[], Sequence[str] | None]


def launch(plan: Plan, local: Local, options: Options, jobs: Jobs | None = None, runner: str = RUN_CELL) -> None:
    """Run what is missing of a plan, and write its table.

    Args:
        jobs: starts workers by other means than processes of this machine, and returns when they are done, with a line
            for each that failed.
        runner: what runs a cell, as `module:function`.
    Raises:
        ConfigError: before any run, when a cell cannot be run.
        StageError: when storage, ledger or data cannot be used, or runs failed: after the others and the table.
    """
    check(plan, local)
    Launch(plan, local, options, jobs, runner).run()


def check(plan: Plan, local: Local) -> None:
    """Refuse, before anything runs, cells that do not fit their data or this machine."""
    opened: dict[str, TokenData] = {}
    for cell in plan.sweep.cells():
        config = plan.config(cell, 0, local)
        folder = config.data.directory
        opened[folder] = opened.get(folder) or TokenData.open(folder, verify=False)
        training_of(plan.sweep.stage)(config, opened[folder]).require_fit()


def training_of(stage: str) -> type[CellTraining]:
    """What the stage calls a training."""
    return getattr(importlib.import_module(f"pipelines.{stage}"), stage.capitalize())


class Launch:
    """The state of `launch`."""

    def __init__(self, plan: Plan, local: Local, options: Options, jobs: Jobs | None, runner: str) -> None:
        self.plan, self.local, self.options, self.jobs = plan, local, options, jobs
        where = options.where(plan.name)
        with one_line(where):
            self.queue = Queue.launch(open_storage(where), plan, options.retries)
        self.settings = Settings(where, plan.study, local, options.retries, runner)
        self.tracking = local_of(plan, plan.task(plan.sweep.cells()[0], 0), local).tracking
        tags = {"table": plan.name, "study": plan.study}
        self.parent = open_parent(self.tracking, plan.study, plan.sweep.title, tags, next(iter(plan.data.values())))
        self.queue.parent(self.parent.run_id)

    def run(self) -> None:
        with self.parent.running():
            self.queue.add([trial.run for trial in trials(self.queue)], {})  # once more those that failed
            self._part(self.plan.tuning_tasks())
            tuning = self._tuned()
            self._part(self.plan.tasks(range(self.plan.sweep.seeds), tuning))
            if self.options.budget_hours is not None:
                self._allocate(tuning, 3600 * self.options.budget_hours)
            finish(self.plan, self.queue, self.tracking, self.parent)

    def _part(self, tasks: Sequence[Task]) -> None:
        """Queue what is missing of `tasks`, and work until nothing is open."""
        if not tasks:  # a search would begin to propose before its baseline is queued
            return
        finished = {(outcome.cell, outcome.seed) for outcome in self.queue.outcomes() if outcome.status == "done"}
        missing = [task for task in tasks if (task.cell.name, task.seed) not in finished]
        found = find(missing, self.tracking)
        with one_line(self.options.where(self.plan.name)):
            self.queue.add(map(_run, missing), {_run(task): found[task.key] for task in missing if task.key in found})
        done = len(tasks) - len(missing) + len(found)
        print(
            f"{self.plan.study}: {len(tasks)} runs, {done} of them done; queue {masked(self.settings.storage)}",
            flush=True,
        )
        self._work()

    def _work(self) -> None:
        """Until nothing is open. Other launches may work on the same queue."""
        if not self.queue.open():
            return
        if self.jobs:
            failures = [*(self.jobs() or ())]
            for failure in failures:
                print(failure, file=sys.stderr, flush=True)
            if left := self.queue.open():
                why = f": {failures[0]}" if failures else ""
                raise StageError(f"the jobs ended, {left} runs are open{why}")
            return
        workers = self.options.workers
        crew = Crew(self.settings, workers, Path("runs/sweeps") / self.queue.name, self.queue.open())
        with Display(self.queue, workers) as display, crew.working():
            while self.queue.open():
                display.update()
                if not crew.tend() and self.queue.open():
                    raise StageError(f"the workers ended, {self.queue.open()} runs are open: see {crew.folder}")
                time.sleep(TICK)
            while crew.tend():
                time.sleep(TICK)

    def _tuned(self) -> dict[str, dict[str, Any]]:
        """The nuisance values of every cell, chosen once."""
        sweep = self.plan.sweep
        if not sweep.tune:
            return {}
        outcomes = [outcome for outcome in self.queue.outcomes() if outcome.seed == TUNING_SEED]
        loss = {outcome.cell: outcome.values.get("validation_loss", np.nan) for outcome in outcomes}
        chosen, grid = {}, flatten(sweep.scale.nuisance or {})
        for cell in self.plan.cells({}):
            tried = sweep.tuning_cells(cell)
            scores = [({path: each.overrides[path] for path in grid}, loss[each.name]) for each in tried]
            if not np.isfinite([score for _, score in scores]).any():
                raise StageError(
                    f"cell {cell.name!r}: no run of its nuisance grid finished; see {masked(self.settings.storage)}"
                )
            chosen[cell.name] = choose(grid, scores)
        return {cell: each["values"] for cell, each in self.queue.tuning(chosen).items()}

    def _allocate(self, tuning: dict[str, dict[str, Any]], budget: float) -> None:
        """Seeds where the verdict is open, cheapest first, look by look, as long as `budget` (seconds) lasts."""
        spent, cells = 0.0, {cell.name: cell for cell in self.plan.cells(tuning)}
        baseline = cells[self.plan.sweep.baseline_name]
        while True:
            ablation = collect(self.plan, self.queue)
            took = {run: _seconds(a[-1].result) for run, a in self.queue.history().items() if a[-1].result}
            wanted: list[Task] = []
            for name, seeds in allocate(ablation.effects(ablation.measures[0]), ablation.rules):
                tasks = [self.plan.task(arm, seed) for seed in range(seeds) for arm in (baseline, cells[name])]
                new = [task for task in tasks if _run(task) not in took and task not in wanted]
                cost = sum(_cost(task.cell.name, took) for task in new)
                if spent + cost <= budget:
                    spent += cost
                    wanted += new
            if not wanted:
                print(f"allocated {spent / 3600:.2f} of {budget / 3600:.2f} hours")
                return
            self._part(wanted)


def _run(task: Task) -> tuple[str, int]:
    return task.cell.name, task.seed


def _seconds(result: Result) -> float:
    """What a run took; of one that another machine ran the training alone, or 0 when even that is not known."""
    speed = result.values.get("tokens_per_second", 0.0)
    return result.seconds or (result.values.get("tokens", 0.0) / speed if speed else 0.0)


def _cost(cell: str, took: Mapping[tuple[str, int], float]) -> float:
    """Seconds to expect of a cell's run: the mean of its own that are known, else of every cell's, else infinite."""
    known = {run: seconds for run, seconds in took.items() if seconds}
    own = [seconds for run, seconds in known.items() if run[0] == cell]
    return float(np.mean(own or list(known.values()))) if known else np.inf
