"""The unit of work of tokenization: a block of text, encoded by one process into one file.

Special here:
- blocks are cut from the documents of one split, in order, by length alone: how many processes encode them changes
  nothing;
- a document longer than a piece is cut before a single space where it has one. Tokenizers whose entries hold no more
  than a word, with the space before it, then give the ids of the document encoded whole;
- the file's name holds a digest of the tokenizer and the text, so a file that exists is a block that is done.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipelines.files import atomic_path
from pipelines.text_tokenizer import Tokenizer

FORMAT = 1  # of a block's file
PIECE = 1 << 18  # characters encoded in one call
BLOCK = 1 << 20  # characters of a block, at least
OVERHEAD = 64  # characters a piece counts more than its length: a block of tiny documents stays small too
SEARCH = 4096  # characters before the end of a piece in which a place to cut is looked for
CUT = re.compile(r"(?<=\S) (?=\S)")


@dataclass(frozen=True)
class Piece:
    """A part of a document, or all of it."""

    text: str
    first: bool
    last: bool


@dataclass(frozen=True)
class Block:
    """Consecutive pieces of one split."""

    split: str
    number: int
    pieces: tuple[Piece, ...]

    def file_name(self, tokenizer_digest: str) -> str:
        digest = hashlib.sha256(f"{FORMAT}/{tokenizer_digest}".encode())
        for piece in self.pieces:
            data = piece.text.encode()
            digest.update(f"/{piece.first}/{piece.last}/{len(data)}/".encode())
            digest.update(data)
        return f"{self.split}-{self.number:06d}-{digest.hexdigest()[:32]}.npz"

    @property
    def size(self) -> int:
        """Bytes of the text."""
        return sum(len(piece.text.encode()) for piece in self.pieces)


@dataclass(frozen=True)
class EncodedBlock:
    """What is stored of a block: its tokens (documents closed by the separator) and, by piece, what they belong to."""

    tokens: np.ndarray  # [T]
    lengths: np.ndarray  # [pieces] tokens
    sizes: np.ndarray  # [pieces] bytes of UTF-8 text
    last: np.ndarray  # [pieces] whether the piece ends its document

    @classmethod
    def load(cls, file: Path) -> EncodedBlock:
        with np.load(file, allow_pickle=False) as arrays:
            return cls(**arrays)


def cut(texts: Iterable[str], length: int = PIECE) -> Iterator[Piece]:
    """The text of one document in pieces of at most `length` characters, the same however `texts` divides it."""
    buffer, first = "", True
    for text in texts:
        buffer += text
        start = 0
        while len(buffer) - start > length:
            end = _place_to_cut(buffer, start, start + length)
            yield Piece(buffer[start:end], first, last=False)
            start, first = end, False
        buffer = buffer[start:]
    yield Piece(buffer, first, last=True)


def fill(documents: Iterable[tuple[str, Iterable[str]]]) -> Iterator[Block]:
    """Blocks of the documents, which are given as `(split, texts)`; blocks are numbered in order, by split."""
    pieces: dict[str, list[Piece]] = {}
    weights: dict[str, int] = {}
    counts: dict[str, int] = {}
    for split, texts in documents:
        for piece in cut(texts):
            pieces.setdefault(split, []).append(piece)
            weights[split] = weights.get(split, 0) + len(piece.text) + OVERHEAD
            if weights[split] >= BLOCK:
                yield Block(split, counts.get(split, 0), tuple(pieces.pop(split)))
                counts[split] = counts.get(split, 0) + 1
                weights[split] = 0
    for split, rest in pieces.items():
        yield Block(split, counts.get(split, 0), tuple(rest))


def encode(block: Block, tokenizer: Tokenizer, file: Path) -> None:
    """Encode a block and write it to `file`, atomically."""
    texts, continued = zip(*((piece.text, not piece.first) for piece in block.pieces), strict=True)
    encoded = tokenizer.encode_batch(texts, continued)
    closing = np.array([tokenizer.separator], np.uint32)
    parts = [
        np.concatenate([ids, closing]) if piece.last else ids for ids, piece in zip(encoded, block.pieces, strict=True)
    ]
    with atomic_path(file) as temporary:
        np.savez(
            temporary,
            tokens=np.concatenate(parts).astype(dtype_of(tokenizer.vocab_size)),
            lengths=np.array([len(part) for part in parts], np.int64),
            sizes=np.array([len(piece.text.encode()) for piece in block.pieces], np.int64),
            last=np.array([piece.last for piece in block.pieces], np.bool_),
        )


def dtype_of(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id, little-endian on every machine."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _place_to_cut(text: str, start: int, end: int) -> int:
    """The last single space between words in `text[start:end]`, looked for near the end; else `end`."""
    near = max(start + 1, end - SEARCH)
    places = [match.start() for match in CUT.finditer(text, near, end)]
    return places[-1] if places else end
