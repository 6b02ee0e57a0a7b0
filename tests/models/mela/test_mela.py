"""Mela as a whole, one option at a time: causality, streaming, gradients, controls. The contract tests do the rest."""

from functools import cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from models import build_model
from models.configuration import ConfigError
from models.language_model import state_bytes
from models.mela.config import MelaConfig
from models.mela.mela import Mela

OPTIONS = [
    {},
    {"recursion": "hrm"},
    {"recursion": "trm"},
    {"recursion": "titans"},
    {"h_cycles": 1},
    {"h_cycles": 3},
    {"l_cycles": 2},
    {"h_blocks": 2, "l_blocks": 2},
    {"fusion": "weighted_sum"},
    {"fusion": "none"},
    {"patch_skip": False},
    {"attention": False},
    {"gate": "headwise"},
    {"gate": "none"},
    {"neural_memory": False},
    {"memory_depth": 2},
    {"memory_depth": 2, "memory_expansion": 3, "noop_gate": True},
    {"newton_schulz_steps": 0},
    {"newton_schulz_steps": 0, "memory_depth": 2},
    {"newton_schulz_steps": 1},
    {"newton_schulz_steps": 3},
    {"newton_schulz_steps": 7},
    {"noop_gate": True},
    {"decoder_kv_heads": 1},
    {"memstack": "learned"},
    {"memstack": "none"},
    {"memory_view": "causal"},
    {"memory_view": "causal", "recursion": "titans", "newton_schulz_steps": 0},
    {"memory_view": "causal", "recursion": "hrm", "memstack": "none"},
    {"memory_view": "causal", "memory_tokens": 1, "memory_chunk": 5},
    {"memory_tokens": 9},
    {"memory_chunk": 1, "attention": False},
    {"memory_chunk": 7},
    {"patch_size": 1},
    {"patch_size": 8, "memory_chunk": 2},
    {"memory": "none"},
]
every_option = pytest.mark.parametrize(
    "fields", OPTIONS, ids=lambda fields: ", ".join(f"{k}={v}" for k, v in fields.items())
)
LENGTH = 29  # text chunks start at 0, 8, 16, 24; memory chunks of 6 tokens at 0, 6, 12, 18, 24


def config_of(**fields) -> MelaConfig:
    shape = {"vocab_size": 31, "width": 16, "patch_size": 2, "memory_chunk": 3, "text_chunk": 8, "memory_tokens": 4}
    parts = {
        "heads": 2,
        "memory_heads": 2,
        "decoder_layers": 2,
        "decoder_heads": 2,
        "hidden": 24,
        "l_cycles": 1,
        "h_blocks": 1,
    }
    return MelaConfig(**{**shape, **parts, **fields})  # type: ignore[arg-type]


@cache
def cached_model(fields: tuple, dtype: torch.dtype) -> Mela:
    with torch.inference_mode(False):
        model = build_model(config_of(**dict(fields)), seed=1).to(dtype)
    assert isinstance(model, Mela)
    return model


def model_of(dtype: torch.dtype = torch.float64, **fields) -> Mela:
    """A fresh model; do not change its weights."""
    return cached_model(tuple(fields.items()), dtype)


