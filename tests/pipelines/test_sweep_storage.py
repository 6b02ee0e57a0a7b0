"""A queue or a ledger that cannot be written is refused by name, in one line, before anything runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from sqlite3 import dbapi2

import pytest
from filelock import FileLock

from pipelines.config import StageError, TrackingConfig
from pipelines.ledger import open_run
from pipelines.sweeping import launch as launching
from pipelines.sweeping import storage
from pipelines.sweeping.launch import launch
from pipelines.sweeping.options import Options
from pipelines.sweeping.queue import Queue
from tests.pipelines import sweeps

NOBODY = 65534


@pytest.fixture
def folder(_empty_ledger, monkeypatch) -> Iterator[Path]:
    """A project folder that other users may read, with a ledger and a queue in SQLite."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copy(_empty_ledger, folder / "mlflow.db")
        storage.open_storage(f"sqlite:///{folder}/queue.db")
        (folder / "work").mkdir(mode=0o777)
        (folder / "work").chmod(0o777)
        monkeypatch.chdir(folder / "work")
        monkeypatch.setattr(launching, "check", lambda plan, local: None)
        yield folder


def refusal(folder: Path, queue: str) -> str:
    """What a launch says that must not begin."""

    def jobs() -> None:
        raise AssertionError("a worker was started")

    local = sweeps.local(folder, f"sqlite:///{folder}/mlflow.db")
    with pytest.raises(StageError) as refused:
        launch(sweeps.plan(), local, Options(storage=queue), jobs)
    assert "\n" not in str(refused.value)
    assert not (folder / "work" / "reports").exists()
    return str(refused.value)


def load_everything(folder: Path, queue: str) -> None:
    """Another user may not be allowed to read this project's code: have all of it imported."""
    data = {"name": "toy", "digest": "d" * 64}
    open_run(TrackingConfig(f"sqlite:///{folder}/mlflow.db", "others"), "first", "run", {}, {}, data)
    plan = sweeps.plan(title="Another")
    Queue.launch(storage.open_storage(queue), plan).add([(task.cell.name, task.seed) for task in plan.tasks([0])], {})
    for file in (folder / "work").iterdir():
        file.chmod(0o666)


@contextlib.contextmanager
def locked(database: Path) -> Iterator[None]:
    """Another program writes to the database, and does not end."""
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("begin exclusive")
        yield


@contextlib.contextmanager
def read_only(folder: Path, *files: str) -> Iterator[None]:
    """Nobody may write to the folder and its files; as root this process becomes another user meanwhile."""
    for file in files:
        (folder / file).chmod(0o444)
    folder.chmod(0o555)
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(NOBODY)
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


@pytest.fixture
def impatient(monkeypatch) -> None:
    """SQLite waits for a lock for a moment only."""
    connect = dbapi2.connect
    monkeypatch.setattr(dbapi2, "connect", lambda *args, **options: connect(*args, **options | {"timeout": 0.1}))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("file", ["queue.db", "mlflow.db"])
def test_a_locked_database_is_named(folder, file):
    with locked(folder / file):
        message = refusal(folder, f"sqlite:///{folder}/queue.db")
    assert str(folder / file) in message
    assert "locked" in message


@pytest.mark.parametrize("file", ["queue.db", "mlflow.db", "queue.journal"])
def test_a_read_only_one_is_named(folder, file):
    queue = str(folder / "queue.journal") if file == "queue.journal" else f"sqlite:///{folder}/queue.db"
    (folder / "queue.journal").touch()
    if file == "mlflow.db":
        queue = str(folder / "work" / "queue.journal")
    load_everything(folder, queue)
    with read_only(folder, file):
        message = refusal(folder, queue)
    assert str(folder / file) in message
    assert any(word in message for word in ("readonly", "read-only", "denied"))


@pytest.mark.parametrize("file", ["queue.db", "mlflow.db", "queue.journal"])
def test_what_is_no_database_is_named(folder, file):
    queue = str(folder / "queue.journal") if file == "queue.journal" else f"sqlite:///{folder}/queue.db"
    (folder / file).write_text("this is a text\n" * 100)
    assert str(folder / file) in refusal(folder, queue)


def test_a_journal_somebody_holds_for_good_is_named(folder, monkeypatch):
    monkeypatch.setattr(storage, "PATIENCE", 0.1)
    journal = folder / "queue.journal"
    with FileLock(f"{journal}.lock"):
        assert f"storage={journal} cannot be used" in refusal(folder, str(journal))
