"""A sweep is what it was when it was launched: files edited while it runs reach the next launch, not this one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from models.serialization import WEIGHTS
from pipelines.command import PROJECT
from pipelines.config import StageError
from pipelines.sweeping.plan import teacher_digest
from pipelines.sweeping.queue import Queue, Result
from pipelines.sweeping.storage import open_storage
from pipelines.sweeping.worker import Job, Settings, work
from pipelines.token_index import read_index
from tests.pipelines import sweeps
from tests.pipelines.fake_runs import run
from tests.pipelines.sweep_commands import command
from tests.pipelines.sweeps import BUDGET, values

RUNNER = f"{__name__}:edits_and_runs"
QUEUE = "runs/sweeps/layers.journal"


def edits_and_runs(job: Job) -> Result:
    """During the second run, somebody edits both files; every run tells what it was run with."""
    files = Path("params.yaml"), Path("sweeps/layers.yaml")
    if (job.task.cell.name, job.task.seed) == ("layers=2", 0):
        params, sweep = (yaml.safe_load(file.read_text()) for file in files)
        params["pretrain"]["lr"] = 0.5
        sweep["factors"]["model"]["layers"] = [1, 2, 3]
        sweep["title"] = "Edited"
        for file, edited in zip(files, (params, sweep), strict=True):
            file.write_text(yaml.safe_dump(edited))
    config = job.plan.config(job.task.cell, job.task.seed)
    result = run(job)
    told = {"lr": config.pretrain.lr, "layers": float(getattr(config.model, "layers", 0))}
    return Result({**result.values, **told}, result.provenance, result.curve, result.seconds)


@pytest.fixture
def folder(tmp_path, ledger_file, token_folder) -> Path:
    """A project folder with one sweep."""
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "seconds.txt").write_text("0")
    params = yaml.safe_load((PROJECT / "params.yaml").read_text())
    params["data"]["directory"] = str(token_folder)
    params["execution"]["checkpoints"] = str(tmp_path)
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    sweep = values() | {"verdicts": {"alpha": 0.05}, "budgets": {"tiny": BUDGET}}
    (tmp_path / "sweeps/layers.yaml").write_text(yaml.safe_dump(sweep))
    return tmp_path


@pytest.mark.slow
def test_files_edited_while_a_sweep_runs_change_nothing_in_it_and_fork_the_next(folder):
    shutil.copy(folder / "params.yaml", folder / "original.yaml")
    lr = yaml.safe_load((folder / "params.yaml").read_text())["pretrain"]["lr"]
    code, printed, errors = command(folder, "+sweep=layers", runner=RUNNER)
    assert (code, errors) == (0, ""), errors
    storage = open_storage(str(folder / QUEUE))
    (first,) = [study.study_name for study in storage.get_all_studies()]
    outcomes = Queue(storage, first).outcomes()
    assert len(outcomes) == 6
    assert {(o.values["lr"], f"layers={o.values['layers']:g}" == o.cell) for o in outcomes} == {(lr, True)}
    assert "Layers" in printed
    assert "Edited" not in (folder / "reports/ablations/layers/table.md").read_text()

    (folder / "starts.txt").unlink()
    code, printed, errors = command(folder, "+sweep=layers", runner=RUNNER)
    assert (code, errors) == (0, ""), errors
    storage = open_storage(str(folder / QUEUE))
    second = next(study.study_name for study in storage.get_all_studies() if study.study_name != first)
    edited = Queue(storage, second).outcomes()
    assert {(o.values["lr"], o.cell) for o in edited} == {(0.5, f"layers={n}") for n in (1, 2, 3)}
    assert len((folder / "starts.txt").read_text().splitlines()) == 9, "with another learning rate every run is another"
    assert Queue(storage, first).outcomes() == outcomes
    assert "Edited" in (folder / "reports/ablations/layers/table.md").read_text()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("data", r"^data\.directory=data/tokens holds \w{8}, layers-\w{8} was launched with dddddddd: put that back"),
        ("no data", r"^layers-\w{8} cannot be run here: no token data in data/tokens"),
        ("teacher", r"^teacher=\S+ holds \w{8}, layers-\w{8} was launched with tttttttt: put that back"),
        ("no teacher", r"^layers-\w{8} cannot be run here: teacher="),
    ],
)
def test_a_worker_stops_where_data_or_teacher_is_not_what_was_launched(
    changed, said, tmp_path, token_folder, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipelines.sweeping.worker._require_same_code", lambda plan, task: None)
    params = yaml.safe_load((PROJECT / "params.yaml").read_text())
    tokens, teacher = Path(params["data"]["directory"]), Path(params["teacher"])
    shutil.copytree(token_folder, tokens)
    teacher.mkdir(parents=True)
    (teacher / WEIGHTS).write_bytes(b"weights")
    digests = {str(tokens): read_index(tokens)["digest"], str(teacher): teacher_digest(str(teacher))}
    if changed.startswith("no "):
        shutil.rmtree(tokens if changed == "no data" else teacher)
    else:
        digests[str(tokens if changed == "data" else teacher)] = changed[0] * 64
    config = {**sweeps.BUDGET["config"], "distill": {"context": 512}}
    plan = replace(sweeps.plan(stage="distill", budgets={"tiny": {**sweeps.BUDGET, "config": config}}), data=digests)
    queue = Queue.launch(open_storage("queue.journal"), plan)
    queue.add([("layers=1", 0)], {})
    with pytest.raises(StageError, match=said) as stopped:
        work(Settings("queue.journal", plan.study, sweeps.local(tmp_path, "sqlite:///none.db"), stay=True))
    assert "\n" not in str(stopped.value)
    assert [attempt.ending for attempt in queue.history()["layers=1", 0]] == ["released"]
    assert queue.open() == 1
