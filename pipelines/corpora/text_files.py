"""Text files as a corpus, read in bounded memory.

What a document is: a whole `.txt` or `.md` file (read in pieces, whatever its size), a line of a `.jsonl`, `.jsonl.gz`
or `.jsonl.zst` file, a row of a `.parquet` file. A null text counts as an empty document.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet
import zstandard

from models.configuration import nearest
from pipelines.corpora.document import CorpusError, Document

PLAIN = (".txt", ".md")
LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PIECE_BYTES = 1 << 16  # larger ones fragment the heap: 500 MB after reading 1 GB
BATCH_ROWS = 256


class TextFiles:
    """Documents of every file the globs match, files in the order of their paths.

    Args:
        paths: globs (`**` crosses folders) of files with the endings above.
        field: the column of `.jsonl` and `.parquet` files that holds the text.
    Raises:
        CorpusError: for a glob that matches no file, or a file of another kind.
    """

    fraction: float | None = 0.0

    def __init__(self, paths: Sequence[str], field: str) -> None:
        self._files = sorted({file for pattern in paths for file in _matches(pattern)})
        self._field = field

    def documents(self) -> Iterator[Document]:
        total = sum(file.stat().st_size for file in self._files) or 1
        read = 0
        for file in self._files:
            size = file.stat().st_size
            for document, position in self._documents(file):
                self.fraction = (read + position * size) / total
                yield document
            read += size
        self.fraction = 1.0

    def _documents(self, file: Path) -> Iterator[tuple[Document, float]]:
        """Documents of one file, each with the fraction of the file read after it."""
        if file.name.endswith(PLAIN):
            yield Document(str(file), lambda: read_pieces(file)), 1.0
        elif file.name.endswith(LINES):
            yield from _read_lines(file, self._field)
        else:
            yield from _read_parquet(file, self._field)


def text_of(row: Any, field: str, name: str) -> str:
    """The text of one record. Raises `CorpusError` naming the record and its columns when there is none."""
    if not isinstance(row, dict):
        raise CorpusError(f"{name}: a record must be an object with the column {field!r}, not {type(row).__name__}")
    _require_column(field, list(row), name)
    text = row[field]
    if text is not None and not isinstance(text, str):
        raise CorpusError(f"{name}: column {field!r} must hold text, not {type(text).__name__}")
    return text or ""


def read_pieces(file: Path) -> Iterator[str]:
    """A UTF-8 file in small pieces, without its byte order mark. Line ends stay as they are."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    end, data = 0, b"-"
    with open(file, "rb") as source:
        while data:
            data = source.read(PIECE_BYTES)
            end += len(data)
            try:
                yield decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise _not_utf8(str(file), error, end - len(error.object)) from None


def _not_utf8(name: str, error: UnicodeDecodeError, start: int = 0) -> CorpusError:
    byte = error.object[error.start]
    return CorpusError(f"{name}: byte 0x{byte:02x} at offset {start + error.start} is not UTF-8")


def _matches(pattern: str) -> list[Path]:
    named = [pattern] if Path(pattern).is_file() else glob(pattern, recursive=True)  # a name may hold [brackets]
    files = [path for path in map(Path, named) if path.is_file()]
    if not files:
        hint = f"; {pattern!r} is a folder: '{pattern}/*.txt' names its texts" if Path(pattern).is_dir() else ""
        raise CorpusError(f"data.paths: {pattern!r} matches no file{hint}")
    known = (*PLAIN, *LINES, ".parquet")
    for file in files:
        if not file.name.endswith(known):
            raise CorpusError(f"data.paths: {file} is none of {' '.join(known)}")
    return files


def _require_column(field: str, columns: list[str], name: str) -> None:
    if field not in columns:
        raise CorpusError(f"{name}: no column {field!r}{nearest(field, columns)}; there are {', '.join(columns)}")


def _read_lines(file: Path, field: str) -> Iterator[tuple[Document, float]]:
    size = file.stat().st_size
    with open(file, "rb") as raw, _damage_named(file):
        for number, line in enumerate(_decompressed(raw, file), start=1):
            name = f"{file} line {number}"
            if line.strip():
                yield Document.of(name, text_of(_parsed(line, name), field, name)), raw.tell() / size


def _parsed(line: bytes, name: str) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _not_utf8(name, error) from None
    except json.JSONDecodeError as error:
        raise CorpusError(f"{name}: not JSON: {error.msg} at column {error.colno}") from None


def _decompressed(raw: IO[bytes], file: Path) -> Iterable[bytes]:
    if file.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if file.suffix == ".zst":
        reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return io.BufferedReader(reader, PIECE_BYTES)  # type: ignore[arg-type]
    return raw


def _read_parquet(file: Path, field: str) -> Iterator[tuple[Document, float]]:
    with _damage_named(file), pyarrow.parquet.ParquetFile(file, buffer_size=PIECE_BYTES, pre_buffer=False) as table:
        _require_column(field, table.schema_arrow.names, str(file))
        kind = table.schema_arrow.field(field).type
        if kind not in (pyarrow.string(), pyarrow.large_string()):
            raise CorpusError(f"{file}: column {field!r} must hold text, not {kind}")
        row = 0
        for batch in table.iter_batches(BATCH_ROWS, columns=[field], use_threads=False):
            for text in batch.column(0).to_pylist():
                row += 1
                yield Document.of(f"{file} row {row}", text or ""), row / table.metadata.num_rows


@contextmanager
def _damage_named(file: Path) -> Iterator[None]:
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zstandard.ZstdError, pyarrow.ArrowException) as error:
        raise CorpusError(f"{file} is damaged: {' '.join(str(error).split())}") from None
