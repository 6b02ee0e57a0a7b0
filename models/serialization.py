"""A model on disk: `model.safetensors` beside a `config.json` that says what it is and carries its digest.

No pickle is read or written, and weights that do not match the digest are refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from models.configuration import ConfigError, config_from
from models.families import family
from models.language_model import CausalLM

WEIGHTS, CONFIG = "model.safetensors", "config.json"


class CheckpointError(RuntimeError):
    """A model folder that is incomplete, altered, or does not hold what its config describes."""


def save_model(model: CausalLM, folder: str | Path) -> None:
    """Write the model to `folder` (created if needed); both files are whole before either replaces an earlier one."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as scratch:
        weights, config = Path(scratch, WEIGHTS), Path(scratch, CONFIG)
        save_file(tensors, weights)
        description = {
            "family": model.config.family,
            "dtype": _dtype_name(next(model.parameters()).dtype),
            "sha256": _sha256(weights),
            "config": asdict(model.config),
        }
        config.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        weights.chmod(config.stat().st_mode)  # safetensors leaves its files unreadable for others
        for path in (weights, config):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        for path in (weights, config):
            os.replace(path, folder / path.name)


def load_model(folder: str | Path, device: str | torch.device = "cpu") -> CausalLM:
    """The model saved in `folder`, bit for bit.

    Raises:
        CheckpointError: when a file is missing or altered, the family or a field is unknown, or the tensors are not
            exactly those (names, shapes, types) that the config describes.
    """
    folder = Path(folder)
    description = _read_description(folder)
    try:
        module = family(description["family"])
        config = config_from(module.CONFIG, description["config"])
    except ConfigError as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from None
    if _sha256(folder / WEIGHTS) != description["sha256"]:
        raise CheckpointError(f"{folder / WEIGHTS} is not the file {CONFIG} describes: its SHA-256 differs")
    try:
        tensors = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise CheckpointError(f"{folder / WEIGHTS}: {error}") from None
    with torch.random.fork_rng(devices=[]):  # the weights drawn here are replaced below
        model = module.MODEL(config).to(getattr(torch, description["dtype"]))
    _check(folder / WEIGHTS, model.state_dict(), tensors)
    model.load_state_dict(tensors)
    return model.to(device)


def _read_description(folder: Path) -> dict[str, Any]:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} holds no complete model: {name} is missing")
    try:
        description = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{folder / CONFIG} is not JSON: {error}") from None
    expected = {"family": str, "dtype": str, "sha256": str, "config": dict}
    for key, kind in expected.items():
        if not isinstance(description, dict) or not isinstance(description.get(key), kind):
            raise CheckpointError(f"{folder / CONFIG} does not describe a model: {key!r} is missing or mistyped")
    dtype = getattr(torch, description["dtype"], None)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise CheckpointError(f"{folder / CONFIG}: dtype={description['dtype']!r} is no type of weights")
    return description


def _check(path: Path, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """`CheckpointError` unless the tensors have exactly the expected names, shapes and types."""
    for name in sorted(expected.keys() ^ found.keys()):
        raise CheckpointError(
            f"{path}: tensor {name!r} is {'missing' if name in expected else 'not part of the model'}"
        )
    for name, tensor in expected.items():
        want, have = (f"{_dtype_name(t.dtype)} {list(t.shape)}" for t in (tensor, found[name]))
        if want != have:
            raise CheckpointError(f"{path}: tensor {name!r} is {have}, the config asks for {want}")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
