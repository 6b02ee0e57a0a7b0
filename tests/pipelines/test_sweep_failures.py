"""Cells that fail, in any way: the others finish, the table says why, and mended they are the only ones that run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pipelines.command import guarded
from pipelines.sweeping import launch as launching
from pipelines.sweeping.launch import launch
from pipelines.sweeping.options import Options
from pipelines.sweeping.queue import LIVES
from tests.pipelines import sweeps
from tests.pipelines.forked_crew import ForkedCrew

DIED = "its process died (killed, or out of memory)"
BAD = {  # cell -> how it fails, what the table says, starts of each run with one retry
    "layers=2": ("", "the loss is NaN at step 3", 2),
    "layers=3": ("exception", "ValueError: shapes do not fit", 2),
    "layers=4": ("memory", "MemoryError: 8 GiB cannot be allocated", 2),
    "layers=5": ("mistake", "width=3 must be even", 1),
    "layers=6": ("killed", DIED, LIVES),
    "layers=7": ("killed", DIED, LIVES),
}
GOOD = ("layers=1", "layers=8")


def started(folder: Path) -> Counter[str]:
    """How often each run was started since the last call."""
    lines = (folder / "starts.txt").read_text().splitlines()
    (folder / "starts.txt").unlink()
    return Counter(line.split(" ", 1)[1] for line in lines)


def runs(cell: str) -> list[str]:
    return [f"{cell} · seed {seed}" for seed in range(3)]


@pytest.mark.slow
def test_cells_that_fail_are_told_and_mended_alone(tmp_path, ledger_file, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launching, "check", lambda plan, local: None)
    monkeypatch.setattr(launching, "Crew", ForkedCrew)
    plan, local = sweeps.plan({"layers": [*range(1, 9)]}), sweeps.local(tmp_path, f"sqlite:///{ledger_file}")
    table = tmp_path / "reports/ablations/layers/table.md"
    (tmp_path / "seconds.txt").write_text("0")

    def run() -> int:
        return guarded(lambda: launch(plan, local, Options(workers=2), runner="tests.pipelines.fake_runs:run"))

    (tmp_path / "bad.txt").write_text("\n".join(f"{cell}: {how}" for cell, (how, *_) in BAD.items()))
    assert run() == 1
    starts = {run: count for cell, (*_, count) in BAD.items() for run in runs(cell)}
    assert started(tmp_path) == {**starts, **{run: 1 for cell in GOOD for run in runs(cell)}}
    for cell, (_, reason, _) in BAD.items():
        (row,) = [
            line for line in table.read_text().splitlines() if line.startswith(f"| {cell} ") and "3 seeds" in line
        ]
        assert f"failed: 3 of 3 seeds ({reason})" in row
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "18 of 24 runs failed: layers=2 · seed 0 (the loss is NaN at step 3); " in said
    assert said.endswith("and 13 more")

    (tmp_path / "bad.txt").unlink()
    assert run() == 0
    assert started(tmp_path) == {run: 1 for cell in BAD for run in runs(cell)}
    assert "failed" not in table.read_text()
