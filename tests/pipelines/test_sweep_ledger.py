"""A table's experiment in the ledger is whole, wherever its runs were made: listed, grouped and compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.ledger import find_run
from pipelines.role import Role
from pipelines.sweeping import launch as launching
from pipelines.sweeping import worker as working
from pipelines.sweeping.launch import launch
from pipelines.sweeping.ledger import entry_of, own_run
from pipelines.sweeping.options import Options
from pipelines.sweeping.plan import Plan
from pipelines.sweeping.worker import Settings, work
from tests.pipelines import sweeps
from tests.pipelines.trainings import query

SQL = """
    select {table}.key, {table}.value from {table} join runs using (run_uuid) join experiments using (experiment_id)
    where experiments.name = '{name}' and runs.name like '%seed_2'
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, ledger_file) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launching, "check", lambda plan: None)
    monkeypatch.setattr(working, "_require_same_code", lambda plan, task: None)
    (tmp_path / "seconds.txt").write_text("0")
    return tmp_path


def finish(folder: Path, plan: Plan) -> None:
    local, options = sweeps.local(folder, f"sqlite:///{folder}/mlflow.db"), Options()
    runner = "tests.pipelines.fake_runs:run"
    settings = Settings(options.where(plan.name), plan.study, local, runner=runner, stay=True)
    launch(plan, local, options, jobs=lambda: work(settings))


def test_a_table_whose_runs_another_table_made_can_be_compared_too(folder):
    finish(folder, sweeps.plan())
    (folder / "starts.txt").unlink()
    finish(folder, sweeps.plan(name="again"))
    assert not (folder / "starts.txt").exists(), "nothing ran twice"
    of = {
        (table, name): [
            pair for pair in query(folder, SQL.format(table=table, name=name)) if "validation" not in pair[0]
        ]
        for table in ("params", "tags", "latest_metrics")
        for name in ("layers", "again")
    }
    assert sorted(value for key, value in of["params", "again"] if key == "model.layers") == ["1", "2"]
    assert sorted(of["params", "again"]) == sorted(of["params", "layers"])
    assert sorted(of["latest_metrics", "again"]) == sorted(of["latest_metrics", "layers"])
    for tag, values in {
        "row": ["layers=1", "layers=2"],
        "seed": ["2", "2"],
        "baseline": ["false", "true"],
        "table": ["again", "again"],
    }.items():
        assert sorted(value for key, value in of["tags", "again"] if key == tag) == values


def test_an_evaluation_of_another_cells_training_has_the_trainings_parameters(folder):
    finish(folder, sweeps.plan())
    ((run_id, key),) = query(
        folder,
        "select run_uuid, value from tags join runs using (run_uuid) where key = 'cell.key' and name like '%1_seed_0'",
    )
    tracking = sweeps.local(folder, f"sqlite:///{folder}/mlflow.db").tracking
    training = {"run_id": run_id, "model": "toy", "family": "transformer", "seed": 0, "data_digest": "d" * 64}
    assert own_run(tracking, key, Role(), training) == run_id
    other = own_run(tracking, "f" * 64, Role("other", {"row": "x"}), training)
    trained, evaluated = entry_of(tracking, run_id), entry_of(tracking, other)
    assert trained
    assert evaluated
    assert evaluated.data.params == trained.data.params
    assert evaluated.data.tags["trained.by"] == run_id
    assert find_run(tracking, other)
