"""Stage `tokenize`: a corpus becomes token shards, split by document, with an index that vouches for them.

Special here:
- one process reads, `execution.workers` encode, and every encoded block is a file in `checkpoints/` at once: after
  `kill -9` the same command goes on where it was, and memory does not grow with the corpus;
- the result depends on the corpus and on `data` alone, bit for bit: not on workers, nor on interruptions.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipelines import blocks
from pipelines.config import DataConfig, PipelineConfig, StageError
from pipelines.corpora import Corpus, open_corpus
from pipelines.shards import write_tokens
from pipelines.split import SPLITS, Survey, measured, sample, survey
from pipelines.text_tokenizer import Tokenizer, load_tokenizer
from pipelines.vocabulary import SAMPLE_PER_ENTRY, open_tokenizer, train_bpe


def run(config: PipelineConfig) -> dict[str, Any]:
    """Tokenize the corpus that `data` names into `data.directory`; returns the index that was written.

    Raises:
        ConfigError: when the corpus or the tokenizer cannot be used as configured.
        StageError: when another process tokenizes into the same folder, or a worker is killed.
    """
    started = time.monotonic()
    data, directory = config.data, Path(config.data.directory)
    with _only_one(directory, Path(config.execution.checkpoints)) as name, _progress() as progress:
        work = Path(config.execution.checkpoints) / f"{name}-{_digest(data)}"
        work.mkdir(parents=True, exist_ok=True)
        tokenizer = open_tokenizer(data)
        corpus = open_corpus(data)
        task = progress.add_task("reading the corpus", total=None)
        facts = survey(corpus, data.documents, data.held_out)
        if tokenizer is None:
            progress.update(task, description="learning the vocabulary")
            texts = sample(corpus, data.documents, facts, SAMPLE_PER_ENTRY * data.vocab_size)
            tokenizer = train_bpe(texts, data.vocab_size, work / "tokenizer.json")
        progress.update(task, description="encoding", total=facts.total_bytes)
        encoded: dict[str, list[Path]] = {split: [] for split in SPLITS}
        for block, file in _encode_all(_blocks(corpus, data, facts), tokenizer, work, config.execution.workers):
            encoded[block.split].append(file)
            progress.advance(task, block.size)
        progress.update(task, description="writing shards")
        index = write_tokens(encoded, tokenizer, {"kind": data.corpus}, data.shard_tokens, directory)
        shutil.rmtree(work)
        progress.update(task, total=sum(index["splits"][split]["bytes"] for split in SPLITS))
    print(_summary(index, directory, time.monotonic() - started))
    return index


def _blocks(corpus: Corpus, data: DataConfig, facts: Survey) -> Iterator[blocks.Block]:
    documents = measured(corpus, data.documents)
    return blocks.fill((facts.split_of(item.digest), item.document.pieces()) for item in documents)


def _encode_all(
    work: Iterator[blocks.Block], tokenizer: Tokenizer, folder: Path, workers: int
) -> Iterator[tuple[blocks.Block, Path]]:
    """Every block with the file it is encoded in, in order; blocks whose file exists are not encoded again."""
    waiting: deque[tuple[blocks.Block, Path, Future[None] | None]] = deque()
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(tokenizer.file,)
    )

    def take() -> tuple[blocks.Block, Path]:
        block, file, future = waiting.popleft()
        if future:
            future.result()
        return block, file

    try:
        for block in work:
            file = folder / block.file_name(tokenizer.digest)
            waiting.append((block, file, None if file.exists() else pool.submit(_encode, block, file)))
            if len(waiting) > 2 * workers:
                yield take()
        while waiting:
            yield take()
    except BrokenProcessPool:
        raise StageError("a tokenizing worker was killed (out of memory?); run again to go on from there") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(tokenizer_file: Path | None) -> None:
    """Load the tokenizer once per worker; leave Ctrl-C to the parent, and end when the parent is gone."""
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenizer = load_tokenizer(tokenizer_file)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker waits for its parent"
    parent.join()
    os._exit(1)


_tokenizer: Tokenizer


def _encode(block: blocks.Block, file: Path) -> None:
    blocks.encode(block, _tokenizer, file)


def _digest(data: DataConfig) -> str:
    """Names the folder of unfinished work. What is in it is checked by content: see `Block.file_name`."""
    return hashlib.sha256(json.dumps(asdict(data), sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def _only_one(directory: Path, checkpoints: Path) -> Iterator[str]:
    """Hold the lock of an output folder; yields a name for work on it."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    name = f"tokenize-{hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:8]}"
    try:
        with FileLock(checkpoints / f"{name}.lock", blocking=False):
            yield name
    except Timeout:
        raise StageError(f"another process is tokenizing into {directory}; wait for it or end it") from None


def _progress() -> Progress:
    return Progress(
        TextColumn("tokenize: {task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )


def _summary(index: dict[str, Any], directory: Path, seconds: float) -> str:
    train, held_out = (index["splits"][split] for split in SPLITS)
    tokens, size = train["tokens"] + held_out["tokens"], train["bytes"] + held_out["bytes"]
    return (
        f"tokenize: {train['documents']:,} training and {held_out['documents']:,} held-out documents, "
        f"{size / 1e6:,.1f} MB, {tokens:,} tokens ({size / tokens:.2f} bytes each, {index['vocab_size']:,} entries), "
        f"{held_out['documents_at_least']['4096']} held-out documents of 4,096 tokens or more; "
        f"{seconds:.0f} s -> {directory}"
    )


if __name__ == "__main__":
    from pipelines.command import main

    main(run)
