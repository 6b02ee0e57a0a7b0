"""A crew whose workers are forked from a process that has the libraries loaded: at once there, and as easily killed."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipelines.sweeping import worker
from pipelines.sweeping.crew import Crew
from tests.pipelines.trainings import PROCESSES


class ForkedCrew(Crew):
    """In place of `Crew`; its workers run whatever code there is."""

    def _start(self, i: int) -> Any:
        return Forked(self.settings.dump(), self._log(i))


class Forked:
    """A worker, with what `Crew` uses of a `subprocess.Popen`."""

    def __init__(self, settings: str, log: Path) -> None:
        self._process = PROCESSES.Process(target=_work, args=(settings, log, os.getcwd()))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0)
        return self._process.exitcode


def _work(settings: str, log: Path, folder: str) -> None:
    os.chdir(folder)
    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    sys.stdin = io.StringIO(settings)
    worker._require_same_code = lambda plan, task: None
    code = worker.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
