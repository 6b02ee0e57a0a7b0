"""What a dry run says a cell costs, against what the stages themselves count."""

from __future__ import annotations

import re
from dataclasses import asdict, replace

import pytest
import torch

from models import build_model, preset
from models.looped.looplm import LoopLM
from pipelines.distill import Distill
from pipelines.sweeping import preview
from tests.pipelines import sweeps
from tests.pipelines.settings import settings


def meta(config):
    with torch.device("meta"):
        return build_model(config)


def test_pretraining_costs_its_tokens():
    config, model = settings(), meta(preset("mela_tiny"))
    training = preview.training_of("pretrain", model, config)
    assert (training.tokens, training.sequences) == (config.pretrain.tokens, config.pretrain.batch_size)
    assert training.flops_per_token == model.cost(config.pretrain.context).total_training_flops
    assert training.weight_bytes == 16 * 1_972_552


@pytest.mark.parametrize("every_loop", [True, False])
def test_distillation_costs_both_phases_and_the_teacher(every_loop, monkeypatch):
    changes = {"phase1_steps": 3, "phase2_steps": 2, "batch_size": 4, "context": 128, "every_loop": every_loop}
    student = preset("melt_tiny", chunk=32)
    config = replace(settings(distill=changes), model=student)
    training = preview.training_of("distill", meta(student), config)
    assert training.tokens == 5 * 4 * 128
    shared = {name: value for name, value in asdict(student).items() if name in asdict(preset("looplm_tiny"))}
    teacher = meta(preset("looplm_tiny", **shared))
    assert isinstance(teacher, LoopLM)
    monkeypatch.setattr(Distill, "teacher", teacher)
    assert training.flops_per_token == Distill(config, None).flops_per_token()  # type: ignore[arg-type]


def test_evaluation_costs_every_context_and_the_controls_only_the_end_of_a_window():
    model = meta(preset("mela_tiny"))
    small = {"contexts": [128, 512], "windows": 3, "score_tokens": 64}
    on, all_ = (preview.evaluation_flops(model, settings(evaluate=small | {"controls": c})) for c in (False, True))
    per_token = {n: model.cost(n).total_forward_flops for n in (128, 512)}
    assert on == 3 * 512 * sum(per_token.values())
    assert all_ - on == pytest.approx(3 * 3 * sum(n * flops for n, flops in per_token.items()))


def test_a_dry_run_lists_every_cell_and_runs_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    calibrated = []

    def step(config, context):
        calibrated.append(config)
        return preview.Step(1e9, 1e-3, 2**20)

    monkeypatch.setattr(preview, "calibrate", step)
    local = sweeps.local(tmp_path, f"sqlite:///{tmp_path}/mlflow.db")
    preview.preview(sweeps.plan(), local, preview.Options(dry_run=True, workers=2))
    said = capsys.readouterr().out
    assert [config.layers for config in calibrated] == [1, 2]
    assert "0 of 3" in said
    assert "to go with workers=2" in said
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"tune": True, "budgets": {"tiny": sweeps.BUDGET | {"nuisance": {"pretrain": {"lr": [1e-3, 2e-3]}}}}},
            "tuning: 4 more runs, 0 of them done",
        ),
        (
            {
                "search": {"space": {"model": {"layers": [1, 2, 3]}}, "objectives": ["bits_per_byte/1x"]},
                "n_trials": 7,
            },
            "search: at most 7 trials",
        ),
    ],
)
def test_a_dry_run_counts_tuning_and_trials(changes, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preview, "calibrate", lambda config, context: preview.Step(1e9, 1e-3, 2**20))
    monkeypatch.setattr(preview, "duration", lambda seconds: f"{seconds:.6f}")
    local, options = sweeps.local(tmp_path, f"sqlite:///{tmp_path}/mlflow.db"), preview.Options(dry_run=True)

    def number(pattern, text):
        found = re.search(pattern, text)
        assert found
        return float(found[1])

    def said(**more):
        preview.preview(sweeps.plan(verdicts=None, seeds=1, **more), local, options)
        lines = capsys.readouterr().out.splitlines()
        return lines, number(r"([\d.]+) to go with", lines[-1])

    (lines, more), (_, less) = said(**changes), said()
    (told,) = [each for each in lines if each.startswith(line)]
    assert more > less
    assert number(r": ([\d.]+)( to go)?$", told) == pytest.approx(more - less, abs=1e-5)


def test_a_calibration_counts_flops_seconds_and_what_is_kept():
    config = preset("transformer_pp_tiny", layers=1, width=32, heads=2, hidden=64, vocab_size=300)
    step = preview.calibrate(config, 16)
    assert step.flops == meta(config).cost(16).total_training_flops * 16
    assert step.seconds > 0
    assert step.saved_bytes > 16 * 32 * 4
