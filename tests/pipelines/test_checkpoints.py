"""The folder of a cell: whole files, checked digests, one process at a time."""

from __future__ import annotations

import os
import resource
import signal

import pytest
import torch

from pipelines.checkpoints import Cell, load_state, save_state
from pipelines.config import StageError

FINGERPRINT = "f" * 64


@pytest.fixture
def cell(tmp_path) -> Cell:
    cell = Cell(tmp_path, FINGERPRINT)
    cell.folder.mkdir()
    return cell


def put(cell: Cell, step: int) -> None:
    save_state({"step": step}, cell.checkpoint_path(step))
    cell.add(step)


def test_the_two_newest_checkpoints_are_kept(cell):
    for step in (4, 8, 12):
        put(cell, step)
    assert sorted(path.name for path in cell.folder.glob("*.ckpt")) == ["step-00000008.ckpt", "step-00000012.ckpt"]
    assert Cell(cell.folder.parent, FINGERPRINT).latest() == (12, cell.checkpoint_path(12))
    assert load_state(cell.checkpoint_path(12)) == {"step": 12}


def test_a_checkpoint_nobody_vouched_for_does_not_count(cell):
    put(cell, 4)
    save_state({"step": 8}, cell.checkpoint_path(8))
    assert cell.latest() == (4, cell.checkpoint_path(4))


def test_a_damaged_checkpoint_is_passed_over_and_named(cell, capsys):
    put(cell, 4)
    put(cell, 8)
    path = cell.checkpoint_path(8)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert cell.latest() == (4, cell.checkpoint_path(4))
    assert capsys.readouterr().err.startswith(f"{path}: altered or truncated; going on from")
    cell.checkpoint_path(4).unlink()
    with pytest.raises(StageError, match="no intact checkpoint is left"):
        cell.latest()


def test_a_damaged_record_is_named(cell):
    put(cell, 4)
    for text in ("{", "[]", '{"fingerprint": "0"}'):
        (cell.folder / "cell.json").write_text(text)
        with pytest.raises(StageError, match=r"cell\.json: altered"):
            cell.latest()


def test_the_result_replaces_the_checkpoints_and_is_checked(cell):
    put(cell, 4)
    key = cell.run_key()
    cell.finish(lambda folder: (folder / "model.safetensors").write_bytes(b"weights"))
    assert cell.finished
    assert (cell.latest(), cell.run_key()) == (None, key)
    assert not list(cell.folder.glob("*.ckpt"))
    weights = cell.result() / "model.safetensors"
    weights.write_bytes(b"Weights")
    with pytest.raises(StageError, match=r"model\.safetensors: altered or missing"):
        cell.result()


def test_a_result_that_cannot_be_made_leaves_the_checkpoints(cell):
    put(cell, 4)

    def fail(folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cell.finish(fail)
    assert not cell.finished
    assert cell.latest() == (4, cell.checkpoint_path(4))


def test_clearing_forgets_the_run_too(cell):
    key = cell.run_key()
    cell.finish(lambda folder: (folder / "file").touch())
    cell.clear()
    assert not cell.finished
    assert cell.run_key() != key


def test_a_second_owner_is_refused_with_the_name_of_the_first(cell):
    other = Cell(cell.folder.parent, FINGERPRINT)
    with (
        cell.locked(),
        pytest.raises(StageError, match=f"process {os.getpid()} on .* is training this cell"),
        other.locked(),
    ):
        pass
    with other.locked():
        pass


def test_what_a_killed_process_was_writing_is_cleared_away(cell):
    (cell.folder / ".step-00000004-x1.ckpt").write_bytes(b"half")
    (cell.folder / ".result").mkdir()
    with cell.locked():
        assert not list(cell.folder.glob(".*"))


def test_a_state_that_does_not_fit_on_the_disk_leaves_the_one_before(cell):
    put(cell, 4)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(StageError, match=r"cannot save .*step-00000008\.ckpt: File too large"):
            save_state({"weights": torch.zeros(100_000)}, cell.checkpoint_path(8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert cell.latest() == (4, cell.checkpoint_path(4))
    assert sorted(path.name for path in cell.folder.iterdir()) == ["cell.json", "step-00000004.ckpt"]


def test_no_pickle_is_loaded(cell):
    path = cell.checkpoint_path(4)
    torch.save({"command": os.system}, path)
    with pytest.raises(Exception, match="weights_only"):
        load_state(path)
