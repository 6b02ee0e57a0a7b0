"""Which documents are held out: decided by their content, never by their position or by who reads them.

A document is held out when its SHA-256 is at most a threshold, so equal documents always fall on the same side. In a
corpus of at most 10,000 documents the threshold is the k-th lowest SHA-256, with k the number to hold out; in a larger
one, that fraction of the range of SHA-256. It lies between the digests of documents that were read, so that neither
side is ever empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from models.configuration import require
from pipelines.corpora import Corpus, Document

SURVEYED = 10_000
SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Measured:
    """A document with the SHA-256 and the length in bytes of its UTF-8 text."""

    document: Document
    digest: bytes
    size: int


@dataclass(frozen=True)
class Survey:
    """What the first documents of a corpus say about all of it."""

    threshold: bytes
    training_documents: int  # among those surveyed
    total_bytes: int | None  # of the whole corpus, estimated if it was not surveyed whole; None if unknown

    def split_of(self, digest: bytes) -> str:
        return "held_out" if digest <= self.threshold else "train"


def measured(corpus: Corpus, limit: int | None) -> Iterator[Measured]:
    """The corpus's documents that hold more than white space, at most `limit` of them."""
    filled = (Measured(document, *sizes) for document in corpus.documents() if (sizes := document.measure())[1] > 0)
    return islice(filled, limit)


def survey(corpus: Corpus, limit: int | None, held_out: float) -> Survey:
    """Read the first documents and choose the threshold.

    Args:
        limit: documents to read of the corpus at most, or None.
        held_out: fraction of the documents to hold out.
    Raises:
        ConfigError: for an empty corpus, or one that cannot be split in two.
    """
    documents = measured(corpus, limit)
    digests, total = [], 0
    for item in islice(documents, SURVEYED):
        digests.append(item.digest)
        total += item.size
    fraction = corpus.fraction
    complete = next(documents, None) is None
    require(bool(digests), "data.corpus is empty: no document holds any text")
    require(len(digests) > 1, "data.corpus holds one document; holding one out takes at least two")
    distinct = sorted(set(digests))  # as bytes: big-endian numbers of 256 bits
    require(len(distinct) > 1, f"data.corpus: all {len(digests)} documents are the same; holding one out takes two")
    by_rank = sorted(digests)[max(1, round(held_out * len(digests))) - 1]
    wanted = by_rank if complete else int(held_out * (1 << 256)).to_bytes(32, "big")
    threshold = min(max(wanted, distinct[0]), distinct[-2])
    if not complete:
        by_source = total / fraction if fraction else None
        by_limit = total / len(digests) * limit if limit else None
        total = min((round(estimate) for estimate in (by_source, by_limit) if estimate), default=None)
    return Survey(threshold, sum(digest > threshold for digest in digests), total)


def sample(corpus: Corpus, limit: int | None, survey: Survey, characters: int) -> Iterator[str]:
    """Text of the surveyed training documents, at most `characters`: the same share of each, from its start."""
    share = max(1, characters // survey.training_documents)
    for item in islice(measured(corpus, limit), SURVEYED):
        if survey.split_of(item.digest) == "train":
            left = share
            for piece in item.document.pieces():
                yield piece[:left]
                left -= len(piece)
                if left <= 0:
                    break
