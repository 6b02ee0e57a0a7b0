"""The whole of a sweep, from the command line or a launch to the table, with runs that take no time."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.command import PROJECT, load
from pipelines.config import StageError
from pipelines.sweep_file import SWEEPS, read_sweep, sweep_from
from pipelines.sweeping import launch as launching
from pipelines.sweeping import pages
from pipelines.sweeping import worker as working
from pipelines.sweeping.finish import collect
from pipelines.sweeping.launch import check, launch
from pipelines.sweeping.options import Options
from pipelines.sweeping.plan import Plan, freeze
from pipelines.sweeping.queue import Queue, Result
from pipelines.sweeping.search import pareto
from pipelines.sweeping.storage import open_storage
from pipelines.sweeping.worker import Settings, work
from tests.pipelines import sweeps
from tests.pipelines.sweep_commands import command
from tests.pipelines.trainings import query

RUNNER = "tests.pipelines.fake_runs:run"


@pytest.fixture
def folder(tmp_path, monkeypatch, ledger_file) -> Path:
    """An empty project folder with a ledger, where runs are worked off in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launching, "check", lambda plan, local: None)
    monkeypatch.setattr(working, "_require_same_code", lambda plan, task: None)
    (tmp_path / "seconds.txt").write_text("0")
    return tmp_path


def launched(folder: Path, plan: Plan, **options: Any) -> Queue:
    """Launch with one worker, which is this process."""
    told = Options(**options)
    local = sweeps.local(folder, f"sqlite:///{folder}/mlflow.db")
    quiet = replace(local, tracking=replace(local.tracking, uri="none"))
    where = told.where(plan.name)
    settings = Settings(where, plan.study, quiet, told.retries, RUNNER, stay=True)
    try:
        launch(plan, local, told, jobs=lambda: work(settings))
    finally:
        queue = Queue(open_storage(where), plan.study)
    return queue


def starts(folder: Path) -> list[str]:
    """The runs that were started since the last call."""
    file = folder / "starts.txt"
    lines = [line.split(" ", 1)[1] for line in file.read_text().splitlines()] if file.exists() else []
    file.unlink(missing_ok=True)
    return lines


def test_a_table_is_run_once_then_only_what_is_missing(folder, capsys):
    launched(folder, sweeps.plan())
    assert starts(folder) == [f"layers={n} · seed {seed}" for seed in range(3) for n in (1, 2)]
    assert "2 cells, 3 seeds" in (folder / "reports/ablations/layers/table.md").read_text()
    capsys.readouterr()
    launched(folder, sweeps.plan())
    assert starts(folder) == []
    assert "6 runs, 6 of them done" in capsys.readouterr().out
    launched(folder, sweeps.plan(seeds=5))
    assert starts(folder) == [f"layers={n} · seed {seed}" for seed in (3, 4) for n in (1, 2)]
    assert pages.read(folder / "reports/ablations/layers").looks == (3, 5)
    parents = query(folder, "select value from tags where key = 'run.key'")
    assert len(parents) == 1


def test_a_failed_cell_is_named_and_run_again_alone(folder):
    (folder / "bad.txt").write_text("layers=2")
    with pytest.raises(StageError, match=r"3 of 6 runs failed: layers=2 · seed 0 \(the loss is NaN at step 3\)"):
        launched(folder, sweeps.plan(), retries=0)
    text = (folder / "reports/ablations/layers/table.md").read_text()
    assert "failed: 3 of 3 seeds (the loss is NaN at step 3)" in text
    (folder / "bad.txt").unlink()
    starts(folder)
    launched(folder, sweeps.plan(), retries=0)
    assert starts(folder) == [f"layers=2 · seed {seed}" for seed in range(3)]


