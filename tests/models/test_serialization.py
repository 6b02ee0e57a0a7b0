"""Models on disk: what is refused, and that a failed write leaves the earlier model as it was."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import build_model, load_model, preset, save_model
from models import serialization as serialization_module
from models.serialization import CheckpointError


def small_model(**fields):
    return build_model(preset("transformer_pp_tiny", vocab_size=31, width=16, layers=1, hidden=24, **fields))


@pytest.fixture
def folder(tmp_path):
    save_model(small_model(), tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder, **changes):
    description = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**description, **changes}))


def edit_tensors(folder, change):
    """Rewrite the weights, digest included, as a careless exporter would."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, sha256=hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest())


def refused(folder, *words):
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_the_folder_holds_two_readable_files_and_nothing_else(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_equal_models_give_equal_files(folder, tmp_path):
    save_model(small_model(), tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_come_back_as_they_were(tmp_path, dtype):
    model = small_model().to(dtype)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    for name, tensor in model.state_dict().items():
        assert loaded.state_dict()[name].dtype == dtype
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_loading_leaves_the_random_state_alone(folder):
    before = torch.get_rng_state()
    load_model(folder)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_refused(folder, name):
    (folder / name).unlink()
    refused(folder, str(folder), name, "missing")


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "config.json")


@pytest.mark.parametrize("position", [20, -1])
def test_altered_weights_are_refused(folder, position):
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[position] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    refused(folder, "model.safetensors", "SHA-256")


def test_truncated_weights_are_refused(folder):
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    refused(folder, "model.safetensors", "SHA-256")


def test_a_file_that_is_no_safetensors_is_refused(folder):
    (folder / "model.safetensors").write_bytes(b"pickle")
    edit_config(folder, sha256=hashlib.sha256(b"pickle").hexdigest())
    refused(folder, "model.safetensors")


def test_a_missing_tensor_is_refused(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("norm.weight"))
    refused(folder, "norm.weight", "missing")


def test_an_extra_tensor_is_refused(folder):
    edit_tensors(folder, lambda tensors: tensors.update(other=torch.zeros(1)))
    refused(folder, "'other'", "not part of the model")


def test_another_shape_is_refused(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(17)}))
    refused(folder, "norm.weight", "[17]", "[16]")


def test_another_type_is_refused(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(16).double()}))
    refused(folder, "norm.weight", "float64", "float32")


def test_an_unknown_family_is_refused(folder):
    edit_config(folder, family="transformr")
    refused(folder, "transformr", "'transformer'")


def test_an_unknown_field_is_refused(folder):
    description = json.loads((folder / "config.json").read_text())
    edit_config(folder, config={**description["config"], "head": 4})
    refused(folder, "head", "heads")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"family": 1}', "\x00"])
def test_a_config_that_describes_no_model_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    refused(folder, "config.json")


@pytest.mark.parametrize("dtype", ["float31", "nn", "int8"])
def test_an_unknown_type_is_refused(folder, dtype):
    edit_config(folder, dtype=dtype)
    refused(folder, dtype)


def test_a_write_that_fails_leaves_the_earlier_model(folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def disk_full(tensors, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(serialization_module, "save_file", disk_full)
    with pytest.raises(OSError, match="No space left"):
        save_model(small_model(), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
