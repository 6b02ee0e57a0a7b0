"""Worker processes that encode blocks of text.

Nothing here or in what it imports needs PyTorch: a worker starts in a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

from pipelines import blocks
from pipelines.text_tokenizer import Tokenizer, load_tokenizer

_tokenizer: Tokenizer  # a worker's own


def encode_all(
    work: Iterable[blocks.Block], tokenizer: Tokenizer, folder: Path, workers: int
) -> Iterator[tuple[blocks.Block, Path]]:
    """Every block with the file in `folder` it is encoded in, in order. A block whose file exists is done already.

    At most 2 * workers + 1 blocks are in memory.

    Raises:
        BrokenProcessPool: when a worker is killed.
    """
    waiting: deque[tuple[blocks.Block, Path, Future[None] | None]] = deque()
    start = multiprocessing.get_context("spawn")  # a fork would copy locks that the progress bar's thread holds
    pool = ProcessPoolExecutor(workers, start, initializer=_start_worker, initargs=(tokenizer.file,))

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
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(tokenizer_file: Path | None) -> None:
    """Load the tokenizer once, leave Ctrl-C to the parent, and end when the parent is gone, however it went."""
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenizer = load_tokenizer(tokenizer_file)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker has a parent to wait for"
    parent.join()
    os._exit(1)


def _encode(block: blocks.Block, file: Path) -> None:
    blocks.encode(block, _tokenizer, file)
