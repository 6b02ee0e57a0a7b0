"""One launch of a sweep: fill the queue, keep workers busy until it is empty, then write the table."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelines.config import StageError
from pipelines.data import TokenData
from pipelines.pretrain import require_fit
from pipelines.sweeping.crew import Crew
from pipelines.sweeping.display import Display
from pipelines.sweeping.ledger import open_parent
from pipelines.sweeping.options import Options
from pipelines.sweeping.plan import Local, Plan, Task
from pipelines.sweeping.queue import Queue
from pipelines.sweeping.run_cell import find, local_of
from pipelines.sweeping.storage import one_line, open_storage
from pipelines.sweeping.worker import Settings

TICK = 0.5  # seconds between looks at the queue


def launch(plan: Plan, local: Local, options: Options, jobs: Callable[[], Any] | None = None) -> None:
    """Run what is missing of a plan, and write its table.

    Args:
        jobs: starts workers by other means than processes of this machine, and returns when they are done.
    Raises:
        ConfigError: before any run, when a cell cannot be run.
        StageError: when storage, ledger or data cannot be used, or runs failed: after the others and the table.
    """
    where, sweep = options.where(plan.name), plan.sweep
    check(plan)
    tasks = plan.tasks(range(sweep.seeds))
    with one_line(where):
        queue = Queue.launch(open_storage(where), plan, options.retries)
        finished = {(outcome.cell, outcome.seed) for outcome in queue.outcomes() if outcome.status == "done"}
        missing = [task for task in tasks if (task.cell.name, task.seed) not in finished]
        tracking = local_of(plan, tasks[0], local).tracking
        tags = {"table": plan.name, "study": plan.study, "title": sweep.title}
        parent = open_parent(tracking, plan.study, sweep.title, tags, next(iter(plan.data.values())))
        queue.parent(parent.run_id)
        found = find(missing, tracking)
        queue.add([_run(task) for task in missing], {_run(t): found[t.key] for t in missing if t.key in found})
        before = len(tasks) - len(missing) + len(found)
        print(f"{plan.study}: {len(tasks)} runs, {before} of them done before; queue {where}")
        _work(queue, Settings(where, plan.study, local, options.retries), options.workers, jobs)
    from pipelines.sweeping.finish import finish

    finish(plan, queue, local, options)


def check(plan: Plan) -> None:
    """Refuse, before anything runs, cells that do not fit their data or this machine."""
    opened: dict[str, TokenData] = {}
    for cell in plan.sweep.cells():
        config = plan.config(cell, 0)
        folder = config.data.directory
        opened[folder] = opened.get(folder) or TokenData.open(folder, verify=False)
        require_fit(config, opened[folder])


def _work(queue: Queue, settings: Settings, workers: int, jobs: Callable[[], Any] | None) -> None:
    """Until nothing is open. Processes of other launches may be at work on the same queue."""
    if not queue.open():
        return
    if jobs:
        jobs()
        return
    crew = Crew(settings, min(workers, queue.open()), Path("runs/sweeps") / queue.name)
    with Display(queue, workers) as display, crew.working():
        while queue.open():
            display.update()
            if not crew.tend() and queue.open():
                raise StageError(f"the workers ended, {queue.open()} runs are open: see {crew.folder}")
            time.sleep(TICK)
        while crew.tend():
            time.sleep(TICK)


def _run(task: Task) -> tuple[str, int]:
    return task.cell.name, task.seed
