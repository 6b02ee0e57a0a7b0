"""Search: cells proposed one after another, by Optuna's sampler, from what the finished ones measured.

Special here: proposals are runs of the same queue, numbered `trial 0`, `trial 1`, ... and their choices lie there. So
`n_trials` is a total over all launches, and the sampler's study is rebuilt in memory whenever it is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from pipelines.cells import flatten
from pipelines.sweep_file import SweepFile
from pipelines.sweeping.queue import Attempt, Queue

TRIES = 20  # proposals of known choices before one is accepted


def propose(sweep: SweepFile, queue: Queue) -> tuple[str, dict[str, Any]] | None:
    """Name and choices of the next trial; None when all of them are proposed."""
    assert sweep.search is not None
    known = trials(queue)
    if len(known) >= queue.n_trials:
        return None
    levels = flatten(sweep.search.space)
    space: dict[str, BaseDistribution] = {path: CategoricalDistribution(each) for path, each in levels.items()}
    samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    options = {"constant_liar": True} if sweep.search.sampler == "tpe" else {}
    sampler = samplers[sweep.search.sampler](seed=len(known), **options)
    study = optuna.create_study(directions=[StudyDirection.MINIMIZE for _ in sweep.search.objectives], sampler=sampler)
    for attempt in known:
        study.add_trial(_seen(sweep, attempt, space))
    choices: dict[str, Any] = {}
    for _ in range(TRIES):
        choices = study.ask(space).params
        if choices not in [attempt.choices for attempt in known]:
            break
    return f"trial {len(known)}", choices


def trials(queue: Queue) -> list[Attempt]:
    """The latest attempt of every trial, in order."""
    found = [attempts[-1] for attempts in queue.history().values() if attempts[-1].choices is not None]
    return sorted(found, key=lambda attempt: int(attempt.cell.rpartition(" ")[2]))


def pareto(values: Mapping[str, tuple[float, ...]]) -> list[str]:
    """The names no other is at least as good as in everything and better in something; lower is better."""

    def beaten(name: str) -> bool:
        return any(
            all(a <= b for a, b in zip(other, values[name], strict=True)) and other != values[name]
            for other in values.values()
        )

    return [name for name in values if not beaten(name)]


def _seen(sweep: SweepFile, attempt: Attempt, space: Mapping[str, BaseDistribution]) -> optuna.trial.FrozenTrial:
    """An attempt as the sampler knows it."""
    assert sweep.search is not None
    assert attempt.choices is not None
    told: dict[str, Any] = {"params": attempt.choices, "distributions": dict(space)}
    if attempt.result is not None:
        measured = [attempt.result.values[sweep.measure(name)] for name in sweep.search.objectives]
        return create_trial(state=TrialState.COMPLETE, values=measured, **told)
    failed = attempt.state in (TrialState.FAIL, TrialState.PRUNED)
    return create_trial(state=TrialState.FAIL if failed else TrialState.RUNNING, **told)
