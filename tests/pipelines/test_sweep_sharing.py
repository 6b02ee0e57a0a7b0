"""Two folders with one queue and one ledger start the same sweep at the same moment: one sweep, one table."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipelines.command import guarded
from pipelines.config import TrackingConfig
from pipelines.ledger import open_run
from pipelines.sweeping import launch as launching
from pipelines.sweeping import worker as working
from pipelines.sweeping.launch import launch
from pipelines.sweeping.options import Options
from pipelines.sweeping.worker import Settings, work
from tests.pipelines import sweeps
from tests.pipelines.trainings import PROCESSES, query

RUNS = 12
TABLE = "reports/ablations/layers/table.md"


def launch_in(folder: Path, queue: str, ledger: str, together: Any) -> None:
    """Launch in a folder, with this process as the worker, when everybody else is ready."""
    os.chdir(folder)
    log = os.open("log.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    launching.check = lambda plan, local: None  # it needs token data
    working._require_same_code = lambda plan, task: None
    plan, local = sweeps.plan({"layers": [1, 2, 3, 4]}), sweeps.local(folder, ledger)
    settings = Settings(queue, plan.study, local, 1, "tests.pipelines.fake_runs:run", stay=True)
    together.wait()
    os._exit(guarded(lambda: launch(plan, local, Options(storage=queue), jobs=lambda: work(settings))))


@pytest.mark.parametrize("kind", ["journal", pytest.param("sqlite", marks=pytest.mark.slow)])
def test_folders_that_start_at_once_split_the_sweep(kind, tmp_path, ledger_file):
    queue = f"{tmp_path}/queue.journal" if kind == "journal" else f"sqlite:///{tmp_path}/queue.db"
    folders, together = [tmp_path / "one", tmp_path / "other"], PROCESSES.Barrier(2)
    processes = []
    for folder in folders:
        folder.mkdir()
        (folder / "seconds.txt").write_text("0.15")
        told = (folder, queue, f"sqlite:///{ledger_file}", together)
        processes.append(PROCESSES.Process(target=launch_in, args=told))
        processes[-1].start()
    for process in processes:
        process.join(120)
    logs = [(folder / "log.txt").read_text() for folder in folders]
    assert [process.exitcode for process in processes] == [0, 0], logs
    started = [(folder / "starts.txt").read_text().splitlines() for folder in folders]
    assert all(started), "both did a part"
    labels = [line.split(" ", 1)[1] for lines in started for line in lines]
    assert Counter(labels) == {f"layers={n} · seed {seed}": 1 for n in (1, 2, 3, 4) for seed in (0, 1, 2)}
    assert len({(folder / TABLE).read_text() for folder in folders}) == 1
    assert len({log[log.index("Layers\n") :] for log in logs}) == 1, "both print the same table"
    keys = Counter(key for (key,) in query(tmp_path, "select value from tags where key = 'run.key'"))
    assert set(keys.values()) == {1}, "no run of the ledger twice"
    assert len(keys) == RUNS + 1, "each run and the whole"
    assert query(tmp_path, "select count(*) from runs where status <> 'FINISHED'") == [(0,)]


def open_runs(ledger: str, together: Any) -> None:
    tracking, data = TrackingConfig(ledger, "layers"), {"name": "toy", "digest": "d" * 64}
    for key in range(10):
        together.wait()
        open_run(tracking, str(key), "run", {}, {"seed": 0}, data)


def test_a_run_that_two_processes_open_at_once_is_one_run(tmp_path, ledger_file):
    told = f"sqlite:///{ledger_file}", PROCESSES.Barrier(2)
    processes = [PROCESSES.Process(target=open_runs, args=told) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert query(tmp_path, "select count(*) from runs") == [(10,)]
