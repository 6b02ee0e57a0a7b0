"""A table's experiment in the ledger is whole, wherever its runs were made: listed, grouped and compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config import TrackingConfig
from pipelines.ledger import open_run
from pipelines.role import Role
from pipelines.sweeping.ledger import CELL_KEY, entry_of, own_run
from tests.pipelines import sweeps
from tests.pipelines.sweep_commands import finish
from tests.pipelines.trainings import query

SQL = """
    select {table}.key, {table}.value from {table} join runs using (run_uuid) join experiments using (experiment_id)
    where experiments.name = '{name}' and runs.name like '%seed_2'
"""


@pytest.fixture
def folder(ledger_file) -> Path:
    return ledger_file.parent


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
    tracking, data = TrackingConfig(f"sqlite:///{folder}/mlflow.db", "layers"), {"name": "toy", "digest": "d" * 64}
    trained = open_run(tracking, "training", "one", {CELL_KEY: "a" * 64}, {"model.layers": 1, "seed": 0}, data).run_id
    training = {"run_id": trained, "model": "toy", "family": "transformer", "seed": 0, "data_digest": "d" * 64}
    assert own_run(tracking, "a" * 64, Role(), training) == trained
    other = own_run(tracking, "b" * 64, Role("other", {"row": "layers=1"}), training)
    entry = entry_of(tracking, other)
    assert entry
    assert entry.data.params == {"model.layers": "1", "seed": "0"}
    tags = {name: entry.data.tags[name] for name in ("row", "seed", "trained.by")}
    assert tags == {"row": "layers=1", "seed": "0", "trained.by": trained}
