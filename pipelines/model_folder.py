"""A model of a given family from a folder that another stage wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from models import load_model
from models.configuration import require
from models.language_model import CausalLM
from models.serialization import CheckpointError
from pipelines.config import StageError

Model = TypeVar("Model", bound=CausalLM)


def load_as(kind: type[Model], field: str, folder: str | None) -> Model:
    """The model in `folder`, in evaluation mode on the CPU; `field` is where the configuration names it.

    Raises:
        ConfigError: when there is no folder, or it holds a model of another family.
        StageError: when its files are incomplete or were altered.
    """
    require(
        folder is not None and Path(folder).is_dir(), f"{field}={folder} is no folder; train or import a model first"
    )
    try:
        model = load_model(str(folder))
    except CheckpointError as error:
        raise StageError(str(error)) from None
    require(isinstance(model, kind), f"{field}={folder} is a {model.config.family}, not a {kind.__name__.lower()}")
    assert isinstance(model, kind)
    return model.eval()