def test_the_ledger_says_how_a_sweep_ended_and_has_its_numbers_once(folder):
    (folder / "bad.txt").write_text("layers=2: interrupted")
    with pytest.raises(KeyboardInterrupt):
        launched(folder, sweeps.plan())
    assert ended(folder) == ("KILLED", "KeyboardInterrupt: ")
    (folder / "bad.txt").write_text("layers=2")
    with pytest.raises(StageError):
        launched(folder, sweeps.plan(), retries=0)
    assert ended(folder) == ("FAILED", "StageError: 3 of 6 runs failed: layers=2 · seed 0 (the loss is NaN at step 3)")
    (folder / "bad.txt").unlink()
    launched(folder, sweeps.plan(), retries=0)
    launched(folder, sweeps.plan(), retries=0)
    assert ended(folder) == ("FINISHED", None)
    means = query(folder, "select key, count(*) from metrics where key like 'mean/%' group by key")
    assert means == [("mean/layers_1", 1), ("mean/layers_2", 1)]


def ended(folder: Path) -> tuple[str, str | None]:
    """Status and first reason of the run of the whole sweep."""
    runs = query(folder, "select r.run_uuid, r.status from runs r join tags t using (run_uuid) where t.key = 'table'")
    assert len(runs) == 1
    run_id, status = runs[0]
    reasons = query(folder, f"select value from tags where key = 'reason' and run_uuid = '{run_id}'")
    return status, reasons[0][0].split(";")[0] if reasons else None


def test_jobs_that_leave_runs_open_fail_the_launch(folder, capsys):
    budget = sweeps.BUDGET | {"nuisance": {"pretrain": {"lr": [1.0, 2.0]}}}
    plan, local = (
        sweeps.plan(tune=True, budgets={"tiny": budget}),
        sweeps.local(folder, f"sqlite:///{folder}/mlflow.db"),
    )
    with pytest.raises(StageError, match="the jobs ended, 4 runs are open: a worker failed: no token data"):
        launch(plan, local, Options(), jobs=lambda: ["a worker failed: no token data"])
    assert "a worker failed: no token data" in capsys.readouterr().err
    assert not Queue(open_storage(Options().where(plan.name)), plan.study).tuning()
    assert not (folder / "reports").exists()


def test_a_job_that_fails_is_told_when_the_others_did_its_work(folder, capsys):
    plan, local = sweeps.plan(), sweeps.local(folder, f"sqlite:///{folder}/mlflow.db")
    settings = Settings(Options().where(plan.name), plan.study, sweeps.local(folder), runner=RUNNER, stay=True)

    def jobs() -> list[str]:
        work(settings)
        return ["a worker failed: the disk is full"]

    launch(plan, local, Options(), jobs)
    assert "a worker failed: the disk is full" in capsys.readouterr().err


def test_cells_are_checked_with_the_execution_that_runs_have(tmp_path, token_folder):
    plan = sweeps.plan()
    base = plan.bases["transformer_pp_tiny"]
    recipe = base["execution"] | {"devices": 8, "accelerator": "gpu"}
    data = base["data"] | {"directory": str(token_folder), "vocab_size": 257}
    check(
        replace(plan, bases={"transformer_pp_tiny": base | {"execution": recipe, "data": data}}), sweeps.local(tmp_path)
    )


def test_nuisance_values_are_chosen_on_their_own_seed_and_kept(folder):
    budget = sweeps.BUDGET | {"nuisance": {"pretrain": {"lr": [1.0, 2.0, 3.0]}}}
    plan = sweeps.plan(tune=True, budgets={"tiny": budget})
    queue = launched(folder, plan)
    assert [start for start in starts(folder) if "seed 1000" in start] == [
        f"layers={n} lr={lr} · seed 1000" for n in (1, 2) for lr in (1, 2, 3)
    ]
    assert {cell: each["values"] for cell, each in queue.tuning().items()} == {
        f"layers={n}": {"pretrain.lr": 2.0} for n in (1, 2)
    }
    assert "lr=2" in (folder / "reports/ablations/layers/table.md").read_text()


