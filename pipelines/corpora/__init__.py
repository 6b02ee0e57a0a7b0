"""The corpora a pipeline can read: `data.corpus` names one."""

from __future__ import annotations

from models.configuration import require
from pipelines.config import DataConfig
from pipelines.corpora.document import Corpus, CorpusError, Document
from pipelines.corpora.huggingface import HuggingFace
from pipelines.corpora.service_docs import ServiceDocs
from pipelines.corpora.text_files import TextFiles

__all__ = ["Corpus", "CorpusError", "Document", "open_corpus"]


def open_corpus(config: DataConfig) -> Corpus:
    """The corpus `config` names. Raises `CorpusError` when it is plain from the start that it cannot be read."""
    if config.corpus == "service_docs":
        return ServiceDocs()
    if config.corpus == "files":
        return TextFiles(config.paths, config.field)
    assert config.corpus == "huggingface", config.corpus  # the network is for who asked for it by name
    require(bool(config.dataset), "data.dataset must name a dataset when data.corpus=huggingface")
    return HuggingFace(config.dataset, config.subset, config.field)
