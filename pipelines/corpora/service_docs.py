"""The default corpus: the English documentation of cloud services that ships inside the `botocore` package.

Special here:
- nothing is downloaded; the text is that of the installed version, which `constraints.txt` pins;
- one document per service: every documentation string of its newest description, in the order of the file, without
  markup; a paragraph that has occurred before, in any document, is left out.

It is technical English, about 29 MB in 445 documents, with a small vocabulary and much repetition of phrases:
good for comparing architectures on real, long documents in minutes, not for judging a language model.
"""

from __future__ import annotations

import gzip
import html
import json
import re
from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipelines.corpora.document import CorpusError, Document

# Tags that end a paragraph; every other tag is markup inside one.
BLOCK = re.compile(
    r"</?(?:p|br|ul|ol|li|dl|dt|dd|h[1-6]|pre|table|tr|td|th|note|important|para|fullname)\b[^<>]*>", re.IGNORECASE
)
TAG = re.compile(r"</?[a-zA-Z][^<>]*>|<!--.*?-->", re.DOTALL)


class ServiceDocs:
    """Raises `CorpusError` when `botocore` is not installed."""

    fraction: float | None = 0.0

    def __init__(self) -> None:
        spec = find_spec("botocore")
        if spec is None or not spec.submodule_search_locations:
            raise CorpusError("data.corpus=service_docs needs the package botocore: pip install botocore")
        self._folder = Path(spec.submodule_search_locations[0]) / "data"

    def documents(self) -> Iterator[Document]:
        """One document per service, by name."""
        for index, document in enumerate(self._documents, start=1):
            self.fraction = index / len(self._documents)
            yield document

    @cached_property
    def _documents(self) -> list[Document]:
        """The whole corpus: which paragraphs a service keeps depends on all services before it."""
        seen: set[str] = set()
        documents = []
        for service in sorted(folder for folder in self._folder.iterdir() if folder.is_dir()):
            newest = max(service.glob("*/service-2.json*"), key=lambda file: file.parent.name, default=None)
            if newest is not None:
                fresh = [text for text in dict.fromkeys(_paragraphs(_load(newest))) if text not in seen]
                seen.update(fresh)
                documents.append(Document.of(service.name, "\n\n".join(fresh)))
        return documents


def plain(markup: str) -> Iterator[str]:
    """The paragraphs of a documentation string: no tags, entities decoded, white space collapsed, none empty."""
    for part in BLOCK.split(markup):
        if text := " ".join(html.unescape(TAG.sub("", part)).split()):
            yield text


def _load(file: Path) -> Any:
    data = file.read_bytes()
    return json.loads(gzip.decompress(data) if file.suffix == ".gz" else data)


def _paragraphs(value: Any) -> Iterator[str]:
    """Paragraphs of every documentation string inside a service description."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from plain(item) if key == "documentation" and isinstance(item, str) else _paragraphs(item)
    elif isinstance(value, list):
        for item in value:
            yield from _paragraphs(item)
