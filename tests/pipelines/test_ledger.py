"""The ledger: nothing twice, the status tells the truth, names are safe, errors are one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipelines.config import StageError, StoppedError, TrackingConfig
from pipelines.ledger import find_run, open_run
from tests.pipelines.trainings import PROCESSES, query

DIGEST = "d" * 64


@pytest.fixture
def tracking(ledger_file) -> TrackingConfig:
    return TrackingConfig(uri=f"sqlite:///{ledger_file}", experiment="tests")


def opened(tracking: TrackingConfig, key: str = "one", name: str = "model-seed0"):
    return open_run(tracking, key, name, {"seed": "0"}, {"lr": 0.1}, {"name": "toy", "digest": DIGEST})


def test_the_same_key_is_the_same_run(tracking):
    assert opened(tracking).run_id == opened(tracking).run_id != opened(tracking, "two").run_id


def test_a_step_is_logged_once_however_often_it_is_told(tracking, ledger_file):
    rows = [(step, {"train/loss": 1.0 / step, "train/lr": 0.1}) for step in range(1, 6)]
    first = opened(tracking)
    first.record(rows[:3])
    first.record(rows[:4])
    opened(tracking).record(rows)  # another process, after a kill
    logged = query(ledger_file.parent, "select key, step, value from metrics order by key, step")
    assert logged == [
        *(("train/loss", step, 1.0 / step) for step in range(1, 6)),
        *(("train/lr", step, 0.1) for step in range(1, 6)),
    ]


def test_an_evaluation_finds_the_run_of_the_training(tracking, ledger_file):
    run = opened(tracking)
    found = find_run(tracking, run.run_id)
    assert found is not None
    found.record([(24, {"ppl/fixed_targets/4096": 9.5})])
    assert query(ledger_file.parent, "select value from metrics") == [(9.5,)]
    assert find_run(tracking, "0" * 32) is None


def test_a_corrected_value_counts_and_an_equal_one_is_not_repeated(tracking, ledger_file):
    run = opened(tracking)
    run.record([(24, {"ppl/a": 9.5, "ppl/b": 8.0})])
    again = find_run(tracking, run.run_id)
    assert again is not None
    again.record([(24, {"ppl/a": 9.0, "ppl/b": 8.0})], correct=True)
    again.record([(24, {"ppl/a": 9.0, "ppl/b": 8.0})], correct=True)
    assert query(ledger_file.parent, "select key, value from latest_metrics order by key") == [
        ("ppl/a", 9.0),
        ("ppl/b", 8.0),
    ]
    assert query(ledger_file.parent, "select count(*) from metrics") == [(3,)]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ArithmeticError("loss nan"), "FAILED"),
        (StoppedError("by SIGTERM", 15), "KILLED"),
        (KeyboardInterrupt(), "KILLED"),
    ],
)
def test_the_status_says_how_it_ended_until_it_is_finished(tracking, ledger_file, error, status):
    run = opened(tracking)

    def fail() -> None:
        with run.running():
            assert query(ledger_file.parent, "select status from runs") == [("RUNNING",)]
            raise error

    with pytest.raises(type(error)):
        fail()
    assert query(ledger_file.parent, "select status from runs") == [(status,)]
    assert query(ledger_file.parent, "select value from tags where key = 'reason'")[0][0].startswith(
        type(error).__name__
    )
    with run.running():
        run.finish()
    assert query(ledger_file.parent, "select status from runs") == [("FINISHED",)]
    assert query(ledger_file.parent, "select value from tags where key = 'reason'") == []


def test_names_are_made_safe(tracking, ledger_file):
    run = opened(tracking, name="../../etc/a b;c")
    run.record([(1, {"loss (mean) é": 1.0})])
    run.artifact("../../escaped.json", {"a": 1})
    assert query(ledger_file.parent, "select key from metrics") == [("loss__mean___",)]
    assert query(ledger_file.parent, "select value from tags where key = 'mlflow.runName'") == [("etc/a_b_c",)]
    (written,) = ledger_file.parent.rglob("escaped.json")
    assert written.is_relative_to(ledger_file.parent / "mlartifacts")


@pytest.mark.parametrize(
    ("uri", "named"),
    [
        ("sqlite:///{file}/below/mlflow.db", "mlflow.db"),
        ("file:{folder}/mlruns", "file:"),
        ("nonsense://user:secret@host/db", "nonsense://***@host/db"),
    ],
)
def test_a_ledger_that_cannot_be_opened_is_one_line_without_the_password(tmp_path, uri, named):
    (tmp_path / "file").touch()
    uri = uri.format(file=tmp_path / "file", folder=tmp_path)
    with pytest.raises(StageError) as failed:
        opened(TrackingConfig(uri=uri, experiment="tests"))
    assert named in str(failed.value)
    assert "secret" not in str(failed.value)
    assert "\n" not in str(failed.value)


def test_an_experiment_that_was_deleted_is_named(tracking):
    run = opened(tracking)
    run._client.delete_experiment(run._client.get_run(run.run_id).info.experiment_id)
    with pytest.raises(StageError, match="experiment=tests was deleted"):
        opened(tracking)


@pytest.mark.slow
def test_processes_that_come_together_make_one_ledger(tmp_path):
    tracking = TrackingConfig(uri=f"sqlite:///{tmp_path}/mlflow.db", experiment="tests")
    processes = [PROCESSES.Process(target=_open_and_record, args=(tracking, str(key), tmp_path)) for key in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert query(tmp_path, "select count(*) from experiments where name = 'tests'") == [(1,)]
    assert query(tmp_path, "select count(*) from runs where status = 'FINISHED'") == [(3,)]
    assert query(tmp_path, "select count(*), count(distinct run_uuid) from metrics") == [(60, 3)]


def test_a_kill_while_the_ledger_is_made_leaves_no_part_of_it(tmp_path, monkeypatch):
    file = tmp_path / "mlflow.db"

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("pipelines.ledger.MlflowClient.search_experiments", stop)
        with pytest.raises(KeyboardInterrupt):
            opened(TrackingConfig(f"sqlite:///{file}", "tests"))
    assert not file.exists()
    opened(TrackingConfig(f"sqlite:///{file}", "tests"))
    assert file.exists()


def _open_and_record(tracking: TrackingConfig, key: str, folder: Path) -> None:
    os.chdir(folder)
    run = opened(tracking, key)
    with run.running():
        for step in range(1, 21):
            run.record([(step, {"train/loss": 1.0})])
        run.finish()
