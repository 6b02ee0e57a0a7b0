"""Small random checkpoints in Ouro's format: read, refused when anything is off, and written back as they were."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models import build_model, load_model, preset, save_model
from models.looped.looplm import LoopLM
from models.looped.ouro_checkpoint import export_ouro, import_ouro, ouro_name
from models.serialization import CheckpointError

CONFIG: dict[str, Any] = {
    "architectures": ["OuroForCausalLM"],
    "model_type": "ouro",
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "total_ut_steps": 3,
    "early_exit_threshold": 1.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "max_position_embeddings": 65536,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes as the published files have them."""
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (31, 16),
        "model.norm.weight": (16,),
        "model.early_exit_gate.weight": (1, 16),
        "model.early_exit_gate.bias": (1,),
        "lm_head.weight": (31, 16),
    }
    for i in range(2):
        layer = f"model.layers.{i}"
        for name in "qkvo":
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = (16, 16)
        tensors |= {f"{layer}.mlp.{name}_proj.weight": (24, 16) for name in ("gate", "up")}
        tensors[f"{layer}.mlp.down_proj.weight"] = (16, 24)
        norms = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")
        tensors |= {f"{layer}.{name}.weight": (16,) for name in norms}
    return tensors


def random_tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes().items()}


def write(folder: Path, tensors: dict[str, Tensor], shards: int = 1, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    places = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_arrives_under_its_name(tmp_path, shards):
    tensors = random_tensors()
    model = import_ouro(write(tmp_path, tensors, shards))
    assert len(model.state_dict()) == len(tensors)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[ouro_name(name)]), name
    config = model.config
    assert (config.layers, config.loops, config.hidden, config.rope_theta) == (2, 3, 24, 1e6)
    assert model(torch.zeros(1, 5, dtype=torch.long)).isfinite().all()


@pytest.mark.parametrize("shard_bytes", [10**9, 4000])
def test_exported_again_it_is_the_checkpoint_it_was(tmp_path, shard_bytes):
    tensors = random_tensors(torch.bfloat16)
    source = write(tmp_path / "source", tensors)
    export_ouro(import_ouro(source), tmp_path / "copy", shard_bytes)
    files = sorted((tmp_path / "copy").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes == 4000)
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    written = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert {key: written[key] for key in CONFIG if key in written} == {k: v for k, v in CONFIG.items() if k in written}
    assert import_ouro(tmp_path / "copy").config == import_ouro(source).config


def test_our_own_model_survives_the_round_trip_through_both_formats(tmp_path):
    model = build_model(preset("looplm_tiny", vocab_size=31, width=16, heads=4, kv_heads=2, hidden=24), seed=3)
    assert isinstance(model, LoopLM)
    export_ouro(model, tmp_path / "theirs")
    save_model(import_ouro(tmp_path / "theirs"), tmp_path / "ours")
    again = load_model(tmp_path / "ours")
    assert again.config.kv_heads == 2  # type: ignore[attr-defined]
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_everything_that_does_not_fit_is_listed(tmp_path):
    tensors = random_tensors()
    del tensors["model.layers.1.input_layernorm_2.weight"]
    tensors["model.layers.2.input_layernorm.weight"] = torch.ones(16)
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.ones(24, 16)
    with pytest.raises(CheckpointError) as caught:
        import_ouro(write(tmp_path, tensors))
    message = str(caught.value)
    assert "3 tensors do not fit" in message
    assert "missing model.layers.1.input_layernorm_2.weight" in message
    assert "extra model.layers.2.input_layernorm.weight" in message
    assert "model.layers.0.mlp.down_proj.weight is [24, 16], the config asks for [16, 24]" in message


def test_files_that_are_missing_or_broken_are_named(tmp_path):
    folder = write(tmp_path, random_tensors(), shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        import_ouro(folder)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: "):
        import_ouro(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        import_ouro(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        import_ouro(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama' is not 'ouro'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
        ({"head_dim": 8}, "head_dim=8 is not hidden_size / num_attention_heads"),
        ({"num_attention_heads": 3}, "heads=3 must divide width=16"),
        ({"total_ut_steps": None}, "loops=None must be int"),
    ],
)
def test_a_config_that_no_looplm_fits_is_refused_by_name(tmp_path, config, message):
    with pytest.raises(CheckpointError, match=message):
        import_ouro(write(tmp_path, random_tensors(), **config))


def test_a_config_without_a_field_is_refused_by_name(tmp_path):
    folder = write(tmp_path, random_tensors())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "rope_theta"}))
    with pytest.raises(CheckpointError, match="rope_theta missing"):
        import_ouro(folder)


def test_tensors_of_several_types_are_refused(tmp_path):
    tensors = random_tensors()
    tensors["lm_head.weight"] = tensors["lm_head.weight"].bfloat16()
    with pytest.raises(CheckpointError, match=r"several types \(BF16, F32\)"):
        import_ouro(write(tmp_path, tensors))