def tokens_of(batch: int = 2, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(31, (batch, length), generator=torch.Generator().manual_seed(seed))


def streamed(model: Mela, pieces: list[Tensor]) -> Tensor:
    state = model.init_state(pieces[0].shape[0])
    logits = []
    for piece in pieces:
        out, state = model.extend(piece, state)
        logits.append(out)
    return torch.cat(logits, dim=1)


@every_option
@torch.inference_mode()
def test_no_token_reaches_the_past(fields):
    """Starts, middles and ends of text chunks, of memory chunks and of patches: bit for bit, and read from there on."""
    model, tokens = model_of(torch.float32, **fields), tokens_of()
    logits = model(tokens)
    for t in (0, 1, 5, 6, 7, 8, 11, 15, 16, 17, 18, 23, 24, 28):
        changed = tokens.clone()
        changed[0, t] = (changed[0, t] + 1) % 31
        again = model(changed)
        assert torch.equal(again[:, :t], logits[:, :t])
        assert not torch.equal(again[0, t], logits[0, t])
        assert torch.equal(again[1], logits[1])
        chunk_after_next = (t // 8 + 2) * 8
        if model.memory is not None and chunk_after_next < LENGTH and fields.get("neural_memory", True):
            assert not torch.equal(again[0, chunk_after_next], logits[0, chunk_after_next]), "memory did not carry it"


@every_option
@settings(max_examples=4)
@example(cuts=set(range(1, LENGTH)))
@given(cuts=st.sets(st.integers(1, LENGTH - 1)))
@torch.inference_mode()
def test_any_segmentation(fields, cuts):
    model, tokens = model_of(**fields), tokens_of()
    pieces = list(tokens.tensor_split(sorted(cuts), dim=1))
    torch.testing.assert_close(streamed(model, pieces), model(tokens), rtol=0, atol=1e-9)


@every_option
def test_every_parameter_has_a_gradient(fields):
    model, tokens = build_model(config_of(**fields), seed=0), tokens_of(length=42)
    loss, _ = model.training_loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("view", ["previous", "causal"])
@torch.inference_mode()
def test_what_each_control_changes(view):
    """Text of the first chunk has no memory before it; of its own patches only the causal view reads."""
    model, tokens = model_of(memory_view=view), tokens_of()
    logits = {}
    for control in model.controls:
        model.set_control(control)
        logits[control] = model(tokens)
    model.set_control("on")
    for control, first in {"zero": 1, "shuffle": 1, "reset": 7}.items():  # tokens until a state can differ
        start = first if view == "causal" else (first // 8 + 1) * 8
        assert torch.equal(logits[control][:, :start], logits["on"][:, :start]), control
        assert not torch.isclose(logits[control][:, start:], logits["on"][:, start:]).all(-1).any(), control


@torch.inference_mode()
def test_shuffle_reads_the_memory_of_another_row():
    model, tokens = model_of(), tokens_of(batch=3)
    exchanged = tokens.clone()
    exchanged[:, :24] = tokens[:, :24].roll(1, dims=0)
    model.set_control("shuffle")
    shuffled = model(tokens)
    model.set_control("on")
    torch.testing.assert_close(shuffled[:, 24:], model(exchanged)[:, 24:])  # the last chunk, after another's text


@torch.inference_mode()
def test_reset_forgets_all_but_the_patches_of_the_memory_chunk():
    model, tokens = model_of(), tokens_of()
    model.set_control("reset")
    logits = model(tokens)
    changed = tokens.clone()
    changed[:, :12] = (tokens[:, :12] + 1) % 31
    again = model(changed)
    model.set_control("on")
    assert torch.equal(again[:, 24:], logits[:, 24:])  # reads patches 8-11, whose memory chunks start at token 12
    assert not torch.equal(model(changed)[:, 24:], model(tokens)[:, 24:])


def test_shuffle_needs_another_row():
    model = build_model(config_of())
    model.set_control("shuffle")
    with pytest.raises(ConfigError, match="needs at least 2, not 1"):
        model(tokens_of(batch=1))


def test_a_model_without_memory_has_no_memory_controls():
    model = build_model(config_of(memory="none"))
    assert model.controls == ("on",)
    with pytest.raises(ConfigError, match="zero"):
        model.set_control("zero")


@torch.inference_mode()
def test_chunks_see_each_other_through_memory_alone():
    model, tokens = model_of(torch.float32, memory="none"), tokens_of()
    apart = torch.cat([model(chunk) for chunk in tokens.split(8, dim=1)], dim=1)
    torch.testing.assert_close(model(tokens), apart)


@torch.inference_mode()
def test_only_the_causal_view_sees_the_patches_of_its_own_chunk():
    for view, differs in {"previous": False, "causal": True}.items():
        model, tokens = model_of(memory_view=view), tokens_of(length=8)
        logits = model(tokens)
        model.set_control("zero")
        assert torch.equal(model(tokens), logits) != differs
        model.set_control("on")


@pytest.mark.parametrize("fields", [{}, {"memory_view": "causal"}, {"memory": "none"}, {"memory_tokens": 9}])
@torch.inference_mode()
def test_state_bytes_do_not_depend_on_the_text(fields):
    model, tokens = model_of(torch.float32, **fields), tokens_of(length=120)
    state = model.init_state(2)
    sizes = {state_bytes(state)}
    for piece in tokens.split(7, dim=1):
        _, state = model.extend(piece, state)
        sizes.add(state_bytes(state))
    assert sizes == {2 * model.cost(1).state_bytes}


@torch.inference_mode()
def test_memory_tokens_learn_what_was_far_before():
    """A token many memory chunks back still reaches the text, through the neural memory alone."""
    model, tokens = model_of(), tokens_of(length=100)
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 31
    assert not torch.equal(model(changed)[0, 96:], model(tokens)[0, 96:])
    model = model_of(neural_memory=False)
    assert torch.equal(model(changed)[0, 96:], model(tokens)[0, 96:])


def test_flops_of_cycles_without_gradient_are_counted_once():
    costs = [build_model(config_of(h_cycles=cycles, memstack="none")).cost(64) for cycles in (1, 2, 3)]
    forward, training = (
        [getattr(cost, name)["newton_schulz"] for cost in costs] for name in ("forward_flops", "training_flops")
    )
    assert forward[2] - forward[1] == pytest.approx(training[2] - training[1])
    assert training[0] > 2 * forward[0]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"text_chunk": 9}, "text_chunk=9 must be a multiple of patch_size=2"),
        ({"h_cycles": 4}, "h_cycles=4 needs h_cycles - 1 <= decoder_layers=2"),
        ({"l_cycles": 0}, "l_cycles=0"),
        ({"memory_tokens": 0}, "memory_tokens=0"),
        ({"newton_schulz_steps": -1}, "newton_schulz_steps=-1"),
        ({"retention_bound": 1.0}, "retention_bound=1.0"),
        ({"retention_init": 0.995}, "retention_init=0.995"),
        ({"attention": False, "neural_memory": False}, "memory=none"),
        ({"memory_heads": 3}, "memory_heads=3 must divide width=16"),
        ({"heads": 16}, "heads=16"),
        ({"memory_expansion": 2}, "memory_expansion=2 needs memory_depth=2"),
        ({"recursion": "hlx"}, "did you mean 'hlr'"),
    ],
)
def test_impossible_configurations_are_refused_by_name(fields, named):
    with pytest.raises(ConfigError, match=named):
        config_of(**fields)


def test_memstack_needs_a_layer_per_cycle_only_when_it_is_on():
    assert config_of(h_cycles=4, memstack="none").cycles == 4
