"""The queue of a sweep: Optuna trials that any number of processes, on any machines, work off together.

A trial is one *attempt* at a run (a cell with a seed). The only lock is the storage's: taking a trial is its atomic
step from waiting to running. What would need a second lock is made harmless instead:
- attempts are numbered, and of two trials for the same attempt the one with the lower number counts. So everybody may
  launch a sweep, and everybody may replace a dead worker's attempt, at the same moment;
- whether a run is tried again follows from its record alone, so a process killed between two steps leaves nothing open.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from models.configuration import ConfigError
from pipelines.fairness import Choice
from pipelines.outcomes import Outcome, Status
from pipelines.sweep_file import TUNING_SEED
from pipelines.sweeping.lease import Watch, mine
from pipelines.sweeping.plan import Plan, Task

LIVES = 5  # processes that may die over a run before it counts as failed: out of memory, most likely
# attributes of a study
PLAN, SWEEP, LOOKS, PARENT, TUNING = "plan", "sweep", "looks", "parent", "tuning"
LAUNCHED, TRIALS = "launched", "trials"  # when, in seconds since 1970, and how many runs of a search: the last launch's

STATUS: dict[TrialState, Status] = {
    TrialState.WAITING: "queued",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "done",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
Ending = Literal["error", "refused", "died", "released", "duplicate"]  # why an attempt failed


@dataclass(frozen=True)
class Result:
    """What a finished run measured."""

    values: Mapping[str, float]
    provenance: Mapping[str, str]
    curve: Sequence[Sequence[float]] = ()  # [tokens, held-out loss] at each validation
    seconds: float = 0.0
    cached: bool = False  # found, not run


@dataclass(frozen=True)
class Attempt:
    """A trial, read."""

    number: int
    cell: str
    seed: int
    attempt: int
    launch: int  # attempts of an earlier launch are not counted against `retries`
    state: TrialState
    attributes: Mapping[str, Any] = field(repr=False)

    @property
    def run(self) -> tuple[str, int]:
        return self.cell, self.seed

    @property
    def choices(self) -> dict[str, Any] | None:
        """Of a search's run: its place in the space."""
        return self.attributes.get("choices")

    @property
    def ending(self) -> Ending | None:
        return self.attributes.get("ending", "died") if self.state == TrialState.FAIL else None

    @property
    def lease(self) -> dict[str, Any] | None:
        return self.attributes.get("lease")

    @property
    def result(self) -> Result | None:
        return Result(**self.attributes["result"]) if self.state == TrialState.COMPLETE else None


