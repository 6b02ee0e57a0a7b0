"""The split goes by content: neither side is empty, the fraction is about right, and equal texts stay together."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.configuration import ConfigError
from pipelines import split
from pipelines.corpora import Document
from pipelines.split import measured, sample, survey


class Texts:
    """A corpus of texts in memory; `fraction` as a corpus of files reports it."""

    def __init__(self, texts: Sequence[str], known: bool = True) -> None:
        self.texts = texts
        self.fraction = 0.0 if known else None

    def documents(self) -> Iterator[Document]:
        for index, text in enumerate(self.texts, start=1):
            if self.fraction is not None:
                self.fraction = index / len(self.texts)
            yield Document.of(f"text {index}", text)


def sides(corpus: Texts, held_out: float, limit: int | None = None) -> dict[str, set[str]]:
    facts = survey(corpus, limit, held_out)
    found: dict[str, set[str]] = {"train": set(), "held_out": set()}
    for item in measured(corpus, limit):
        found[facts.split_of(item.digest)].update(item.document.pieces())
    return found


@given(
    texts=st.lists(st.sampled_from([f"document {i}" for i in range(9)]), min_size=2),
    held_out=st.floats(0.001, 0.999),
)
def test_both_sides_hold_documents_and_share_none(texts: list[str], held_out: float) -> None:
    if len(set(texts)) == 1:
        with pytest.raises(ConfigError, match="documents are the same"):
            sides(Texts(texts), held_out)
        return
    found = sides(Texts(texts), held_out)
    assert found["train"]
    assert found["held_out"]
    assert not found["train"] & found["held_out"]
    assert sides(Texts(sorted(texts, reverse=True)), held_out) == found


@pytest.mark.parametrize("held_out", [0.01, 0.1, 0.5])
def test_the_fraction_is_exact_when_the_corpus_is_small(held_out: float) -> None:
    assert len(sides(Texts([str(i) for i in range(700)]), held_out)["held_out"]) == round(700 * held_out)


def test_the_fraction_is_close_when_the_corpus_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "SURVEYED", 1000)
    texts = [f"document {i:04d}" for i in range(8000)]
    assert len(sides(Texts(texts), 0.1)["held_out"]) == pytest.approx(800, rel=0.1)
    size = sum(map(len, texts))
    assert survey(Texts(texts), None, 0.1).total_bytes == pytest.approx(size, rel=0.05)
    assert survey(Texts(texts, known=False), None, 0.1).total_bytes is None
    assert survey(Texts(texts, known=False), 4000, 0.1).total_bytes == pytest.approx(size / 2, rel=0.05)


def test_only_the_first_documents_with_text_are_read() -> None:
    found = sides(Texts(["a", " ", "b", "\n", "c", "d"]), 0.5, limit=2)
    assert found["train"] | found["held_out"] == {"a", "b"}


@pytest.mark.parametrize(
    ("texts", "message"),
    [([], "is empty"), ([" ", "\n\n"], "is empty"), (["a", " "], "one document"), (["a", "a"], "all 2 documents are")],
)
def test_a_corpus_that_cannot_be_split_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        survey(Texts(texts), None, 0.1)


def test_the_sample_is_bounded_even_and_of_training_documents_only() -> None:
    texts = [f"{i:04d}" + "x" * (1000 if i % 2 else 20) for i in range(100)]
    corpus = Texts(texts)
    facts = survey(corpus, None, 0.2)
    training = {text for text in texts if facts.split_of(Document.of("", text).measure()[0]) == "train"}
    taken = list(sample(corpus, None, facts, characters=8000))
    assert sorted(taken) == sorted(text[:100] for text in training)
    assert list(sample(corpus, None, facts, characters=1)) == [text[:1] for text in texts if text in training]
