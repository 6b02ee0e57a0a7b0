"""Worker processes of one launch on this machine: started, watched, replaced when something kills them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.config import StageError
from pipelines.sweeping.queue import LIVES
from pipelines.sweeping.worker import Settings

PATIENCE = 60.0  # seconds a worker has to save its run when it is asked to stop
REPLACED = 20  # killed workers a launch replaces, beyond those that runs are known to kill


@dataclass
class Crew:
    """`size` processes; what they print goes to `<folder>/worker-<i>.log`."""

    settings: Settings
    size: int
    folder: Path
    open_runs: int = 0  # each may kill LIVES workers before it counts as failed
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _replaced: int = 0

    @contextmanager
    def working(self) -> Iterator[Crew]:
        """The processes live inside the block; whatever ends it, they are asked to stop and waited for."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.processes = [self._start(i) for i in range(self.size)]
        try:
            yield self
        finally:
            self._stop()

    def tend(self) -> bool:
        """Replace the killed; returns whether any process is left.

        Raises:
            StageError: when a worker gave up by itself, with its last line.
        """
        for i, process in enumerate(self.processes):
            code = process.poll()
            if code is None or code == 0:
                continue
            if code > 0 or self._replaced >= REPLACED + LIVES * self.open_runs:
                raise StageError(f"worker {i} ended: {self._last_line(i)} (see {self._log(i)})")
            self._replaced += 1
            self.processes[i] = self._start(i)
        return any(process.poll() is None for process in self.processes)

    def _start(self, i: int) -> subprocess.Popen[bytes]:
        threads = str(self.settings.local.execution.threads)
        environment = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
        with open(self._log(i), "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "pipelines.sweeping.worker"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the launcher, which asks once and waits
            )
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(self.settings.dump().encode())
        return process

    def _stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _log(self, i: int) -> Path:
        return self.folder / f"worker-{i}.log"

    def _last_line(self, i: int) -> str:
        lines = self._log(i).read_text("utf-8", errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")
