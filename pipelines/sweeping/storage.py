"""Where the queue lives: a journal file by default (safe on network file systems), any database by URL.

Special here: a process may be killed at any moment. The journal's lock is the kernel's, so that it dies with its
holder, and a line that was cut off is removed before the next one is written.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path

import optuna
from filelock import FileLock
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._file import BaseJournalFileLock
from sqlalchemy.exc import SQLAlchemyError

from models.configuration import ConfigError
from pipelines.addresses import masked
from pipelines.config import StageError

PATIENCE = 60.0  # seconds another process may take to append its line
TRIES = 20  # looks at a database that another process is filling with tables

optuna.logging.set_verbosity(optuna.logging.ERROR)


class JournalLock(BaseJournalFileLock):
    """Held while a line is appended."""

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self._lock = FileLock(f"{journal}.lock")

    def acquire(self) -> bool:
        self._lock.acquire(timeout=PATIENCE)
        _remove_partial_line(self.journal)
        return True

    def release(self) -> None:
        self._lock.release()


def open_storage(where: str) -> BaseStorage:
    """The storage at a database URL, or in a journal file.

    Raises:
        ConfigError: for a database that needs a driver which is not installed.
        StageError: when it cannot be opened or written: locked, read-only, not a database.
    """
    with one_line(where):
        if re.match(r"[\w+]+://", where):
            return _database(where)
        journal = Path(where)
        journal.parent.mkdir(parents=True, exist_ok=True)
        with open(journal, "ab"):  # refused here, by name, when it is read-only
            pass
        return JournalStorage(JournalFileBackend(str(journal), lock_obj=JournalLock(journal)))


@contextmanager
def one_line(where: str) -> Iterator[None]:
    """Errors of a storage as one line; passwords in URLs are not shown."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(masked(f"storage={where}: {error}")) from None
    except (StorageInternalError, SQLAlchemyError, OSError, JSONDecodeError) as error:
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise StageError(masked(f"storage={where} cannot be used: {reason}")) from None


def _database(url: str) -> BaseStorage:
    """The database, its tables made when missing, which another process may be doing at the same moment."""
    for _ in range(TRIES):
        try:
            return RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
        except SQLAlchemyError as error:
            if "already exists" not in str(error):
                raise
            time.sleep(0.1)
    raise StorageInternalError("its tables stay half made")


def _remove_partial_line(journal: Path) -> None:
    with open(journal, "r+b") as file:
        end = file.seek(0, 2)
        if not end:
            return
        file.seek(end - 1)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
