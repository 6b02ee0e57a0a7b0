"""Pruning is paired: a run is compared with the baseline of its own seed, at the same step, and with nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from pipelines.sweeping import worker as working
from pipelines.sweeping.queue import Queue, Result
from pipelines.sweeping.run_cell import _validated
from pipelines.sweeping.storage import open_storage
from pipelines.sweeping.worker import Job, Settings, work
from tests.pipelines import sweeps

STEPS = (32, 96, 192)  # of 192
LOSSES = {  # by cell and seed, at each step; seeds differ by more than cells do
    ("layers=1", 0): (4.0, 3.0, 2.0),
    ("layers=1", 1): (6.0, 5.0, 4.0),
    ("layers=2", 0): (9.0, 3.3, 2.0),  # worse than the baseline of seed 0, better than that of seed 1
    ("layers=2", 1): (9.0, 4.9, 3.9),  # worse than the baseline of seed 0, better than that of seed 1
}


def run(job: Job) -> Result:
    """A run that tells its losses as a training does."""
    config = job.plan.config(job.task.cell, job.task.seed)
    validated, curve = _validated(job, config), []
    for step, loss in zip(STEPS, LOSSES[job.task.cell.name, job.task.seed], strict=True):
        validated(step, loss)
        curve.append([step, step * 2048, loss])
    return Result({"ppl/window_mean/512": curve[-1][-1]}, {}, curve)


def pruned(folder: Path, pruner: Mapping[str, float] | None, order: list[int]) -> dict[tuple[str, int], str]:
    """The runs that were stopped early, and the reasons given."""
    where, plan = str(folder / "queue.journal"), sweeps.plan(pruner=pruner)
    assert plan.config(plan.sweep.cells()[0], 0).pretrain.steps == STEPS[-1]
    queue = Queue.launch(open_storage(where), plan)
    queue.add([(f"layers={n}", seed) for seed in (0, 1) for n in order], {})
    work(Settings(where, plan.study, sweeps.local(folder), runner=f"{__name__}:run", stay=True))
    outcomes = queue.outcomes()
    assert all(outcome.status in ("done", "pruned") for outcome in outcomes)
    return {(outcome.cell, outcome.seed): outcome.reason for outcome in outcomes if outcome.status == "pruned"}


@pytest.fixture(autouse=True)
def _code_may_change(monkeypatch) -> None:
    monkeypatch.setattr(working, "_require_same_code", lambda plan, task: None)


def test_a_run_is_stopped_when_it_is_worse_than_the_baseline_of_its_seed(tmp_path):
    reasons = pruned(tmp_path, {"after": 0.25, "margin": 0.05}, [1, 2])
    assert reasons == {("layers=2", 0): "at step 96: 3.300, the baseline had 3.000"}


def test_the_margin_and_the_first_comparison_are_as_stated(tmp_path):
    (tmp_path / "wide").mkdir()
    (tmp_path / "early").mkdir()
    assert pruned(tmp_path / "wide", {"after": 0.25, "margin": 0.5}, [1, 2]) == {}
    early = pruned(tmp_path / "early", {"after": 0.0, "margin": 0.05}, [1, 2])
    assert early == {("layers=2", seed): f"at step 32: 9.000, the baseline had {4 + 2 * seed}.000" for seed in (0, 1)}


def test_nothing_is_stopped_without_a_pruner_or_before_the_baseline_is_finished(tmp_path):
    assert pruned(tmp_path, None, [1, 2]) == {}
    (tmp_path / "later").mkdir()
    assert pruned(tmp_path / "later", {"after": 0.0, "margin": 0.05}, [2, 1]) == {}


def test_a_pruned_run_is_not_run_again_and_keeps_its_reason(tmp_path, monkeypatch):
    stated = {"after": 0.25, "margin": 0.05}
    first = pruned(tmp_path, stated, [1, 2])
    monkeypatch.setitem(globals(), "run", lambda job: pytest.fail("nothing is left to run"))
    assert pruned(tmp_path, stated, [1, 2]) == first


def test_the_baseline_itself_is_never_stopped(tmp_path, monkeypatch):
    losses = {run: (*losses[:1], 99.0, *losses[2:]) for run, losses in LOSSES.items()}
    monkeypatch.setattr(f"{__name__}.LOSSES", losses)
    assert pruned(tmp_path, {"after": 0.0, "margin": 0.0}, [1]) == {}
