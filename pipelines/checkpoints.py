"""The folder of one training cell: what is needed to go on after any interruption, and the result when it is finished.

    checkpoints/<first 16 of the fingerprint>/
      cell.json             the fingerprint, the key of the ledger's run, the files below with their digests
      step-00000032.ckpt    training state; the one before it is kept until the next
      result/               the finished model, copied from here to wherever it is asked for
      lock, owner           held by the process that trains

Special here: every file is whole or absent, and read only after its digest was checked.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from pipelines.config import BusyError, StageError
from pipelines.files import atomic_path, sha256_file, sync, write_json, write_text

KEPT = 2  # checkpoints


class Cell:
    """The state of one cell under the folder `root`. Only the process inside `locked()` may change it."""

    def __init__(self, root: str | Path, fingerprint: str) -> None:
        self.folder = Path(root) / fingerprint[:16]
        self.fingerprint = fingerprint

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the cell; `BusyError` naming the process that already does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        owner = self.folder / "owner"
        try:
            with FileLock(self.folder / "lock", blocking=False):
                write_text(owner, f"process {os.getpid()} on {socket.gethostname()}")
                for leftover in self.folder.glob(".*"):  # of a process that was killed while it wrote
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
                yield
        except Timeout:
            holder = owner.read_text("utf-8") if owner.is_file() else "another process"
            raise BusyError(f"{holder} is training this cell ({self.folder}): wait for it or end it") from None

    def run_key(self) -> str:
        """A name for the ledger's run of this cell, drawn once and kept before any run has it."""
        record = self._read()
        if "run_key" not in record:
            record["run_key"] = uuid.uuid4().hex
            self._write(record)
        return record["run_key"]

    @property
    def finished(self) -> bool:
        return "result" in self._read()

    def checkpoint_path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.ckpt"

    def add(self, step: int) -> None:
        """Vouch for the checkpoint of `step`, which was just written, and remove those no longer kept."""
        path = self.checkpoint_path(step)
        entry = {"step": step, "file": path.name, "sha256": sha256_file(path)}
        record = self._read()
        entries = [entry, *(each for each in record.get("checkpoints", ()) if each["step"] != step)]
        self._write(record | {"checkpoints": entries[:KEPT]})
        self._sweep()

    def latest(self) -> tuple[int, Path] | None:
        """The step and file of the newest checkpoint that is as it was written; None for a cell without any.

        A damaged checkpoint is named on stderr and the one before it used.

        Raises:
            StageError: when none is intact.
        """
        entries = self._read().get("checkpoints", [])
        damaged = []
        for entry in entries:
            path = self.folder / entry["file"]
            if path.is_file() and sha256_file(path) == entry["sha256"]:
                if damaged:
                    print(f"{', '.join(damaged)}: altered or truncated; going on from {path}", file=sys.stderr)
                return entry["step"], path
            damaged.append(str(path))
        if damaged:
            again = f"remove {self.folder} to train from the beginning"
            raise StageError(f"{', '.join(damaged)}: altered or truncated, no intact checkpoint is left; {again}")
        return None

    def finish(self, make: Callable[[Path], Any]) -> None:
        """Let `make` write the result's files into a folder, then keep it in place of the checkpoints."""
        partial, result = self.folder / ".result", self.folder / "result"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        make(partial)
        files = sorted(partial.iterdir())
        for file in files:
            sync(file)
        digests = {file.name: sha256_file(file) for file in files}
        shutil.rmtree(result, ignore_errors=True)
        partial.replace(result)
        sync(self.folder)
        self._write({"run_key": self.run_key(), "result": digests})
        self._sweep()

    def result(self) -> Path:
        """The folder of the finished result; `StageError` when a file is not as it was written."""
        folder = self.folder / "result"
        for name, digest in self._read()["result"].items():
            if not (folder / name).is_file() or sha256_file(folder / name) != digest:
                raise StageError(f"{folder / name}: altered or missing; train again with execution.rerun=true")
        return folder

    def clear(self) -> None:
        """Forget everything, so that the cell is trained from the beginning."""
        self._write({})
        self._sweep()
        shutil.rmtree(self.folder / "result", ignore_errors=True)

    def _read(self) -> dict[str, Any]:
        path = self.folder / "cell.json"
        if not path.is_file():
            return {}
        try:
            record = json.loads(path.read_text("utf-8"))
        except ValueError:
            record = None
        if not isinstance(record, dict) or record.get("fingerprint") != self.fingerprint:
            raise StageError(f"{path}: altered or truncated; remove {self.folder} to train from the beginning")
        return record

    def _write(self, record: dict[str, Any]) -> None:
        write_json(self.folder / "cell.json", record | {"fingerprint": self.fingerprint})

    def _sweep(self) -> None:
        kept = {entry["file"] for entry in self._read().get("checkpoints", ())}
        for path in self.folder.glob("step-*.ckpt"):
            if path.name not in kept:
                path.unlink()


def save_state(state: dict[str, Any], path: str | Path) -> None:
    """Write a training state of tensors and plain values, atomically.

    Raises:
        StageError: when it cannot be written (a full disk); earlier checkpoints stay.
    """
    try:
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:  # torch wraps the first in the second
        cause = error if isinstance(error, OSError) else error.__context__
        reason = getattr(cause, "strerror", None) or str(error)
        raise StageError(f"cannot save {path}: {reason}; earlier checkpoints are kept, run again to go on") from None


def load_state(path: str | Path, device: Any = "cpu") -> dict[str, Any]:
    """Read a training state; anything but tensors and plain values is refused."""
    return torch.load(path, map_location=device, weights_only=True)
