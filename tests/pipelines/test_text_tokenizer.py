"""Text -> ids -> text is exact; bytes per token add up to the text; what a library decodes, we decode alike."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from models.configuration import ConfigError
from pipelines.blocks import cut
from pipelines.text_tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer, load_tokenizer
from pipelines.vocabulary import open_tokenizer, train_bpe
from tests.pipelines.settings import settings

ENGLISH = [
    f"The {i}th window holds {i * i} tokens, and the memory's update follows it.\n\n\tdéjà vu" for i in range(200)
]
unicode = st.text(st.characters(codec="utf-8"), max_size=200)
words = st.lists(st.sampled_from(["the", "memory", "x.", "é", "日本", "\n", "  ", "<|endoftext|>", "12", "'s"])).map(
    " ".join
)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_bpe(ENGLISH, 400, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


@pytest.fixture(scope="module")
def mistral() -> SentencePieceTokenizer:
    tokenizer = open_tokenizer(settings(data={"tokenizer": "mistral", "vocab_size": 32000}).data)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


@pytest.fixture(scope="module")
def llama_style(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A `tokenizer.json` made as Llama 2's: a space before every text, byte fallback, an end token."""
    library = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    words = [word for text in ENGLISH for word in text.replace(" ", "\n ").split("\n")]  # no entry crosses a space
    library.train_from_iterator(words, trainers.BpeTrainer(vocab_size=600, special_tokens=specials))
    spec = json.loads(library.to_str())
    spec["added_tokens"] = spec["added_tokens"][:3]  # the bytes are entries like any other
    file = tmp_path_factory.mktemp("llama") / "tokenizer.json"
    file.write_text(json.dumps(spec), "utf-8")
    return load_tokenizer(file)


@given(text=unicode | words)
def test_every_text_survives_bpe_and_bytes(bpe: Tokenizer, text: str) -> None:
    for tokenizer in (bpe, ByteTokenizer()):
        (ids,) = tokenizer.encode_batch([text])
        assert ids.dtype == np.uint32
        assert tokenizer.decode(ids) == text
        assert sum(len(tokenizer.token_bytes[token]) for token in ids) == len(text.encode())
        assert tokenizer.separator not in ids
        assert all(token < tokenizer.vocab_size for token in ids)


@given(text=unicode.map(lambda text: text.replace("▁", "")) | words)
def test_sentencepiece_texts_survive_and_decode_as_the_library_does(
    mistral: Tokenizer, llama_style: Tokenizer, text: str
) -> None:
    (ids,) = mistral.encode_batch([text])
    assert mistral.decode(ids) == text == mistral._library.decode(ids.tolist())  # type: ignore[attr-defined]
    (ids,) = llama_style.encode_batch([text])
    assert llama_style.decode(ids) == text == llama_style._library.decode(ids.tolist())  # type: ignore[attr-defined]


@given(texts=st.lists(unicode | words, max_size=4), extra=st.lists(st.integers(0, 399), max_size=20))
def test_streaming_gives_the_same_text_and_no_half_character(
    bpe: Tokenizer, texts: list[str], extra: list[int]
) -> None:
    ids = [int(token) for encoded in bpe.encode_batch(texts) for token in (*encoded, bpe.separator)]
    decoder = bpe.decoder()
    shown = [decoder.push(token) for token in ids]
    assert "".join(shown) + decoder.finish() == "".join(texts)
    decoder = bpe.decoder()
    assert "".join(decoder.push(token) for token in extra) + decoder.finish() == bpe.decode(extra)


def test_streaming_waits_for_the_last_byte_of_a_character() -> None:
    decoder = ByteTokenizer().decoder()
    assert [decoder.push(byte) for byte in "a€".encode()] == ["a", "", "", "€"]
    assert decoder.push("€".encode()[0]) == ""
    assert decoder.finish() == "\ufffd"
    assert decoder.push(ord("b")) == "b"


def test_a_stream_takes_the_added_space_off_each_document(mistral: Tokenizer) -> None:
    one, two = mistral.encode_batch(["one", " two"])
    assert mistral.decode([*one, mistral.separator, *two]) == "one two"


