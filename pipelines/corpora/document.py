"""What every corpus gives: documents that can be read in pieces, as often as needed, in a fixed order."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from models.configuration import ConfigError


class CorpusError(ConfigError):
    """A corpus that cannot be read: names the file or field and what is wrong with it."""


@dataclass(frozen=True)
class Document:
    """One text. `pieces()` gives it anew at every call, in order, so a huge one never has to be in memory whole."""

    name: str  # where it comes from, for messages
    pieces: Callable[[], Iterator[str]]

    @classmethod
    def of(cls, name: str, text: str) -> Document:
        """A document whose text is in memory."""
        return cls(name, lambda: iter((text,)))

    def measure(self) -> tuple[bytes, int]:
        """SHA-256 of the text's UTF-8 bytes, and their number: zero for a document of nothing but white space.

        Raises:
            CorpusError: for a text with lone surrogates, which no UTF-8 file can hold.
        """
        digest, size, blank = hashlib.sha256(), 0, True
        for piece in self.pieces():
            try:
                data = piece.encode()
            except UnicodeEncodeError as error:
                raise CorpusError(
                    f"{self.name}: character {error.object[error.start]!r} is not valid Unicode"
                ) from None
            digest.update(data)
            size += len(data)
            blank = blank and not piece.strip()
        return digest.digest(), 0 if blank else size


class Corpus(Protocol):
    """A source of documents. `fraction` says how much of the source the latest iteration has read, if it is known."""

    fraction: float | None

    def documents(self) -> Iterator[Document]:
        """Every document, in an order that depends on the source alone.

        Raises:
            CorpusError: for anything in the source that cannot be read.
        """
        ...
