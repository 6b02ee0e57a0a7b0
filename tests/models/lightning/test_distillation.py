"""Distillation as Lightning sees it: phases, learning rates, and a teacher that is not there."""

from typing import Any

import pytest
import torch

from models import build_model, preset
from models.lightning.distillation import Distillation, DistillationRecipe
from models.looped.distillation import Objective, distill, start_from
from models.looped.looplm import LoopLM
from models.looped.melt import Melt

SHAPE: dict[str, Any] = {"vocab_size": 31, "width": 16, "layers": 2, "loops": 3, "heads": 4, "hidden": 24}


def recipe(**changes: Any) -> DistillationRecipe:
    values: dict[str, Any] = {
        "phase1_steps": 5,
        "phase2_steps": 4,
        "interpolation": True,
        "every_loop": True,
        "alignment": 0.1,
        "lr": 8e-6,
        "gate_lr": 5e-4,
        "betas": (0.9, 0.95),
        "weight_decay": 1e-4,
        "clip": 1.0,
        "warmup": 0.25,
        "final_lr": 0.1,
    }
    return DistillationRecipe(**{**values, **changes})


def module(**changes: Any) -> Distillation:
    teacher = build_model(preset("looplm_tiny", **SHAPE), seed=1)
    student = build_model(preset("melt_tiny", **SHAPE, chunk=4), seed=2)
    assert isinstance(teacher, LoopLM)
    assert isinstance(student, Melt)
    start_from(student, teacher)
    return Distillation(student, teacher, recipe(**changes))


def test_the_first_phase_interpolates_and_the_second_aligns():
    objectives = [recipe().objective(step) for step in range(9)]
    assert [each.weight for each in objectives] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert [each.alignment for each in objectives] == [0.0] * 5 + [0.1] * 4
    assert all(each.every_loop for each in objectives)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"interpolation": False}, [Objective()] * 5 + [Objective(alignment=0.1)] * 4),
        ({"alignment": 0.0}, [Objective(weight=step / 4) for step in range(5)] + [Objective()] * 4),
        ({"phase2_steps": 0}, [Objective(weight=step / 4) for step in range(5)]),
        ({"phase1_steps": 0}, [Objective(alignment=0.1)] * 4),
        ({"every_loop": False, "interpolation": False, "phase2_steps": 0}, [Objective(every_loop=False)] * 5),
    ],
)
def test_every_switch_of_the_recipe(changes, expected):
    plan = recipe(**changes)
    assert [plan.objective(step) for step in range(plan.steps)] == expected


def test_each_phase_warms_up_and_falls_to_its_final_rate():
    factors = [recipe(phase1_steps=8, phase2_steps=8).factor(step) for step in range(16)]
    assert factors[:8] == factors[8:]
    assert factors[0] == 0.5
    assert factors[1] == factors[2] == 1.0
    assert factors[7] == pytest.approx(0.1)


def test_body_and_gates_have_rates_of_their_own_and_matrices_decay():
    training = module()
    names = {id(parameter): name for name, parameter in training.model.named_parameters()}
    seen = set()
    for group in training.configure_optimizers()["optimizer"].param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            seen.add(name)
            assert group["initial_lr"] == (5e-4 if ".gate." in name else 8e-6), name
            assert group["weight_decay"] == (1e-4 if parameter.ndim == 2 else 0.0), name
    assert set(names.values()) - seen == {"exit_gate.weight", "exit_gate.bias"}


def test_the_teacher_is_in_no_checkpoint():
    training = module()
    assert all(name.startswith("model.") for name in training.state_dict())
    assert len(training.state_dict()) == len(training.model.state_dict())


def test_the_loss_is_that_of_the_step_and_the_last_token_is_not_read():
    training = module()
    batch = torch.randint(31, (2, 10), generator=torch.Generator().manual_seed(0))
    loss, scalars = training.loss(batch)
    assert loss.item() == pytest.approx(0, abs=1e-6)  # at first the student is its teacher
    assert scalars["interpolation"].item() == 0.0
    training.first_step = 4
    loss, scalars = training.loss(batch)
    teacher = training._teacher[0]
    assert loss.item() == pytest.approx(distill(training.model, teacher, batch[:, :-1], Objective()).loss.item())
    assert scalars["interpolation"].item() == 1.0
    assert {"divergence/loop_1", "divergence/loop_3", "alignment", "gate/loop_3/layer_2/std"} < scalars.keys()
