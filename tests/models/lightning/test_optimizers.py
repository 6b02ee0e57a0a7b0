"""Optimizers and schedule: AdamW as torch has it, Muon against torch's own in bf16, states that survive a resume."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from models import build_model, preset
from models.language_model import CausalLM
from models.lightning.optimizers import MUON_MOMENTUM, MuonAdamW, build_optimizer, learning_rate_factor


def model_of(family: str = "transformer_pp_tiny") -> CausalLM:
    return build_model(preset(family, vocab_size=31, width=16, hidden=24))


def optimizer_of(model: nn.Module, name: str, muon_lr: float = 0.02) -> torch.optim.Optimizer:
    return build_optimizer(model, name, 0.01, muon_lr, (0.9, 0.95), 0.1)


def train_step(model: CausalLM, optimizer: torch.optim.Optimizer, seed: int) -> None:
    tokens = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model.training_loss(tokens[:, :-1], tokens[:, 1:])[0].backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("family", ["transformer_pp_tiny", "looplm_tiny", "melt_tiny"])
def test_every_parameter_is_in_one_group_and_only_matrices_decay(family, name):
    model = model_of(family)
    optimizer = optimizer_of(model, name)
    owners = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(owners) == sorted(id(parameter) for parameter in model.parameters())
    for group in optimizer.param_groups:
        assert all((parameter.ndim >= 2) is (group["weight_decay"] > 0) for parameter in group["params"])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_what_mela_starts_from_and_scales_by_is_neither_decayed_nor_orthogonalised(name):
    model = build_model(preset("mela_tiny", vocab_size=31, memstack="learned"))
    groups = optimizer_of(model, name).param_groups
    left_alone = {id(p) for group in groups if group["weight_decay"] == 0 for p in group["params"]}
    names = {key for key, parameter in model.named_parameters() if id(parameter) in left_alone}
    assert {"memory.initial.tokens", "decoder.memstack.scale"} <= names
    assert sum(key.endswith("neural_memory.initial") for key in names) == 3
    assert not any(key.endswith("proj.weight") for key in names)
    assert not any(group["muon"] and group["weight_decay"] == 0 for group in groups)


def test_muon_takes_the_hidden_matrices_and_nothing_else():
    model = model_of()
    groups = optimizer_of(model, "muon").param_groups
    taken = {id(parameter) for group in groups if group["muon"] for parameter in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in taken}
    expected = {name for name, parameter in model.named_parameters() if "blocks" in name and parameter.ndim == 2}
    assert names == expected
    assert all(group["lr"] == (0.02 if group["muon"] else 0.01) for group in groups)


def test_adamw_is_that_of_torch():
    ours, theirs = model_of(), model_of()
    decayed = [parameter for parameter in theirs.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in theirs.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    pairs = [(ours, optimizer_of(ours, "adamw")), (theirs, torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95)))]
    for model, optimizer in pairs:
        for step in range(3):
            train_step(model, optimizer, step)
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(12, 12), (8, 24), (24, 8)])
def test_muon_is_that_of_torch_up_to_its_bf16(shape):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    group = {"params": [ours], "lr": 0.02, "muon": True}
    optimizers = (
        MuonAdamW([group], lr=0.02, weight_decay=0.1),
        torch.optim.Muon([theirs], lr=0.02, momentum=MUON_MOMENTUM, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        gradient = torch.randn(shape, generator=generator)
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    moved, expected = ours.detach() - start, theirs.detach() - start
    assert float((moved - expected).norm() / expected.norm()) < 0.02


def test_muon_moves_every_direction_by_the_update_size_of_adamw():
    parameter = nn.Parameter(torch.zeros(8, 24))
    optimizer = MuonAdamW([{"params": [parameter], "lr": 1.0, "muon": True}], weight_decay=0.0)
    parameter.grad = torch.randn(8, 24, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    values = torch.linalg.svdvals(parameter.detach().double()) / (0.2 * math.sqrt(24))
    assert values.min() > 0.65
    assert values.max() < 1.2


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_restored_optimizer_goes_on_as_if_nothing_had_happened(name):
    model = model_of()
    optimizer = optimizer_of(model, name)
    for step in range(2):
        train_step(model, optimizer, step)
    other = copy.deepcopy(model)
    restored = optimizer_of(other, name)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(2, 4):
        train_step(model, optimizer, step)
        train_step(other, restored, step)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_a_step_of_learning_rate_zero_changes_nothing():
    model = model_of()
    optimizer = build_optimizer(model, "muon", 0.0, 0.0, (0.9, 0.95), 0.1)
    before = copy.deepcopy(model.state_dict())
    train_step(model, optimizer, 0)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0)


def test_the_schedule_rises_linearly_and_falls_as_a_cosine():
    factors = [learning_rate_factor(step, steps=101, warmup=0.1, final=0.1) for step in range(101)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[10] == pytest.approx(1.0)
    assert factors[55] == pytest.approx(0.55)  # half-way down
    assert factors[100] == pytest.approx(0.1)
    assert factors[10:] == sorted(factors[10:], reverse=True)


@pytest.mark.parametrize(("steps", "warmup", "last"), [(1, 0.0, 1.0), (1, 1.0, 1.0), (5, 1.0, 1.0), (5, 0.0, 0.1)])
def test_the_schedule_of_very_short_runs(steps, warmup, last):
    factors = [learning_rate_factor(step, steps, warmup, 0.1) for step in range(steps)]
    assert factors[-1] == pytest.approx(last)
    assert all(0 < factor <= 1 for factor in factors)