class Queue:
    """The study of one plan."""

    def __init__(self, storage: BaseStorage, study: str, retries: int = 1, watch: Watch | None = None) -> None:
        self.storage, self.name, self.retries = storage, study, retries
        self.study = optuna.load_study(study_name=study, storage=storage)
        self._id = storage.get_study_id_from_name(study)
        self._watch = watch or Watch()

    @classmethod
    def launch(cls, storage: BaseStorage, plan: Plan, retries: int = 1) -> Queue:
        """The queue of a plan, made when there is none; the plan in it is the one that was stored first."""
        optuna.create_study(study_name=plan.study, storage=storage, direction="minimize", load_if_exists=True)
        queue = cls(storage, plan.study, retries)
        if PLAN not in queue.study.user_attrs:
            queue.study.set_user_attr(PLAN, json.dumps(asdict(plan)))
            queue.study.set_user_attr(SWEEP, plan.name)
        queue.study.set_user_attr(TRIALS, plan.sweep.n_trials or 0)
        queue.study.set_user_attr(LAUNCHED, time.time())
        return queue

    @property
    def plan(self) -> Plan:
        return Plan(**json.loads(self.study.user_attrs[PLAN]))

    def history(self) -> dict[tuple[str, int], list[Attempt]]:
        """Every run's attempts in order, those that count."""
        runs: dict[tuple[str, int], dict[int, Attempt]] = {}
        for attempt in map(_attempt, self.storage.get_all_trials(self._id, deepcopy=False)):
            runs.setdefault(attempt.run, {}).setdefault(attempt.attempt, attempt)
        return {run: [attempts[i] for i in sorted(attempts)] for run, attempts in runs.items()}

    def add(
        self,
        runs: Iterable[tuple[str, int]],
        found: Mapping[tuple[str, int], Result],
        choices: Mapping[str, Any] | None = None,
    ) -> None:
        """Enqueue the runs nobody has, and once more those that failed; `found` are finished already."""
        history = self.history()
        launch = 1 + max((attempts[-1].launch for attempts in history.values()), default=-1)
        for run in runs:
            attempts = history.get(run, [])
            if attempts and not self._failed(attempts):
                continue
            told = choices or (attempts[-1].choices if attempts else None)
            self._enqueue(run, len(attempts), launch, found.get(run), told)

    def take(self) -> Attempt | None:
        """Hold the next waiting run; None when nothing waits."""
        for trial in self.storage.get_all_trials(self._id, deepcopy=False, states=(TrialState.WAITING,)):
            try:
                if not self.storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING):
                    continue
            except UpdateFinishedTrialError:
                continue
            taken = _attempt(trial)
            if all(attempt.number != taken.number for attempt in self.history()[taken.run]):
                self._end(taken.number, "duplicate")
                continue
            self.beat(taken, 0)
            return taken
        return None

    def beat(self, attempt: Attempt, beat: int, progress: str = "") -> bool:
        """Say that the run is still held; False when it was taken away meanwhile."""
        try:
            self.storage.set_trial_user_attr(self._trial_id(attempt.number), "lease", mine(beat, progress))
        except UpdateFinishedTrialError:
            return False
        return True

    def finish(self, attempt: Attempt, result: Result, value: float) -> None:
        """The run is done. What someone else finished meanwhile stays."""
        with suppress(UpdateFinishedTrialError):
            trial = self._trial_id(attempt.number)
            self.storage.set_trial_user_attr(trial, "result", asdict(result))
            self.storage.set_trial_state_values(trial, TrialState.COMPLETE, [value])

    def fail(self, attempt: Attempt, ending: Ending, reason: str, traceback: str = "") -> None:
        """The attempt ended without a result; `tend` decides whether there is another."""
        self._end(attempt.number, ending, reason=reason, traceback=traceback)

    def prune(self, attempt: Attempt, reason: str) -> None:
        """The run was stopped early and stays so."""
        with suppress(UpdateFinishedTrialError):
            trial = self._trial_id(attempt.number)
            self.storage.set_trial_user_attr(trial, "reason", reason)
            self.storage.set_trial_state_values(trial, TrialState.PRUNED)

    def tend(self) -> None:
        """Give up attempts whose process is dead, and enqueue the next attempt where one is due."""
        for run, attempts in self.history().items():
            last = attempts[-1]
            if last.state == TrialState.RUNNING and self._watch.dead(last.number, last.lease):
                self._end(last.number, "died", reason="its process died (killed, or out of memory)")
                attempts = self.history()[run]
            if attempts[-1].state == TrialState.FAIL and not self._failed(attempts):
                self._enqueue(run, len(attempts), attempts[-1].launch, None, attempts[-1].choices)

    def open(self) -> int:
        """Runs that are neither finished nor failed for good, those of a search that nobody proposed yet among them."""
        runs = self.history().values()
        proposed = sum(attempts[-1].choices is not None for attempts in runs)
        return sum(not self._closed(attempts) for attempts in runs) + max(0, self.n_trials - proposed)

    @property
    def n_trials(self) -> int:
        """Runs of a search in total, as its last launch stated."""
        return self.study.user_attrs.get(TRIALS, 0)

    @property
    def launched(self) -> float:
        """When it was launched last, in seconds since 1970."""
        return self.study.user_attrs.get(LAUNCHED, 0.0)

    def outcomes(self) -> list[Outcome]:
        """Every run as a table sees it."""
        return [self._outcome(attempts) for attempts in self.history().values()]

    def looks(self, seeds: int | None = None) -> tuple[int, ...]:
        """Numbers of seeds at which verdicts were given; `seeds` adds one, for good."""
        recorded = self.study.user_attrs.get(LOOKS, [])
        if seeds is not None and seeds not in recorded:
            recorded = sorted({*recorded, seeds})
            self.study.set_user_attr(LOOKS, recorded)
        return tuple(recorded)

    def parent(self, run_id: str | None = None) -> str | None:
        """The ledger's run of the whole sweep; `run_id` sets it, for good."""
        recorded = self.study.user_attrs.get(PARENT)
        if recorded is None and run_id is not None:
            self.study.set_user_attr(PARENT, run_id)
        return recorded or run_id

    def tuning(self, chosen: Mapping[str, Choice] | None = None) -> dict[str, dict[str, Any]]:
        """By cell, the nuisance `values` it runs with, and its `edges` of the grid; `chosen` sets them, for good."""
        recorded = self.study.user_attrs.get(TUNING)
        if recorded is None and chosen is not None:
            recorded = {cell: asdict(choice) for cell, choice in chosen.items()}
            self.study.set_user_attr(TUNING, recorded)
        return recorded or {}

    def task(self, plan: Plan, attempt: Attempt) -> Task:
        """What an attempt is at."""
        if attempt.choices is not None:
            return plan.trial_task(attempt.cell, attempt.choices)
        if attempt.seed == TUNING_SEED and plan.sweep.tune:
            return next(task for task in plan.tuning_tasks() if task.cell.name == attempt.cell)
        tuning = {cell: each["values"] for cell, each in self.tuning().items()}
        return next(plan.task(cell, attempt.seed) for cell in plan.cells(tuning) if cell.name == attempt.cell)

    def _outcome(self, attempts: Sequence[Attempt]) -> Outcome:
        last = attempts[-1]
        status = STATUS[last.state]
        if last.state == TrialState.FAIL and not self._failed(attempts):
            status = "queued"
        result, reason = last.result or Result({}, {}), last.attributes.get("reason", "")
        return Outcome(last.cell, last.seed, status, result.values, reason, result.provenance)

    def _closed(self, attempts: Sequence[Attempt]) -> bool:
        return attempts[-1].state in (TrialState.COMPLETE, TrialState.PRUNED) or self._failed(attempts)

    def _failed(self, attempts: Sequence[Attempt]) -> bool:
        """For good: a mistake that trying again cannot mend, or tried often enough since the last launch."""
        endings = [attempt.ending for attempt in attempts if attempt.launch == attempts[-1].launch]
        return endings[-1] == "refused" or (
            endings[-1] is not None and (endings.count("error") > self.retries or endings.count("died") >= LIVES)
        )

    def _enqueue(
        self,
        run: tuple[str, int],
        attempt: int,
        launch: int,
        result: Result | None,
        choices: Mapping[str, Any] | None,
    ) -> None:
        attributes: dict[str, Any] = {"cell": run[0], "seed": run[1], "attempt": attempt, "launch": launch}
        if choices:
            attributes["choices"] = dict(choices)
        if result is None:
            self.study.enqueue_trial({}, user_attrs=attributes)
            return
        done = attributes | {"result": asdict(result)}
        self.study.add_trial(create_trial(value=0.0, user_attrs=done))

    def _end(self, number: int, ending: Ending, **words: str) -> None:
        with suppress(UpdateFinishedTrialError):
            trial = self._trial_id(number)
            for key, value in {"ending": ending, **words}.items():
                if value:
                    self.storage.set_trial_user_attr(trial, key, value)
            self.storage.set_trial_state_values(trial, TrialState.FAIL)

    def _trial_id(self, number: int) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self._id, number)


def latest_study(storage: BaseStorage, sweep: str) -> str:
    """The study of a sweep that was launched last, of those with open runs if any has; `ConfigError` without one."""
    found = [study for study in storage.get_all_studies() if study.user_attrs.get(SWEEP) == sweep]
    if not found:
        raise ConfigError(f"sweep {sweep!r} was not launched in this storage: run it without worker=true first")
    queues = [Queue(storage, study.study_name) for study in found]
    return max(queues, key=lambda queue: (queue.open() > 0, queue.launched)).name


def _attempt(trial: FrozenTrial) -> Attempt:
    said = trial.user_attrs
    return Attempt(trial.number, said["cell"], said["seed"], said["attempt"], said["launch"], trial.state, said)
