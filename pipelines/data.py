"""Token data as stages read it: checked against its index, mapped not loaded, and batches without any state.

Special here:
- a batch is a pure function of (seed, step): the same for every model, worker count and resumed run;
- an epoch visits every training window once, in an order drawn from (seed, epoch).

Shapes: `B` sequences of a batch, `T` context length, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.configuration import require
from pipelines.text_tokenizer import Tokenizer, load_tokenizer
from pipelines.token_index import check_file, map_shard, read_index


class TokenStream:
    """The tokens of a split one after another, over all its shards; nothing is read before it is asked for."""

    def __init__(self, shards: Sequence[np.ndarray]) -> None:
        self._shards = shards
        self._starts = np.cumsum([0, *map(len, shards)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` (exclusive): a view where they lie in one shard, read-only."""
        assert 0 <= start <= stop <= len(self), f"[{start}, {stop}) is not inside [0, {len(self)})"
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = max(first, int(np.searchsorted(self._starts, stop, side="left")) - 1)
        parts = [
            self._shards[shard][max(start - self._starts[shard], 0) : stop - self._starts[shard]]
            for shard in range(first, min(last + 1, len(self._shards)))
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [self._shards[0][:0]])


class Documents(Sequence[np.ndarray]):
    """The documents of a split in the order of the corpus: tokens of each, its closing separator last.

    `sizes [documents]`: bytes of each text in UTF-8.
    """

    def __init__(self, stream: TokenStream, boundaries: np.ndarray) -> None:
        self._stream = stream
        self._ends = boundaries[:, 0]
        self.sizes = boundaries[:, 1]

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        return self._stream.read(int(self._ends[place - 1]) if place else 0, int(self._ends[place]))


@dataclass(frozen=True)
class TokenData:
    """A folder written by the stage `tokenize`. Make one with `TokenData.open`."""

    directory: Path
    index: Mapping[str, Any]
    _streams: Mapping[str, TokenStream]
    _documents: Mapping[str, Documents]

    @classmethod
    def open(cls, directory: str | Path, verify: bool = True) -> TokenData:
        """Open the data and check it against its index.

        Args:
            verify: also read every shard and compare digests (about a second per GB). Without it the shards' sizes
                are compared; the index, the tokenizer and the document boundaries are always checked in full.
        Raises:
            DataError: when there is no data, or a file is missing, altered or truncated, naming it.
        """
        directory = Path(directory)
        index = read_index(directory)
        if index["tokenizer"]["file"]:
            check_file(directory / index["tokenizer"]["file"], index["tokenizer"]["sha256"])
        streams, documents = {}, {}
        for split, part in index["splits"].items():
            shards = [map_shard(directory / shard["file"], shard, index["dtype"], verify) for shard in part["shards"]]
            boundaries = directory / part["boundaries"]["file"]
            check_file(boundaries, part["boundaries"]["sha256"])
            streams[split] = TokenStream(shards)
            documents[split] = Documents(streams[split], np.load(boundaries, mmap_mode="r", allow_pickle=False))
        return cls(directory, index, streams, documents)

    @property
    def digest(self) -> str:
        """Identity of the data: SHA-256 over the index, which holds the digest of every file."""
        return self.index["digest"]

    @property
    def vocab_size(self) -> int:
        return self.index["vocab_size"]

    @property
    def separator(self) -> int:
        """The token that closes every document."""
        return self.index["separator"]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer the data was made with."""
        name = self.index["tokenizer"]["file"]
        return load_tokenizer(self.directory / name if name else None)

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes each token stands for, int64 `[V]`; 0 for the separator. Needed for bits per byte."""
        return np.array([len(data) for data in self.tokenizer.token_bytes], np.int64)

    def stream(self, split: str) -> TokenStream:
        """All tokens of `train` or `held_out`."""
        return self._streams[split]

    def documents(self, split: str) -> Documents:
        """The documents of `train` or `held_out`."""
        return self._documents[split]

    def require_vocab(self, vocab_size: int) -> None:
        """Raise `ConfigError` unless a model of this vocabulary fits the data."""
        require(
            vocab_size == self.vocab_size,
            f"model.vocab_size={vocab_size} must be {self.vocab_size}, that of the tokens in {self.directory}",
        )

    def training_windows(self, context: int, batch_size: int = 1) -> int:
        """How many windows of `context + 1` tokens an epoch holds; neighbours share one token.

        Raises:
            ConfigError: when they do not fill one batch.
        """
        tokens = len(self.stream("train"))
        windows = (tokens - 1) // context
        require(
            windows >= batch_size,
            f"pretrain.context={context}, batch_size={batch_size}: the {tokens:,} training tokens in {self.directory} "
            f"hold {max(windows, 0)} windows, fewer than one batch",
        )
        return windows

    def batch(self, seed: int, step: int, batch_size: int, context: int) -> Tensor:
        """The global batch of a step: int64 `[B, T + 1]`, T inputs and the tokens that follow them.

        Sample i = step * B + r (r = 0..B-1) is training window `permutation(seed, i // windows)[i % windows]`.

        Raises:
            ConfigError: when the training tokens do not fill one batch.
        """
        windows = self.training_windows(context, batch_size)
        stream = self.stream("train")
        rows = np.empty((batch_size, context + 1), np.int64)
        for row in range(batch_size):
            epoch, place = divmod(step * batch_size + row, windows)
            start = int(_permutation(seed, epoch, windows)[place]) * context
            rows[row] = stream.read(start, start + context + 1)
        return torch.from_numpy(rows)

    def held_out_windows(self, context: int, tokens: int) -> Tensor:
        """Windows for validation: int64 `[R, T + 1]`, evenly spaced over the held-out tokens, together about `tokens`.

        Args:
            tokens: targets to score, at least `context`; fewer if the split holds fewer.
        Raises:
            ConfigError: when the held-out tokens do not fill one window.
        """
        stream = self.stream("held_out")
        available = (len(stream) - 1) // context
        require(
            available >= 1,
            f"pretrain.context={context}: the {len(stream):,} held-out tokens in {self.directory} fill no window",
        )
        count = min(available, max(1, tokens // context))
        starts = [row * available // count * context for row in range(count)]
        return torch.from_numpy(
            np.stack([stream.read(start, start + context + 1) for start in starts]).astype(np.int64)
        )


@dataclass(frozen=True)
class BatchLoader:
    """The batches of steps `first` to `steps` for one rank: an iterable with a length, as Lightning wants a loader.

    It holds no state of its own: a resumed run makes one that begins at its step. Rank r of n takes rows
    `r * B / n` to `(r + 1) * B / n` of the global batch, so the union over ranks is the same for every n.
    """

    data: TokenData
    seed: int
    batch_size: int  # global
    context: int
    steps: int
    first: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        require(
            self.batch_size % self.world_size == 0,
            f"pretrain.batch_size={self.batch_size} must be a multiple of the {self.world_size} devices",
        )

    def __len__(self) -> int:
        return self.steps - self.first

    def __iter__(self) -> Iterator[Tensor]:
        share = self.batch_size // self.world_size
        for step in range(self.first, self.steps):
            batch = self.data.batch(self.seed, step, self.batch_size, self.context)
            yield batch[self.rank * share : (self.rank + 1) * share]


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, windows: int) -> np.ndarray:
    """The order of an epoch's windows. A batch touches at most two epochs at a time."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(windows)
