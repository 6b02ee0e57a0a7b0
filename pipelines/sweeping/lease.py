"""Who holds a run, and whether that process still lives.

Special here: clocks of two machines are never compared. A process on this machine is looked up; one elsewhere counts as
dead when its beat has not changed for a while on the observer's own clock.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

import psutil

BEAT = 5.0  # seconds between beats
PATIENCE = 60.0  # seconds without a beat after which a process elsewhere counts as dead


@cache
def machine() -> str:
    """This machine, or this container of it: where process numbers mean the same."""
    try:
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def mine(beat: int, progress: str = "") -> dict[str, Any]:
    """A lease of this process."""
    pid = os.getpid()
    started = psutil.Process(pid).create_time()
    return {"machine": machine(), "pid": pid, "started": started, "beat": beat, "progress": progress}


class Watch:
    """Remembers when each lease last changed."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._seen: dict[int, tuple[Any, float]] = {}

    def dead(self, run: int, lease: Mapping[str, Any] | None) -> bool:
        """Whether nobody holds `run` any more; `lease` is None between the moment it is taken and its first beat."""
        if lease and lease["machine"] == machine():
            return not _alive(lease["pid"], lease["started"])
        beat = dict(lease or {})
        if run not in self._seen or self._seen[run][0] != beat:
            self._seen[run] = (beat, time.monotonic())
        return time.monotonic() - self._seen[run][1] > self._patience


def _alive(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < 2  # it is computed from the clock, which may be set meanwhile
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
