"""A model of a given family from a folder that another stage wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from models import load_model
from models.configuration import require
from models.language_model import CausalLM
from models.serialization import CheckpointError
from pipelines.config import StageError
from pipelines.data import TokenData
from pipelines.files import sha256_file

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


def require_tokenizer(field: str, folder: str | None, data: TokenData) -> None:
    """`ConfigError` when the tokenizer beside the weights in `folder` is not that of `data`; `field` names the folder.

    A folder without one (a model of bytes, or imported without) shows its vocabulary size only.
    """
    for file in Path(str(folder)).glob("tokenizer.*"):
        require(
            sha256_file(file) == data.index["tokenizer"]["sha256"],
            f"{field}={folder} was trained with another tokenizer than {data.directory}: its {file.name} differs",
        )
