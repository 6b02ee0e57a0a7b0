"""Every corpus gives whole, clean documents in a fixed order, or says in one line what is wrong with the source."""

import gzip
import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from pipelines.corpora import CorpusError, open_corpus
from pipelines.corpora.document import Document
from pipelines.corpora.huggingface import HuggingFace
from pipelines.corpora.service_docs import ServiceDocs, plain
from pipelines.corpora.text_files import PIECE_BYTES, TextFiles, read_pieces
from tests.pipelines.settings import settings

TEXTS = ["first\ttext\r\n", "zweiter Text: äöü 🜚", "", "\u2028 last "]


def texts(corpus) -> list[str]:
    return ["".join(document.pieces()) for document in corpus.documents()]


@pytest.fixture(scope="module")
def service_docs() -> list[tuple[str, str]]:
    return [(document.name, "".join(document.pieces())) for document in ServiceDocs().documents()]


def test_service_docs_are_many_long_documents_each_paragraph_once(service_docs: list[tuple[str, str]]) -> None:
    names = [name for name, _ in service_docs]
    paragraphs = [text for _, document in service_docs for text in document.split("\n\n") if text]
    assert names == sorted(set(names))
    assert 25e6 < sum(len(text.encode()) for _, text in service_docs) < 40e6
    assert sum(len(text) > 150_000 for _, text in service_docs) >= 24  # about 40,000 tokens of the default vocabulary
    assert len(paragraphs) == len(set(paragraphs))
    assert not any("  " in text or text != text.strip() for text in paragraphs)
    marked_up = sum("<p>" in text or "<code>" in text for text in paragraphs)
    assert marked_up < len(paragraphs) / 1000  # the source escapes some of its markup twice


def test_service_docs_come_alike_every_time(service_docs: list[tuple[str, str]]) -> None:
    again = ServiceDocs()
    first = [(document.name, "".join(document.pieces())) for document in again.documents()]
    assert first == service_docs == [(document.name, "".join(document.pieces())) for document in again.documents()]
    assert again.fraction == 1.0


def test_markup_becomes_paragraphs() -> None:
    markup = "<p>Use <code>a &lt; b</code>&nbsp;&amp;\n <i>c</i>.</p><ul><li> 1</li><li>2</li></ul><!-- x --><p/>end"
    assert list(plain(markup)) == ["Use a < b & c.", "1", "2", "end"]
    assert list(plain("<preview>no</preview> tag &lt;p&gt; <pre>x</pre>")) == ["no tag <p>", "x"]
    assert list(plain("<p> </p>")) == []


def write(folder: Path, name: str) -> Path:
    """`TEXTS` as a file of the kind that `name` asks for."""
    file = folder / name
    lines = "\n".join(json.dumps({"id": i, "body": text}) for i, text in enumerate(TEXTS)).encode()
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"id": range(len(TEXTS)), "body": TEXTS}), file, row_group_size=2)
    elif name.endswith(".gz"):
        file.write_bytes(gzip.compress(lines, mtime=0))
    elif name.endswith(".zst"):
        half = len(lines) // 2  # two frames, as concatenated files have
        file.write_bytes(b"".join(zstandard.compress(part) for part in (lines[:half], lines[half:])))
    else:
        file.write_bytes(lines)
    return file


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_every_kind_of_table_gives_the_same_texts(tmp_path: Path, name: str) -> None:
    corpus = TextFiles([str(write(tmp_path, name))], "body")
    assert texts(corpus) == TEXTS == texts(corpus)
    assert corpus.fraction == 1.0


