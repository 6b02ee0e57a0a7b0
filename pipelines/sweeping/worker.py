"""A worker: a process that takes one run after another until nothing is left to do.

    python -m pipelines.sweeping.worker < settings.json

One process for many runs, because importing the libraries takes longer than a short run. It may be killed at any time;
its run is taken over by another one.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from models.configuration import ConfigError, config_from
from pipelines.config import BusyError, ExecutionConfig, StageError, StoppedError, TrackingConfig
from pipelines.identity import code_digest
from pipelines.sweeping import lease
from pipelines.sweeping.plan import Local, Plan, Task, code_of, modules_of
from pipelines.sweeping.queue import Attempt, Queue, Result
from pipelines.sweeping.search import propose
from pipelines.sweeping.storage import open_storage

if TYPE_CHECKING:
    from pipelines.training import StopSignal

POLL = 1.0  # seconds between looks at a queue where nothing waits
RUN_CELL = "pipelines.sweeping.run_cell:run_cell"


class PrunedError(StoppedError):
    """The run is worse than the sweep's pruner allows."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 0)


@dataclass(frozen=True)
class Job:
    """One taken run, as a runner sees it."""

    plan: Plan
    task: Task
    local: Local
    parent: str | None  # the ledger's run of the whole sweep
    progress: Callable[[str], None]  # told what to show beside the run
    baseline: Callable[[], Result | None]  # the baseline's result of the same seed, if it is finished


Runner = Callable[[Job], Result]


@dataclass(frozen=True)
class Settings:
    """What a worker process is told on its standard input."""

    storage: str
    study: str
    local: Local
    retries: int = 1
    runner: str = RUN_CELL
    stay: bool = False  # go on when the process that started this one ends
    patience: float = lease.PATIENCE

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Settings:
        values = json.loads(text)
        tracking = config_from(TrackingConfig, values["local"]["tracking"])
        execution = config_from(ExecutionConfig, values["local"]["execution"])
        return cls(**values | {"local": Local(tracking, execution)})


class Heart:
    """Beats while a run is held; ends this process in good order when the run, or its launcher, is gone."""

    def __init__(self, queue: Queue, attempt: Attempt, parent: int | None) -> None:
        self.progress = ""
        self._queue, self._attempt, self._parent = queue, attempt, parent
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()

    def _beat(self) -> None:
        beat = 0
        while not self._done.wait(lease.BEAT):
            beat += 1
            orphaned = self._parent is not None and os.getppid() != self._parent
            if orphaned or not self._queue.beat(self._attempt, beat, self.progress):
                os.kill(os.getpid(), signal.SIGTERM)
                return


def work(settings: Settings, stop: StopSignal | None = None) -> None:
    """Take and run until the queue holds nothing open, or `stop` has received a signal.

    Raises:
        StageError: when the code or the data here is not what the sweep was launched with.
        StoppedError: after a signal, the run given back.
    """
    module, _, name = settings.runner.partition(":")
    runner: Runner = getattr(importlib.import_module(module), name)
    queue = Queue(open_storage(settings.storage), settings.study, settings.retries, lease.Watch(settings.patience))
    plan, parent = queue.plan, None if settings.stay else os.getppid()
    while True:
        if stop is not None:
            stop.check()
        queue.tend()
        attempt = queue.take()
        if attempt is not None:
            _run(queue, attempt, plan, queue.task(plan, attempt), settings.local, runner, parent)
        elif plan.sweep.search and (proposal := propose(plan.sweep, queue)):
            name, choices = proposal
            queue.add([(name, 0)], {}, choices)
        elif queue.open():
            time.sleep(POLL)
        else:
            return


def _run(
    queue: Queue, attempt: Attempt, plan: Plan, task: Task, local: Local, runner: Runner, parent: int | None
) -> None:
    """One attempt, told to the queue however it ends."""

    def baseline() -> Result | None:
        attempts = queue.history().get((plan.sweep.baseline_name, task.seed), [])
        return attempts[-1].result if attempts else None

    with Heart(queue, attempt, parent) as heart:

        def progress(text: str) -> None:
            heart.progress = text

        try:
            _require_same_code(plan, task)
            result = runner(Job(plan, task, local, queue.parent(), progress, baseline))
            judged = plan.sweep.measure(plan.sweep.measures[0])
            if judged not in result.values:
                raise StageError(f"{judged} was not measured")
        except PrunedError as error:
            queue.prune(attempt, str(error))
        except (StoppedError, KeyboardInterrupt, SystemExit):
            queue.fail(attempt, "released", "its worker was stopped")
            raise
        except StaleError as error:
            queue.fail(attempt, "released", str(error))
            raise
        except BusyError as error:
            queue.fail(attempt, "released", str(error))
            time.sleep(POLL)
        except ConfigError as error:
            queue.fail(attempt, "refused", str(error))
        except Exception as error:
            reason = str(error) if isinstance(error, StageError) else f"{type(error).__name__}: {error}"
            print(traceback.format_exc(), file=sys.stderr)
            queue.fail(attempt, "error", " ".join(reason.split())[:500], traceback.format_exc())
        else:
            queue.finish(attempt, result, result.values[judged])


class StaleError(StageError):
    """The code or the data here is not what the sweep was launched with."""


def _require_same_code(plan: Plan, task: Task) -> None:
    family = plan.config(task.cell, task.seed).model.family
    stage = plan.sweep.stage
    if not plan.code[family] == code_of(stage, family) == code_digest(modules_of(stage, family)):
        raise StaleError(
            f"the code of {family} changed since {plan.study} was launched: launch the sweep again; "
            "finished cells that the change does not concern are kept"
        )


def main() -> int:
    from pipelines.command import guarded
    from pipelines.training import StopSignal  # Lightning takes seconds to import

    settings = Settings.load(sys.stdin.read())
    with StopSignal().installed() as stop:
        return guarded(lambda: work(settings, stop))


if __name__ == "__main__":
    sys.exit(main())
