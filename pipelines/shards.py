"""Encoded blocks become the token data that `token_index` describes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.blocks import EncodedBlock, dtype_of
from pipelines.files import sha256_file, sync, write_json
from pipelines.text_tokenizer import Tokenizer
from pipelines.token_index import FORMAT, INDEX, index_digest

PARTIAL = ".partial"
OURS = ("train-*.bin", "train-*.npy", "held_out-*.bin", "held_out-*.npy", "tokenizer.*")
LENGTHS = (1024, 4096, 16384, 65536)  # tokens; the index counts the documents that are at least as long


def write_tokens(
    blocks: Mapping[str, Iterable[Path]],
    tokenizer: Tokenizer,
    corpus: Mapping[str, Any],
    shard_tokens: int,
    directory: Path,
) -> dict[str, Any]:
    """Join encoded blocks into shards and publish them in `directory`.

    Everything is written to a hidden folder inside `directory` first, so that a full disk or a kill leaves the data of
    an earlier run as it was.

    Args:
        blocks: split -> its blocks' files in order.
        corpus: what the index says of the corpus; nothing that differs between machines.
    Returns:
        The index.
    """
    partial = directory / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        file = tokenizer.save(partial)
        index = {
            "format": FORMAT,
            "dtype": dtype_of(tokenizer.vocab_size).name,
            "vocab_size": tokenizer.vocab_size,
            "separator": tokenizer.separator,
            "tokenizer": {"file": file.name if file else None, "sha256": tokenizer.digest},
            "corpus": dict(corpus),
            "splits": {split: _write_split(split, files, shard_tokens, partial) for split, files in blocks.items()},
        }
        index["digest"] = index_digest(index)
        _publish(partial, directory, index)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return index


def _write_split(split: str, blocks: Iterable[Path], shard_tokens: int, folder: Path) -> dict[str, Any]:
    """Write one split's shards and boundaries into `folder`; returns its part of the index."""
    shards: list[dict[str, Any]] = []
    lengths, sizes, last = [], [], []
    for file in blocks:
        block = EncodedBlock.load(file)
        lengths.append(block.lengths)
        sizes.append(block.sizes)
        last.append(block.last)
        tokens = block.tokens
        while len(tokens):
            if not shards or shards[-1]["tokens"] == shard_tokens:
                shards.append({"file": f"{split}-{len(shards):05d}.bin", "tokens": 0})
            part = tokens[: shard_tokens - shards[-1]["tokens"]]
            with open(folder / shards[-1]["file"], "ab") as shard:
                shard.write(part.tobytes())
            shards[-1]["tokens"] += len(part)
            tokens = tokens[len(part) :]
    for shard in shards:
        sync(folder / shard["file"])
        shard["sha256"] = sha256_file(folder / shard["file"])
    documents = _boundaries(*map(np.concatenate, (lengths, sizes, last)))
    boundaries = folder / f"{split}-documents.npy"
    np.save(boundaries, documents)
    sync(boundaries)
    tokens_of = np.diff(documents[:, 0], prepend=0) - 1
    return {
        "documents": len(documents),
        "tokens": int(documents[-1, 0]),
        "bytes": int(documents[:, 1].sum()),
        "longest_document": int(tokens_of.max()),
        "documents_at_least": {str(length): int((tokens_of >= length).sum()) for length in LENGTHS},
        "boundaries": {"file": boundaries.name, "sha256": sha256_file(boundaries)},
        "shards": shards,
    }


def _boundaries(lengths: np.ndarray, sizes: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Tokens and bytes of each piece, and which pieces end a document -> `[documents, 2]` ends and bytes."""
    ends, bytes_so_far = np.cumsum(lengths)[last], np.cumsum(sizes)[last]
    return np.stack([ends, np.diff(bytes_so_far, prepend=0)], axis=1).astype("<i8")


def _publish(partial: Path, directory: Path, index: Mapping[str, Any]) -> None:
    """Replace the data in `directory`. It has no index from the first step to the last, so no half is ever read."""
    (directory / INDEX).unlink(missing_ok=True)
    for pattern in OURS:
        for old in directory.glob(pattern):
            old.unlink()
    for file in partial.iterdir():
        os.replace(file, directory / file.name)
    write_json(directory / INDEX, index)
