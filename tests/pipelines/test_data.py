"""Batches are a pure function of (seed, step); nothing altered, truncated or missing is ever read as data."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.configuration import ConfigError
from pipelines.blocks import dtype_of
from pipelines.data import BatchLoader, TokenData, TokenStream
from pipelines.text_tokenizer import Tokenizer
from pipelines.token_index import DataError
from pipelines.vocabulary import train_bpe
from tests.pipelines.token_data import write_token_data

TEXTS = {
    "train": [f"Document {i}: " + "how long it is differs. " * (i % 7) for i in range(60)],
    "held_out": ["short", "€uro and ünïcode " * 40, "the end " * 9],
}
CONTEXT = 16
BATCH = 4


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_bpe(TEXTS["train"], 300, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


@pytest.fixture(scope="module")
def data(bpe: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> TokenData:
    return write_token_data(tmp_path_factory.mktemp("data") / "tokens", TEXTS, bpe, shard_tokens=500)


@pytest.fixture
def folder(bpe: Tokenizer, tmp_path: Path) -> Path:
    """A copy of the data to damage."""
    return write_token_data(tmp_path / "tokens", TEXTS, bpe, shard_tokens=500).directory


def test_documents_come_back_whole_across_shards(data: TokenData) -> None:
    assert len(data.index["splits"]["train"]["shards"]) > 2
    for split, texts in TEXTS.items():
        documents = data.documents(split)
        assert [data.tokenizer.decode(document) for document in documents] == texts
        assert [document[-1] for document in documents] == [data.separator] * len(texts)
        assert documents.sizes.tolist() == [len(text.encode()) for text in texts]
        assert [int(data.token_bytes[document].sum()) for document in documents] == documents.sizes.tolist()
        assert np.concatenate(documents[:]).tolist() == data.stream(split).read(0, len(data.stream(split))).tolist()
        assert documents[-1].tolist() == documents[len(texts) - 1].tolist()
    with pytest.raises(IndexError):
        data.documents("train")[len(TEXTS["train"])]


def test_the_index_states_the_data(data: TokenData) -> None:
    for split, texts in TEXTS.items():
        stated = data.index["splits"][split]
        lengths = [len(document) - 1 for document in data.documents(split)]
        assert stated["documents"] == len(texts)
        assert stated["tokens"] == len(data.stream(split)) == sum(lengths) + len(texts)
        assert stated["bytes"] == sum(len(text.encode()) for text in texts)
        assert stated["longest_document"] == max(lengths)
        assert stated["documents_at_least"]["1024"] == 0
    assert data.index["dtype"] == "uint16"
    assert data.vocab_size == 300
    assert data.tokenizer.vocab_size == 300


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), ends=st.tuples(st.integers(0, 30), st.integers(0, 30))
)
def test_a_stream_reads_as_one_array(sizes: list[int], ends: tuple[int, int]) -> None:
    whole = np.arange(sum(sizes), dtype=np.uint16)
    stream = TokenStream(np.split(whole, np.cumsum(sizes)[:-1]))
    start, stop = sorted(min(end, len(whole)) for end in ends)
    assert len(stream) == len(whole)
    assert stream.read(start, stop).tolist() == whole[start:stop].tolist()


def test_a_batch_depends_on_seed_and_step_alone(data: TokenData, folder: Path) -> None:
    forward = [data.batch(1, step, BATCH, CONTEXT) for step in range(50)]
    again = TokenData.open(folder, verify=False)
    for step in reversed(range(50)):
        again.batch(2, step, BATCH, CONTEXT)
        assert torch.equal(again.batch(1, step, BATCH, CONTEXT), forward[step])
    assert forward[0].dtype == torch.int64
    assert forward[0].shape == (BATCH, CONTEXT + 1)


def test_a_sample_is_one_whatever_the_batch_size(data: TokenData) -> None:
    small = torch.cat([data.batch(0, step, 2, CONTEXT) for step in range(12)])
    large = torch.cat([data.batch(0, step, 8, CONTEXT) for step in range(3)])
    assert torch.equal(small, large)


def test_an_epoch_visits_every_window_once_in_an_order_of_its_own(data: TokenData) -> None:
    windows = data.training_windows(CONTEXT)
    stream = data.stream("train").read(0, len(data.stream("train")))
    expected = sorted(stream[i * CONTEXT : (i + 1) * CONTEXT + 1].tolist() for i in range(windows))
    steps = -(-2 * windows // BATCH)

    def rows(seed: int) -> list[list[int]]:
        return torch.cat([data.batch(seed, step, BATCH, CONTEXT) for step in range(steps)]).tolist()

    seen = rows(0)
    first, second = seen[:windows], seen[windows : 2 * windows]
    assert sorted(first) == sorted(second) == expected
    assert first != second
    assert first != expected
    assert rows(1)[:windows] != first


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_the_global_batch_and_resume_at_any_step(data: TokenData, world_size: int) -> None:
    whole = [data.batch(3, step, BATCH, CONTEXT) for step in range(5)]
    loaders = [BatchLoader(data, 3, BATCH, CONTEXT, 5, rank=rank, world_size=world_size) for rank in range(world_size)]
    joined = [torch.cat(parts) for parts in zip(*loaders, strict=True)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(joined, whole, strict=True))
    resumed = BatchLoader(data, 3, BATCH, CONTEXT, 5, first=3)
    assert len(resumed) == 2
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(resumed, whole[3:], strict=True))


def test_what_does_not_fit_the_data_is_refused(data: TokenData) -> None:
    tokens = len(data.stream("train"))
    assert data.training_windows(tokens - 1) == 1
    with pytest.raises(ConfigError, match=rf"pretrain.context={tokens}, batch_size=1: the .* hold 0 windows"):
        data.training_windows(tokens)
    with pytest.raises(ConfigError, match=rf"context={tokens // 3}, batch_size=4: .* hold 3 windows, fewer than one"):
        data.batch(0, 0, 4, tokens // 3)
    with pytest.raises(ConfigError, match=r"held-out tokens in .* fill no window"):
        data.held_out_windows(len(data.stream("held_out")), 1)
    with pytest.raises(ConfigError, match="batch_size=4 must be a multiple of the 3 devices"):
        BatchLoader(data, 0, 4, CONTEXT, 1, world_size=3)
    with pytest.raises(ConfigError, match=r"model.vocab_size=257 must be 300"):
        data.require_vocab(257)
    data.require_vocab(300)


def test_validation_windows_are_spread_and_disjoint(data: TokenData) -> None:
    stream = data.stream("held_out").read(0, len(data.stream("held_out")))
    every = data.held_out_windows(CONTEXT, 10**6)
    assert every.shape == ((len(stream) - 1) // CONTEXT, CONTEXT + 1)
    assert every[:, :-1].flatten().tolist() == stream[: every[:, :-1].numel()].tolist()
    some = data.held_out_windows(CONTEXT, 4 * CONTEXT)
    assert some.tolist() == [every[row * len(every) // 4].tolist() for row in range(4)]


def test_the_digest_tells_data_apart(data: TokenData, bpe: Tokenizer, tmp_path: Path) -> None:
    assert write_token_data(tmp_path / "same", TEXTS, bpe, shard_tokens=500).digest == data.digest
    other = TEXTS | {"held_out": ["short", "other"]}
    assert write_token_data(tmp_path / "other", other, bpe, shard_tokens=500).digest != data.digest
    assert write_token_data(tmp_path / "bytes", TEXTS).digest != data.digest


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    assert [dtype_of(size).name for size in (257, 1 << 16, (1 << 16) + 1)] == ["uint16", "uint16", "uint32"]


NAMES = ["train-00001.bin", "held_out-00000.bin", "tokenizer.json", "train-documents.npy", "index.json"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", ["altered", "truncated", "missing"])
def test_damage_is_named(folder: Path, name: str, damage: str) -> None:
    content = bytearray((folder / name).read_bytes())
    if damage == "altered":
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
    elif damage == "truncated":
        (folder / name).write_bytes(content[:-2])
    else:
        (folder / name).unlink()
    message = "no token data" if (name, damage) == ("index.json", "missing") else f"{name} is .*{damage}"
    with pytest.raises(DataError, match=message):
        TokenData.open(folder)


def test_sizes_are_compared_even_without_reading_shards(folder: Path) -> None:
    with open(folder / "train-00000.bin", "ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=r"train-00000.bin is altered or truncated: 1,001 bytes, not 1,000"):
        TokenData.open(folder, verify=False)


def test_an_edited_or_foreign_index_is_refused(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | {"vocab_size": 299}))
    with pytest.raises(DataError, match=r"index.json is altered: its digest does not match"):
        TokenData.open(folder)
    (folder / "index.json").write_text(json.dumps(index | {"format": 99}))
    with pytest.raises(DataError, match=r"index.json is not of format 1"):
        TokenData.open(folder)


def test_tokens_are_read_only(data: TokenData) -> None:
    with pytest.raises(ValueError, match="read-only"):
        data.stream("train").read(0, 3)[0] = 1
