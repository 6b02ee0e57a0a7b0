"""Ouro's published checkpoints as our LoopLM, and back under the same names.

Special here:
- names and shapes are checked before a byte of weights is read, and everything missing, extra or misshaped is listed;
- tensors are copied one at a time out of memory-mapped files, so that the peak is the model and one tensor.

A checkpoint is a folder with `config.json` and either `model.safetensors` or the shards that
`model.safetensors.index.json` lists.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.configuration import ConfigError, config_from
from models.looped.looplm import LoopLM, LoopLMConfig
from models.serialization import CheckpointError

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"

FIELDS = {  # ours -> theirs, in `config.json`
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "loops": "total_ut_steps",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "exit_threshold": "early_exit_threshold",
}
FIXED = {"hidden_act": "silu", "tie_word_embeddings": False, "use_sliding_window": False, "rope_scaling": None}
NAMES = {  # ours -> theirs
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "exit_gate.weight": "model.early_exit_gate.weight",
    "exit_gate.bias": "model.early_exit_gate.bias",
    "head.weight": "lm_head.weight",
}
LAYER_NAMES = {  # inside a layer: ours -> theirs
    "attention_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "attention_out_norm": "input_layernorm_2",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
    "mlp_out_norm": "post_attention_layernorm_2",
}


def import_ouro(folder: str | Path) -> LoopLM:
    """The checkpoint in `folder`, in its own dtype.

    Raises:
        CheckpointError: for a missing or unreadable file, a config that no model here fits, tensors of several dtypes,
            or names and shapes other than the config asks for (all of them listed).
    """
    folder = Path(folder)
    config = read_config(folder / CONFIG)
    with torch.device("meta"):
        model = LoopLM(config)
    names = {ours: ouro_name(ours) for ours in model.state_dict()}
    with _opened(folder) as files:
        _require_tensors(folder, model, {name: file.get_slice(name) for name, file in files.items()})
        weights = {ours: files[theirs].get_tensor(theirs).clone() for ours, theirs in names.items()}
    model.load_state_dict(weights, assign=True)
    return model


def export_ouro(model: LoopLM, folder: str | Path, shard_bytes: int = 5 * 10**9) -> None:
    """Write `model` to `folder` as a checkpoint that `import_ouro` reads, in shards when it is larger than one."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {ouro_name(name): tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(each.nbytes for each in shards[-1].values()) + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    if len(shards) == 1:
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    else:
        files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        for file, shard in zip(files, shards, strict=True):
            save_file(shard, folder / file, {"format": "pt"})
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
        }
        _write_json(folder / INDEX, index)
    _write_json(folder / CONFIG, _description(model))


def read_config(path: Path) -> LoopLMConfig:
    """Our config for an Ouro `config.json`; `CheckpointError` where it asks for something LoopLM does not do."""
    theirs = _read_json(path)
    if theirs.get("model_type") != "ouro":
        raise CheckpointError(f"{path}: model_type={theirs.get('model_type')!r} is not 'ouro'")
    missing = [name for name in FIELDS.values() if name not in theirs]
    if missing:
        raise CheckpointError(f"{path}: {', '.join(missing)} missing")
    for name, accepted in FIXED.items():
        if theirs.get(name, accepted) != accepted:
            raise CheckpointError(f"{path}: {name}={theirs[name]!r} is not supported, only {accepted!r}")
    fields = {ours: theirs[name] for ours, name in FIELDS.items()}
    if fields["kv_heads"] == fields["heads"]:
        fields["kv_heads"] = None
    try:
        config = config_from(LoopLMConfig, fields)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if theirs.get("head_dim", config.head_width) != config.head_width:
        raise CheckpointError(f"{path}: head_dim={theirs['head_dim']} is not hidden_size / num_attention_heads")
    return config


def ouro_name(name: str) -> str:
    """Their name of one of our tensors."""
    if not name.startswith("layers."):
        return NAMES[name]
    _, layer, rest = name.split(".", 2)
    part, _, kind = rest.rpartition(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


@contextmanager
def _opened(folder: Path) -> Iterator[dict[str, Any]]:
    """The open file of every tensor, by the tensor's name."""
    if (folder / INDEX).is_file():
        places = _read_json(folder / INDEX).get("weight_map", {})
        files = sorted(set(places.values()))
    else:
        files = [WEIGHTS]
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for file in files:
            if not (folder / file).is_file():
                raise CheckpointError(f"{folder} holds no complete checkpoint: {file} is missing")
            try:
                handle = stack.enter_context(safe_open(folder / file, framework="pt"))
            except SafetensorError as error:
                raise CheckpointError(f"{folder / file}: {error}") from None
            found |= dict.fromkeys(handle.keys(), handle)
        yield found


def _require_tensors(folder: Path, model: LoopLM, found: Mapping[str, Any]) -> None:
    """`CheckpointError` listing every tensor that is missing, extra or of another shape, or that the types differ."""
    expected = {ouro_name(name): list(tensor.shape) for name, tensor in model.state_dict().items()}
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [f"extra {name}" for name in sorted(found) if name not in expected]
    for name, shape in expected.items():
        have = found[name].get_shape() if name in found else shape
        if have != shape:
            problems.append(f"{name} is {have}, the config asks for {shape}")
    if problems:
        raise CheckpointError(f"{folder}: {len(problems)} tensors do not fit: {'; '.join(problems)}")
    types = sorted({tensor.get_dtype() for tensor in found.values()})
    if len(types) > 1:
        raise CheckpointError(f"{folder}: tensors of several types ({', '.join(types)}); convert them to one")


def _description(model: LoopLM) -> dict[str, Any]:
    values = {theirs: getattr(model.config, ours) for ours, theirs in FIELDS.items()}
    return {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        **values,
        "num_key_value_heads": model.config.groups,
        "head_dim": model.config.head_width,
        **FIXED,
        "torch_dtype": str(model.head.weight.dtype).removeprefix("torch."),
    }


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} holds no complete checkpoint: {path.name} is missing")
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
