"""Which tokenizer `data.tokenizer` means: one learned from the training documents, or one that exists."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from models.configuration import ConfigError, nearest, require
from pipelines.config import DataConfig
from pipelines.files import write_text
from pipelines.text_tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

NAMES = ["bpe", "bytes", "mistral"]
SAMPLE_PER_ENTRY = 4096  # characters of text read for every entry to learn: our assumption


def open_tokenizer(config: DataConfig) -> Tokenizer | None:
    """The tokenizer `config` names, checked against `data.vocab_size`; None for `bpe`, which has to be learned first.

    Raises:
        ConfigError: when there is no such tokenizer, its package is missing, or its size is not `data.vocab_size`.
    """
    name = config.tokenizer
    if name == "bpe":
        return None
    tokenizer = ByteTokenizer() if name == "bytes" else _from_file(_mistral() if name == "mistral" else Path(name))
    require(
        tokenizer.vocab_size == config.vocab_size,
        f"data.vocab_size={config.vocab_size} must be {tokenizer.vocab_size}, the size of data.tokenizer={name}",
    )
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int, file: Path) -> Tokenizer:
    """Learn a byte-level BPE (GPT-2's pre-tokenization, every byte an entry) and save it as `file`.

    The separator is the last of the `vocab_size` entries and lies outside the tokenizer's file. The same texts, in any
    order, give the same tokenizer.

    Raises:
        ConfigError: when the texts are too few to fill the vocabulary.
    """
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    library.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator(texts, trainer)
    learned = library.get_vocab_size() + 1
    require(
        learned == vocab_size,
        f"data.vocab_size={vocab_size}: the training documents give only {learned} entries; set {learned} or less",
    )
    write_text(file, library.to_str())
    return load_tokenizer(file)


def _from_file(file: Path) -> Tokenizer:
    close = nearest(str(file), NAMES)
    require(file.is_file(), f"data.tokenizer={str(file)!r}{close} is neither a file nor one of {', '.join(NAMES)}")
    try:
        return load_tokenizer(file)
    except ValueError as error:
        raise ConfigError(f"data.tokenizer: {error}") from None


def _mistral() -> Path:
    """The 32,000-piece SentencePiece file inside the package `mistral-common`, found without importing it."""
    spec = find_spec("mistral_common")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("data.tokenizer=mistral needs the package mistral-common: pip install mistral-common")
    return Path(spec.submodule_search_locations[0]) / "data" / "tokenizer.model.v1"