def test_a_search_runs_its_trials_in_total_and_shows_the_front(folder):
    search = {
        "space": {"model": {"layers": [1, 2, 3]}},
        "objectives": ["ppl/window_mean/1x", "training_flops_per_token"],
    }
    stated: dict[str, Any] = {"search": search, "n_trials": 5, "verdicts": None, "seeds": 1, "claims": {}}
    launched(folder, sweeps.plan({"layers": [2]}, **stated))
    ran = starts(folder)
    assert len(ran) == 6
    assert ran[0] == "layers=2 · seed 0"  # the baseline, which trials are pruned against
    stated["n_trials"] = 6
    assert launched(folder, sweeps.plan({"layers": [2]}, **stated)).n_trials == 6
    assert len(starts(folder)) == 1
    text = (folder / "reports/ablations/layers/table.md").read_text()
    assert "Pareto front" in text
    assert "Of 6 trials" in text


def test_a_failed_trial_is_run_again_alone_by_the_next_launch(folder):
    search = {"space": {"model": {"layers": [1, 2, 3]}}, "objectives": ["ppl/window_mean/1x"]}
    stated: dict[str, Any] = {"search": search, "n_trials": 2, "verdicts": None, "seeds": 1, "claims": {}}
    (folder / "bad.txt").write_text("trial 1")
    with pytest.raises(StageError, match="1 of 3 runs failed: trial 1"):
        launched(folder, sweeps.plan({"layers": [2]}, **stated), retries=0)
    (folder / "bad.txt").unlink()
    starts(folder)
    launched(folder, sweeps.plan({"layers": [2]}, **stated), retries=0)
    assert starts(folder) == ["trial 1 · seed 0"]


def test_a_table_with_a_failed_cell_was_looked_at(folder):
    (folder / "bad.txt").write_text("layers=3")
    plan = sweeps.plan({"layers": [1, 2, 3]})
    with pytest.raises(StageError):
        launched(folder, plan, retries=0)
    assert pages.read(folder / "reports/ablations/layers").looks == (3,)


def test_while_runs_are_open_nobody_looks(folder):
    plan = sweeps.plan()
    queue = Queue.launch(open_storage(str(folder / "queue.journal")), plan)
    queue.add([("layers=1", 0)], {})
    assert collect(plan, queue).looks == ()


def test_what_another_machine_ran_costs_what_its_training_took():
    def cost(cell: str, **took: Result) -> float:
        return launching._cost(cell, {(name, 0): launching._seconds(each) for name, each in took.items()})

    unknown, here = Result({}, {}), Result({}, {}, seconds=60.0)
    elsewhere = Result({"tokens": 3000.0, "tokens_per_second": 100.0}, {})
    assert cost("a", a=elsewhere, b=here) == 30.0
    assert cost("a", a=unknown, b=here) == 60.0
    assert cost("a", a=unknown) == float("inf")


def test_the_front_holds_what_nothing_beats():
    values = {"a": (1.0, 3.0), "b": (2.0, 2.0), "c": (2.0, 3.0), "d": (3.0, 1.0), "e": (1.0, 3.0)}
    assert pareto(values) == ["a", "b", "d", "e"]


def test_seeds_are_allocated_where_the_verdict_is_open_as_long_as_the_budget_lasts(folder, capsys):
    rules = {"looks": [3, 5, 8, 12, 20]}
    launched(folder, sweeps.plan(verdicts=rules), allocate=True, budget_hours=0.01)
    assert {int(start.rpartition(" ")[2]) for start in starts(folder)} == {0, 1, 2}
    launched(folder, sweeps.plan(verdicts=rules), allocate=True, budget_hours=0.5)
    assert starts(folder) == [f"layers={n} · seed {seed}" for seed in (3, 4) for n in (1, 2)]
    assert "allocated 0.07 of 0.50 hours" in capsys.readouterr().out
    assert "real: worse" in (folder / "reports/ablations/layers/table.md").read_text()


