"""What the benchmarks compare is comparable, and what they print can be read by people and by programs."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import chunk_training, decode, looped_training, neural_memory, prefill, training
from benchmarks.timing import alternate, promise
from models.language_model import state_bytes

SMALL = {"width": 16, "layers": 1, "heads": 2, "hidden": 24}


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_sides_take_turns_and_the_warm_up_does_not_count():
    calls = []
    seconds = alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=2, warmup=1)
    assert calls == ["a", "b"] * 3
    assert seconds.keys() == {"a", "b"}


def test_a_promise_is_kept_in_its_direction():
    assert promise(1.2, 1.0)["met"]
    assert not promise(0.99, 1.0)["met"]
    assert promise(1.05, 1.1, at_least=False)["met"]
    assert not promise(1.2, 1.1, at_least=False)["met"]


def test_llama_has_our_parameters_and_shapes(monkeypatch):
    monkeypatch.setattr(training, "SHAPE", training.SHAPE | {"layers": 1, "vocab_size": 64})
    ours, theirs = training.pair()
    tokens = torch.randint(64, (2, 8))
    assert parameters(ours) == parameters(theirs)
    assert ours(tokens).shape == theirs(tokens).logits.shape


@pytest.mark.parametrize("depth", [1, 2])
def test_titans_has_memories_of_our_shape(depth):
    ours = neural_memory.NeuralMemory(neural_memory.WIDTH, neural_memory.HEADS, neural_memory.CHUNK, depth)
    theirs = neural_memory.titans(depth, neural_memory.CHUNK)
    assert sum(weights.numel() for weights in theirs.memory_model_parameters) == ours.initial.numel()
    assert theirs.spectral_norm_surprises
    x = torch.randn(2, 2 * neural_memory.CHUNK, neural_memory.WIDTH)
    assert theirs(x)[0].shape == ours(x, ours.init_state(2), 2)[0].shape


def test_looped_and_unlooped_run_as_many_layers_and_the_head_once_per_loop():
    looped, unlooped = (model.cost(64).training_flops for model in looped_training.pair(SMALL))
    assert looped["attention"] == unlooped["attention"]
    assert looped["mlp"] == unlooped["mlp"]
    assert looped["head"] == looped_training.LOOPS * unlooped["head"]


def test_the_counterpart_predicts_after_every_so_many_layers():
    _, model = looped_training.pair(SMALL | {"layers": 2})
    inputs, targets = torch.randint(64, (2, 2, 8))
    blocks, shallower = model.blocks, []
    found = looped_training.loss_after_every(2, model, inputs, targets)
    for depth in (2, 4, 6, 8):
        model.blocks = blocks[:depth]
        shallower.append(model.cross_entropy(inputs, targets))
    torch.testing.assert_close(found, torch.stack(shallower).mean())


@pytest.mark.parametrize("name", ["melt", "looplm", "transformer_pp"])
def test_decoding_starts_behind_a_full_cache_and_writes_in_place(monkeypatch, name):
    monkeypatch.setattr(decode, "CONTEXT", 40)
    monkeypatch.setattr(decode, "TOKENS", 3)
    model = decode.models()[name]
    state = decode.filled(model, 2)
    assert state_bytes(state) == 2 * model.cost(40).state_bytes
    some = decode.decoding(model, state, 2)
    some()
    buffers = [cache.keys.data_ptr() for cache in decode.caches(state)]
    some()
    assert [cache.keys.data_ptr() for cache in decode.caches(state)] == buffers
    assert state_bytes(state) == 2 * model.cost(46).state_bytes


def test_the_last_line_is_json_with_every_ratio(monkeypatch, capsys):
    monkeypatch.setattr(training, "SHAPE", training.SHAPE | {"layers": 1, "vocab_size": 64})
    for module, constants in (
        (training, {"BATCH": 1, "CONTEXT": 16, "REPEATS": 1}),
        (neural_memory, {"SHAPES": {"small": (1, 16)}, "REPEATS": 1}),
        (prefill, {"SHORT": 64, "LONG": 128, "SLICE": 64, "REPEATS": 1}),
        (looped_training, {"BATCH": 1, "CONTEXT": 16, "REPEATS": 1, "VOCABULARY": 64, "SHAPES": {"small": SMALL}}),
        (decode, {"CONTEXT": 32, "BATCHES": (1, 2), "TOKENS": 2, "REPEATS": 1}),
        (chunk_training, {"BATCH": 1, "CONTEXT": 16, "REPEATS": 1, "CHUNKS": (4, None)}),
    ):
        for name, value in constants.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(command, "matmul_flops_per_second", lambda: 1e10)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--threads", "1"])
    command.main()
    output = capsys.readouterr().out
    result = json.loads(output.splitlines()[-1])
    assert set(command.BENCHMARKS) < result.keys()
    assert result["promises"]["made"] == 9 == output.count(" met: ")
    assert result["prefill"]["one sequence of 64 and of 128 tokens"]["state bytes, long / short"]["met"]


def test_a_library_that_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "benchmarks.training", raising=False)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "training"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "transformers is not installed" in capsys.readouterr().err


def test_an_unknown_benchmark_is_refused_by_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "trainings"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "unknown benchmark 'trainings'; choose from training, neural_memory, prefill, " in capsys.readouterr().err
