"""Text to token ids and back, with one interface for every kind of tokenizer.

Special here:
- every tokenizer knows the **bytes each token stands for**, so decoding, decoding token by token and bits per byte are
  the same table look-up;
- the separator that closes a document is a token no text can produce: the tokenizer's own end token, else one more
  entry after its last.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import sentencepiece
import tokenizers

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()  # what an unknown token is shown as
WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece writes a space so


class Tokenizer(ABC):
    """Encodes text, decodes ids. `separator` closes a document; it stands for no bytes."""

    token_bytes: Sequence[bytes]  # id -> UTF-8 bytes (a token may hold part of a character)
    separator: int
    file: Path | None = None  # the tokenizer's own file, if it has one

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    @property
    def digest(self) -> str:
        """Identifies the tokenizer: SHA-256 of its file, or its name."""
        return hashlib.sha256(self.file.read_bytes() if self.file else type(self).__name__.encode()).hexdigest()

    @abstractmethod
    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens."""

    def encode_batch(self, texts: Sequence[str], continued: Sequence[bool] | None = None) -> list[np.ndarray]:
        """Ids of each text, uint32 `[T]`, without separators.

        Args:
            continued: which texts go on with the text before them. A tokenizer that puts a space before every text
                then takes the piece's own first space for it (a piece without one gets a space too many: only texts
                of `blocks.PIECE` characters without any space are affected).
        """
        if continued is not None and self._adds_space:
            texts = [
                text[1:] if goes_on and text.startswith(" ") else text
                for text, goes_on in zip(texts, continued, strict=True)
            ]
        return [np.asarray(ids, np.uint32) for ids in self._encode(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` (any integers: numpy, torch, plain). Separators are dropped, broken UTF-8 is replaced."""
        decoder = self.decoder()
        return "".join(decoder.push(int(token)) for token in ids) + decoder.finish()

    def decoder(self) -> StreamDecoder:
        """A decoder for one token at a time."""
        return StreamDecoder(self)

    def save(self, folder: str | Path) -> Path | None:
        """Copy the tokenizer's file into `folder`; None for one that needs no file. `load_tokenizer` reads it back."""
        return Path(shutil.copyfile(self.file, Path(folder) / self._file_name)) if self.file else None

    _file_name = ""

    @cached_property
    def _adds_space(self) -> bool:
        """Whether the tokenizer puts a space before every text: tried with a word it knows with one."""
        words = (data[1:] for data in self.token_bytes if data[:1] == b" " and data[1:].isalpha())
        ids = self._encode([next(words, b"a").decode()])[0]
        return b"".join(self.token_bytes[token] for token in ids).startswith(b" ")


class StreamDecoder:
    """Turns tokens into text as they come. A character split over tokens is given out with its last token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True

    def push(self, token: int) -> str:
        """The text that `token` completes, possibly empty. After a separator a new document begins."""
        data = self._tokenizer.token_bytes[token]
        if token == self._tokenizer.separator:
            self._at_start = True
            return self.finish()
        if data and self._at_start:
            self._at_start = False
            data = data.removeprefix(b" ") if self._tokenizer._adds_space else data
        return self._utf8.decode(data)

    def finish(self) -> str:
        """The text of what is left: a replacement character for half a character, else nothing."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class ByteTokenizer(Tokenizer):
    """256 bytes and the separator: 257 tokens."""

    token_bytes = (*(bytes([value]) for value in range(256)), b"")
    separator = 256

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def encode_batch(self, texts: Sequence[str], continued: Sequence[bool] | None = None) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json` of the `tokenizers` library. Special tokens written out in a text are text like any other."""

    _file_name = "tokenizer.json"

    def __init__(self, file: str | Path) -> None:
        self.file = Path(file)
        self._library = tokenizers.Tokenizer.from_file(str(file))
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        added = {token.content for token in self._library.get_added_tokens_decoder().values()}
        bytes_of = _piece_decoder(self._library)
        table = [b""] * (max(vocabulary.values()) + 1)
        for piece, token in vocabulary.items():
            table[token] = piece.encode() if piece in added else bytes_of(piece)
        end = next((vocabulary[piece] for piece in END_TOKENS if piece in added), None)
        self.token_bytes, self.separator = _with_separator(table, end)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [item.ids for item in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model` file, such as Llama 2's or Mistral's."""

    _file_name = "tokenizer.model"

    def __init__(self, file: str | Path) -> None:
        self.file = Path(file)
        self._library = sentencepiece.SentencePieceProcessor(model_proto=self.file.read_bytes())
        end = self._library.eos_id()
        table = [self._bytes_of(token) for token in range(self._library.get_piece_size())]
        self.token_bytes, self.separator = _with_separator(table, end if end >= 0 else None)

    def _bytes_of(self, token: int) -> bytes:
        if self._library.is_control(token):
            return b""
        return (
            REPLACEMENT if self._library.is_unknown(token) else _sentencepiece_bytes(self._library.id_to_piece(token))
        )

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._library.encode(list(texts), out_type=int)


def load_tokenizer(file: str | Path | None) -> Tokenizer:
    """The tokenizer of a file (SentencePiece if its name has the ending `.model`), or bytes for None.

    Raises:
        ValueError: when the file is not a tokenizer.
    """
    if file is None:
        return ByteTokenizer()
    kind = SentencePieceTokenizer if ".model" in Path(file).suffixes else JsonTokenizer
    try:
        return kind(file)
    except FileNotFoundError:
        raise
    except Exception as error:  # the libraries raise bare Exception and RuntimeError
        raise ValueError(f"{file} is not a tokenizer: {' '.join(str(error).split())}") from None


def _with_separator(table: list[bytes], end: int | None) -> tuple[list[bytes], int]:
    """The table with an empty entry for the separator: the token `end`, else a new last one."""
    if end is None:
        return [*table, b""], len(table)
    table[end] = b""
    return table, end


def _sentencepiece_bytes(piece: str) -> bytes:
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(WORD_START, " ").encode()


def _piece_decoder(library: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """How the library's pieces spell bytes, by the decoder it names: byte-level, WordPiece, else as SentencePiece."""
    decoder = json.loads(library.to_str())["decoder"] or {}
    kinds = {part["type"] for part in [decoder, *decoder.get("decoders", ())] if part}
    if "ByteLevel" in kinds:
        table = _byte_level_alphabet()
        return lambda piece: bytes(table[character] for character in piece)
    if "WordPiece" in kinds:
        return lambda piece: piece[2:].encode() if piece.startswith("##") else f" {piece}".encode()
    return _sentencepiece_bytes


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's byte-level alphabet: printable Latin-1 is itself, the rest follows U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}