def test_two_folders_share_one_sweep(folder, tmp_path_factory, monkeypatch):
    storage = f"{folder}/shared.journal"
    first = launched(folder, sweeps.plan(), storage=storage)
    other = tmp_path_factory.mktemp("other")
    shutil.copy(folder / "mlflow.db", other / "mlflow.db")
    monkeypatch.chdir(other)
    second = launched(other, sweeps.plan(), storage=storage)
    assert starts(other) == []
    assert first.name == second.name
    ours, theirs = (at / "reports/ablations/layers/table.md" for at in (folder, other))
    assert ours.read_text() == theirs.read_text()


@pytest.mark.parametrize("name", ["hlr_cycles", "length", "noise_floor"])
def test_a_cell_is_what_its_command_line_gives(name, tmp_path, monkeypatch):
    values = read_sweep(SWEEPS / f"{name}.yaml")
    sweep = sweep_from(name, values)
    params = yaml.safe_load((PROJECT / "params.yaml").read_text())
    plan = freeze(name, values, {cell.preset: _composed(params, cell.preset) for cell in sweep.table()}, absent=True)
    for cell in sweep.cells()[:4]:
        config = plan.config(cell, 2)
        alone = load([*cell.command_line(2), f"execution.precision={config.execution.precision}"], PROJECT)
        assert config == alone


def _composed(params: dict[str, Any], preset: str) -> dict[str, Any]:
    from dataclasses import asdict

    from models import preset as standard

    model = asdict(standard(preset)) | {"vocab_size": "${data.vocab_size}"} | dict(params["models"].get(preset) or {})
    base = {key: value for key, value in params.items() if key != "defaults"}
    return base | {"model_name": preset, "model": model}


def test_a_repetition_and_a_change_of_science_have_keys_of_their_own():
    plan = sweeps.plan()
    one, two = plan.sweep.cells()
    keys = {plan.task(cell, seed).key for cell in (one, two, one.again(1)) for seed in (0, 1)}
    assert len(keys) == 6
    assert plan.task(one, 0).key == sweeps.plan(title="Renamed").task(one, 0).key
    assert plan.study != sweeps.plan(title="Renamed").study
    assert plan.study == sweeps.plan(seeds=5).study


REFUSALS: dict[str, tuple[list[str], str]] = {
    "no sweep": ([], "name a sweep: +sweep=<one of"),
    "unknown sweep": (["+sweep=hlr_cycle"], "hlr_cycles"),
    "one seed": (["+sweep=gating", "seeds=1"], "seeds=1 supports no verdict"),
    "factor": (["+sweep=gating", "+factors.model.h_cyclez=[1]"], "h_cyclez"),
    "baseline": (["+sweep=gating", "baseline={gate:sometimes}"], "baseline: no cell has gate=sometimes"),
    "claim": (["+sweep=gating", "+claims.x={says: x, lower: {cell: {gate: often}, than: {gate: none}}}"], "gate=often"),
    "model": (["+sweep=gating", "model.h_cycles=3"], "model.h_cycles: the sweep chooses it"),
    "unknown field": (["+sweep=gating", "+sedes=5"], "unknown field sedes (did you mean 'seeds'?)"),
    "stated": (["+sweep=gating", "pretrain.lr=1e-3"], "change it there: budgets.tiny.config.pretrain.lr=..."),
    "devices": (
        ["+sweep=gating", "execution.devices=2"],
        "execution.devices=2, execution.nodes=1: a sweep gives every",
    ),
    "budget hours": (["+sweep=gating", "allocate=true"], "allocate and budget_hours belong together"),
    "no data": (["+sweep=gating", "data.directory=nowhere"], "no token data in nowhere"),
    "nothing launched": (["+sweep=gating", "worker=true"], "was not launched in this storage"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_run_is_refused_by_name_before_anything_runs(case, tmp_path):
    shutil.copy(PROJECT / "params.yaml", tmp_path)
    arguments, named = REFUSALS[case]
    code, _, errors = command(tmp_path, *arguments)
    assert code == (1 if case == "no data" else 2), errors
    assert named in errors
    assert len(errors.strip().splitlines()) == 1
    assert not (tmp_path / "reports").exists()
    assert not (tmp_path / "mlflow.db").exists()