@pytest.mark.parametrize("name", ["bpe", "mistral", "llama_style"])
@given(data=st.data())
def test_a_document_cut_at_spaces_gives_the_ids_of_the_whole(
    name: str, bpe: Tokenizer, mistral: Tokenizer, llama_style: Tokenizer, data: st.DataObject
) -> None:
    tokenizer = {"bpe": bpe, "mistral": mistral, "llama_style": llama_style}[name]
    text = " ".join(
        data.draw(st.lists(st.sampled_from(["the", "memory's", "12", "x.\n\ny", "é,", "(b)"]), min_size=40))
    )
    pieces = list(cut([text], length=data.draw(st.integers(16, 80))))
    encoded = tokenizer.encode_batch([piece.text for piece in pieces], [not piece.first for piece in pieces])
    (whole,) = tokenizer.encode_batch([text])
    assert np.concatenate(encoded).tolist() == whole.tolist()


@given(text=unicode | words, length=st.integers(1, 50), places=st.lists(st.integers(0, 200), max_size=5))
def test_pieces_do_not_depend_on_how_the_text_arrives(text: str, length: int, places: list[int]) -> None:
    edges = [0, *sorted(places), len(text)]
    arriving = [text[start:end] for start, end in pairwise(edges)]
    pieces = list(cut([text], length))
    assert list(cut([part for part in arriving if part] or [""], length)) == pieces
    assert "".join(piece.text for piece in pieces) == text
    assert all(len(piece.text) <= length for piece in pieces)
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [piece.first for piece in pieces] == [True] + [False] * (len(pieces) - 1)


def test_bpe_depends_on_the_texts_not_on_their_order(bpe: Tokenizer, tmp_path: Path) -> None:
    again = train_bpe(reversed(ENGLISH), 400, tmp_path / "again.json")
    assert again.digest == bpe.digest
    assert again.vocab_size == 400
    assert again.separator == 399
    assert train_bpe(ENGLISH, 300, tmp_path / "smaller.json").digest != bpe.digest


def test_special_tokens_written_in_a_text_are_text(tmp_path: Path, llama_style: Tokenizer) -> None:
    assert llama_style.separator == 2
    assert llama_style.token_bytes[2] == b""
    (ids,) = llama_style.encode_batch(["a</s>b"])
    assert llama_style.separator not in ids
    assert llama_style.decode(ids) == "a</s>b"


def test_wordpiece_decodes_to_words(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(
        models.WordPiece({"[UNK]": 0, "[SEP]": 1, "token": 2, "##s": 3, "new": 4}, unk_token="[UNK]")
    )
    library.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    library.decoder = decoders.WordPiece()  # type: ignore[assignment]
    library.add_special_tokens(["[UNK]", "[SEP]"])
    library.enable_padding(length=32)
    library.enable_truncation(1)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    (ids,) = tokenizer.encode_batch(["new tokens"])
    assert ids.tolist() == [4, 2, 3]
    assert tokenizer.decode(ids) == "new tokens"
    assert tokenizer.separator == 1


def test_saving_copies_the_file_byte_for_byte(bpe: Tokenizer, mistral: Tokenizer, tmp_path: Path) -> None:
    for tokenizer, name in ((bpe, "tokenizer.json"), (mistral, "tokenizer.model")):
        file = tokenizer.save(tmp_path)
        assert file == tmp_path / name
        again = load_tokenizer(file)
        assert again.digest == tokenizer.digest
        assert list(again.token_bytes) == list(tokenizer.token_bytes)
    assert ByteTokenizer().save(tmp_path) is None
    assert load_tokenizer(None).digest == ByteTokenizer().digest


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"tokenizer": "bite"},
            r"data\.tokenizer='bite' \(did you mean '.*'\?\) is neither a file nor one of bpe",
        ),
        ({"tokenizer": "bytes"}, r"data\.vocab_size=2048 must be 257, the size of data\.tokenizer=bytes"),
        ({"tokenizer": "mistral"}, r"data\.vocab_size=2048 must be 32000"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(data: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_tokenizer(settings(data=data).data)


@pytest.mark.parametrize("name", ["tokenizer.json", "broken.model"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"data.tokenizer: .*{name} is not a tokenizer"):
        open_tokenizer(settings(data={"tokenizer": str(tmp_path / name)}).data)


def test_a_missing_package_and_a_corpus_too_small_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.vocab_size=2048: the training documents give only \d+ entries"):
        train_bpe(ENGLISH, 2048, tmp_path / "tokenizer.json")
    assert not (tmp_path / "tokenizer.json").exists()
    monkeypatch.setattr("pipelines.vocabulary.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install mistral-common"):
        open_tokenizer(settings(data={"tokenizer": "mistral"}).data)
