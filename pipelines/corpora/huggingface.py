"""Any dataset of the Hugging Face hub (or a local folder in its layout), streamed: only what is read is downloaded.

The defaults in `params.yaml` name the 10-billion-token sample of FineWeb-Edu.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipelines.corpora.document import CorpusError, Document
from pipelines.corpora.text_files import text_of


class HuggingFace:
    """Documents of the train split, in the dataset's order.

    Args:
        dataset: name on the hub, or a local folder.
        subset: its configuration name, or None.
        field: the column that holds the text.
    Raises:
        CorpusError: when the library is not installed, or the dataset cannot be opened.
    """

    fraction: float | None = None

    def __init__(self, dataset: str, subset: str | None, field: str) -> None:
        try:
            import datasets  # optional, and slow to import
        except ImportError:
            raise CorpusError(
                "data.corpus=huggingface needs the package datasets: pip install 'mela-melt[huggingface]'"
            ) from None
        datasets.disable_progress_bars()
        self._name = dataset if subset is None else f"{dataset}/{subset}"
        self._field = field
        self._rows = self._guarded(lambda: datasets.load_dataset(dataset, subset, split="train", streaming=True))

    def documents(self) -> Iterator[Document]:
        rows = iter(self._rows)
        row = 0
        while (record := self._guarded(lambda: next(rows, None))) is not None:
            row += 1
            name = f"{self._name} row {row}"
            yield Document.of(name, text_of(record, self._field, name))

    def _guarded(self, read: Any) -> Any:
        """The library's errors (no such dataset, no network, damaged file) share no base class: all become one line."""
        try:
            return read()
        except Exception as error:
            raise CorpusError(f"data.dataset={self._name}: {' '.join(str(error).split())}") from error
