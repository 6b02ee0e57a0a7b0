"""The token data on disk: shards of plain integers, and an `index.json` that vouches for every file.

index.json               written last: a folder without it holds no data
tokenizer.json|.model    the tokenizer's own file (none for bytes)
train-00000.bin ...      the documents' tokens one after another, each closed by the separator
train-documents.npy      int64 [documents, 2]: where each ends in the tokens of the split, its text in UTF-8 bytes
held_out-...             the same for the other split
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.config import StageError
from pipelines.files import sha256_file

FORMAT = 1
INDEX = "index.json"
AGAIN = "run python -m pipelines.tokenize again"


class DataError(StageError):
    """Token data that is missing, altered or truncated: names the file."""


def index_digest(index: Mapping[str, Any]) -> str:
    """SHA-256 over everything the index says, its own digest apart: the identity of the data."""
    said = {key: value for key, value in index.items() if key != "digest"}
    return hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_index(directory: Path) -> dict[str, Any]:
    """The index of a folder. Raises `DataError` when there is none, or it is not as it was written."""
    file = directory / INDEX
    try:
        index = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise DataError(f"no token data in {directory}: run python -m pipelines.tokenize") from None
    except ValueError:
        raise DataError(f"{file} is altered or truncated: it is not JSON; {AGAIN}") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise DataError(f"{file} is not of format {FORMAT}; {AGAIN}")
    if index.get("digest") != index_digest(index):
        raise DataError(f"{file} is altered: its digest does not match; {AGAIN}")
    return index


def check_file(file: Path, sha256: str) -> None:
    """Raise `DataError` unless the file is there and has this digest."""
    if not file.is_file():
        raise DataError(f"{file} is missing; {AGAIN}")
    if sha256_file(file) != sha256:
        raise DataError(f"{file} is altered or truncated: its digest does not match {INDEX}; {AGAIN}")


def map_shard(file: Path, shard: Mapping[str, Any], dtype: str, verify: bool) -> np.ndarray:
    """A shard's tokens, mapped into memory read-only. Raises `DataError` when its size is wrong, or its digest."""
    kind = np.dtype(dtype).newbyteorder("<")
    expected = shard["tokens"] * kind.itemsize
    if file.is_file() and (size := file.stat().st_size) != expected:
        raise DataError(f"{file} is altered or truncated: {size:,} bytes, not {expected:,}; {AGAIN}")
    if verify or not file.is_file():
        check_file(file, shard["sha256"])
    return np.memmap(file, kind, mode="r")