def test_files_are_read_by_path_and_once(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("b/2.md", "1.txt", "b/3.txt"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + name.encode() + b"\r\n")
    corpus = TextFiles([f"{tmp_path}/**/*.txt", f"{tmp_path}/**/*.*d", f"{tmp_path}/1.*"], "text")
    assert texts(corpus) == ["1.txt\r\n", "b/2.md\r\n", "b/3.txt\r\n"]


def test_a_text_file_comes_in_pieces_that_split_no_character(tmp_path: Path) -> None:
    text = "€" * PIECE_BYTES  # three bytes each: no piece ends with a whole one
    (tmp_path / "a.txt").write_bytes(text.encode())
    pieces = list(read_pieces(tmp_path / "a.txt"))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= PIECE_BYTES


def test_a_document_knows_its_size_and_blank_ones_have_none() -> None:
    parts = Document("x", lambda: iter(["a", "€ ", "b"]))
    assert parts.measure() == Document.of("x", "a€ b").measure()
    assert parts.measure()[1] == 6
    assert Document("x", lambda: iter([" ", "\n\u2003"])).measure()[1] == 0
    with pytest.raises(CorpusError, match=r"x: .*'\\ud800' is not valid Unicode"):
        Document.of("x", "a\ud800").measure()


def test_null_is_an_empty_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": null}\n\n{"text": "b"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([None, "b"])}), tmp_path / "b.parquet")
    assert texts(TextFiles([f"{tmp_path}/*"], "text")) == ["", "b", "", "b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"ab\xff", r"a\.txt: byte 0xff at offset 2 is not UTF-8"),
        ("a.txt", b"x" * PIECE_BYTES + b"\xe2\x82", rf"a\.txt: byte 0xe2 at offset {PIECE_BYTES} is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', r"a\.jsonl line 2: byte 0xff at offset 10 is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', r"a\.jsonl line 2: not JSON"),
        ("a.jsonl", b'{"texts": "a", "id": 1}', r"no column 'text' \(did you mean 'texts'\?\); there are texts, id"),
        ("a.jsonl", b'["a"]', r"line 1: a record must be an object with the column 'text', not list"),
        ("a.jsonl", b'{"text": 3}', r"line 1: column 'text' must hold text, not int"),
        ("a.jsonl.gz", b"plain", r"a\.jsonl\.gz is damaged"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}' * 99, mtime=0)[:-12], r"a\.jsonl\.gz is damaged"),
        ("a.jsonl.zst", b"plain", r"a\.jsonl\.zst is damaged"),
        ("a.parquet", b"plain", r"a\.parquet is damaged"),
        ("a.csv", b"text", r"a\.csv is none of \.txt \.md"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        [document.measure() for document in TextFiles([f"{tmp_path}/*"], "text").documents()]


def test_parquet_columns_are_checked(tmp_path: Path) -> None:
    file = write(tmp_path, "a.parquet")
    with pytest.raises(CorpusError, match=r"no column 'text'; there are id, body"):
        texts(TextFiles([str(file)], "text"))
    with pytest.raises(CorpusError, match=r"column 'id' must hold text, not int64"):
        texts(TextFiles([str(file)], "id"))


@pytest.mark.parametrize("pattern", ["missing.txt", "*.md", "folder"])
def test_a_glob_that_matches_no_file_is_refused(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(CorpusError, match="matches no file"):
        open_corpus(settings(data={"corpus": "files", "paths": [str(tmp_path / pattern)]}).data)


def test_a_file_is_named_exactly_brackets_and_all(tmp_path: Path) -> None:
    (tmp_path / "a [draft].md").write_text("one")
    (tmp_path / "a d.md").write_text("what the brackets mean as a pattern")
    assert texts(TextFiles([f"{tmp_path}/a [draft].md"], "text")) == ["one"]


def test_huggingface_streams_a_dataset(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl")
    corpus = HuggingFace(str(tmp_path), None, "body")
    assert texts(corpus) == TEXTS == texts(corpus)
    with pytest.raises(CorpusError, match=r"row 1: no column 'text'; there are id, body"):
        texts(HuggingFace(str(tmp_path), None, "text"))


def test_huggingface_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"data\.dataset=.*nowhere"):
        HuggingFace(str(tmp_path / "nowhere"), None, "text")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CorpusError, match=r"pip install 'mela-melt\[huggingface\]'"):
        HuggingFace("some/dataset", None, "text")
