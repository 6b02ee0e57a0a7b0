"""Stage `tokenize`: a corpus becomes token shards, split by document, with an index that vouches for them.

Special here:
- one process reads, `execution.workers` encode, and every encoded block is a file in `checkpoints/` at once: after
  `kill -9` the same command goes on where it was, and memory does not grow with the corpus;
- the result depends on the corpus and on `data` alone, bit for bit: not on workers, nor on interruptions.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipelines.blocks import fill
from pipelines.config import DataConfig, PipelineConfig, StageError
from pipelines.corpora import open_corpus
from pipelines.encoding import encode_all
from pipelines.shards import write_tokens
from pipelines.split import SPLITS, measured, sample, survey
from pipelines.vocabulary import SAMPLE_PER_ENTRY, open_tokenizer, train_bpe


def run(config: PipelineConfig) -> dict[str, Any]:
    """Tokenize the corpus that `data` names into `data.directory`; returns the index that was written.

    Raises:
        ConfigError: when the corpus or the tokenizer cannot be used as configured.
        StageError: when another process tokenizes into the same folder, or a worker is killed.
        OSError: when the disk is full; finished blocks and the data of earlier runs stay.
    """
    started = time.monotonic()
    data, directory = config.data, Path(config.data.directory)
    tokenizer, corpus = open_tokenizer(data), open_corpus(data)
    with _only_one(directory, Path(config.execution.checkpoints)) as name, _progress() as progress:
        task = progress.add_task("reading the corpus", total=None)
        facts = survey(corpus, data.documents, data.held_out)
        work = Path(config.execution.checkpoints) / f"{name}-{_digest(data)}"
        work.mkdir(exist_ok=True)
        if tokenizer is None:
            progress.update(task, description="learning the vocabulary")
            texts = sample(corpus, data.documents, facts, SAMPLE_PER_ENTRY * data.vocab_size)
            tokenizer = train_bpe(texts, data.vocab_size, work / "tokenizer.json")
        progress.update(task, description="encoding", total=facts.total_bytes)
        texts = ((facts.split_of(item.digest), item.document.pieces()) for item in measured(corpus, data.documents))
        files: dict[str, list[Path]] = {split: [] for split in SPLITS}
        try:
            for block, file in encode_all(fill(texts), tokenizer, work, config.execution.workers):
                files[block.split].append(file)
                progress.advance(task, block.size)
        except BrokenProcessPool:
            raise StageError("a worker was killed (out of memory?); run again to go on from here") from None
        progress.update(task, description="writing shards")
        index = write_tokens(files, tokenizer, {"kind": data.corpus}, data.shard_tokens, directory)
        shutil.rmtree(work)
        progress.update(task, total=sum(index["splits"][split]["bytes"] for split in SPLITS))
    print(_summary(index, directory, time.monotonic() - started))
    return index


@contextmanager
def _only_one(directory: Path, checkpoints: Path) -> Iterator[str]:
    """Hold the lock of an output folder; yields a name for the work on it."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    name = f"tokenize-{hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:8]}"
    try:
        with FileLock(checkpoints / f"{name}.lock", blocking=False):
            yield name
    except Timeout:
        raise StageError(f"another process is tokenizing into {directory}; wait for it or end it") from None


def _digest(data: DataConfig) -> str:
    """Tells unfinished work of one configuration from another's; `Block.file_name` checks the content."""
    return hashlib.sha256(json.dumps(asdict(data), sort_keys=True).encode()).hexdigest()[:16]


def _progress() -> Progress:
    description = TextColumn("tokenize: {task.description}")
    return Progress(description, BarColumn(), DownloadColumn(), TimeElapsedColumn(), TimeRemainingColumn())


def _summary(index: dict[str, Any], directory: Path, seconds: float) -> str:
    train, held_out = (index["splits"][split] for split in SPLITS)
    tokens, size = train["tokens"] + held_out["tokens"], train["bytes"] + held_out["bytes"]
    return (
        f"tokenize: {train['documents']:,} training and {held_out['documents']:,} held-out documents, "
        f"{size / 1e6:,.1f} MB, {tokens:,} tokens ({size / tokens:.2f} bytes each, {index['vocab_size']:,} entries), "
        f"{held_out['documents_at_least']['4096']} held-out documents of 4,096 tokens or more, the longest of "
        f"{held_out['longest_document']:,}; "
        f"{seconds:.0f} s -> {directory}"
    )


if __name__ == "__main__":
    from pipelines.command import main

    main(run)
