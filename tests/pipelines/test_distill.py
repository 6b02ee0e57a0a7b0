"""The stage `distill`: interrupted equals uninterrupted, what it writes, and every mismatch in one line."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from models import build_model, load_model, preset, save_model
from models.configuration import ConfigError
from models.looped.melt import Melt
from pipelines.config import PipelineConfig, StageError
from pipelines.data import TokenData
from pipelines.distill import Distill
from pipelines.files import sha256_file
from tests.pipelines.settings import settings
from tests.pipelines.trainings import Fault, metrics, query, steps_logged, train, weights

SHAPE = {"vocab_size": 257, "width": 16, "layers": 1, "loops": 2, "heads": 2, "hidden": 32}
DISTILL = {
    "context": 16,
    "batch_size": 4,
    "phase1_steps": 7,
    "phase2_steps": 5,
    "log_every": 1,
    "validate_every": 6,
    "validation_tokens": 256,
    "checkpoint_every": 4,
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    save_model(build_model(preset("looplm_tiny", **SHAPE), seed=3), folder)
    return folder


@pytest.fixture
def small(token_folder, teacher):
    """A configuration of 12 steps; sections are merged, `model` holds fields of the student."""

    def build(model: dict[str, Any] | None = None, **changes: Any) -> PipelineConfig:
        sections: dict[str, Any] = {
            "distill": DISTILL,
            "data": {"directory": str(token_folder)},
            "execution": {"threads": 1, "accelerator": "cpu"},
            "output": "out",
            "teacher": str(teacher),
            "model": preset("melt_tiny", **{**SHAPE, "chunk": 8, **(model or {})}),
            "model_name": "melt_tiny",
        }
        for name, value in changes.items():
            sections[name] = sections.get(name, {}) | value if isinstance(value, dict) else value
        return settings(**sections)

    return build


@pytest.fixture(scope="module")
def finished(token_folder, teacher, _empty_ledger, tmp_path_factory) -> Path:
    """A folder in which a distillation ran without interruption. Tests only read it."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "mlflow.db").write_bytes(_empty_ledger.read_bytes())
    sections = {"data": {"directory": str(token_folder)}, "execution": {"threads": 1, "accelerator": "cpu"}}
    model = preset("melt_tiny", **SHAPE, chunk=8)
    config = settings(
        distill=DISTILL, teacher=str(teacher), model=model, model_name="melt_tiny", output="out", **sections
    )
    code, said = train(config, folder, stage="distill")
    assert code == 0, said
    return folder


def test_killed_in_either_phase_it_goes_on_to_the_same_weights_and_the_same_run(finished, small, ledger_file):
    folder, config = ledger_file.parent, small()
    for call in (6, 6):  # steps 6 and, from the checkpoint of step 4, 10
        code, said = train(
            config, folder, Fault("pipelines.training:Recorder.on_train_batch_end", call), stage="distill"
        )
        assert code == -signal.SIGKILL, said
    code, said = train(config, folder, stage="distill")
    assert code == 0, said
    assert weights(folder) == weights(finished)
    for name in ("loss.csv", "gates.csv"):
        assert (folder / "out" / name).read_bytes() == (finished / "out" / name).read_bytes()
    assert query(folder, "select run_uuid, status from runs") == [(metrics(folder)["run_id"], "FINISHED")]
    assert steps_logged(folder, "train/loss") == list(range(1, 13))
    assert steps_logged(folder, "train/gate/loop_2/layer_1/mean") == list(range(1, 13))


def test_recomputed_activations_lead_to_the_same_weights_in_another_cell_or_the_same(finished, small, ledger_file):
    folder, config = ledger_file.parent, small(execution={"recompute": True})
    code, said = train(config, folder, stage="distill")
    assert code == 0, said
    assert weights(folder) == weights(finished)
    assert metrics(folder)["fingerprint"] == metrics(finished)["fingerprint"]


def test_the_export_says_what_was_distilled(finished, small, teacher):
    said = metrics(finished)
    assert said["family"] == "melt"
    assert said["teacher"] == str(teacher)
    assert said["teacher_weights"] == sha256_file(teacher / "model.safetensors")
    assert said["steps"] == 12
    assert said["tokens"] == 12 * 4 * 16
    assert said["peak_memory_bytes"] > 10**7
    windows = TokenData.open(small().data.directory).held_out_windows(context=16, tokens=256)
    for key, folder in (("teacher_validation_loss", teacher), ("validation_loss", finished / "out")):
        model = load_model(folder).eval()
        with torch.no_grad():
            assert said[key] == pytest.approx(float(model.cross_entropy(windows[:, :-1], windows[:, 1:])), rel=1e-5)
    student = load_model(finished / "out")
    assert isinstance(student, Melt)
    assert student.config == small().model


def test_distributions_of_the_gates_are_beside_the_model(finished):
    gates = pd.read_csv(finished / "out" / "gates.csv")
    assert gates.columns.tolist() == ["loop", "layer", "from", "to", "share"]
    assert set(zip(gates.loop, gates.layer, strict=True)) == {(2, 1)}
    assert gates.share.sum() == pytest.approx(1, abs=1e-4)
    assert len(gates) == 20


def test_the_exit_gate_stays_the_teachers_and_everything_else_moves(finished, teacher):
    student, before = load_model(finished / "out").state_dict(), load_model(teacher).state_dict()
    for name, tensor in before.items():
        assert torch.equal(student[name], tensor) == name.startswith("exit_gate"), name


def test_the_cell_is_known_by_the_teachers_weights_not_by_its_folder(small, teacher, token_folder, tmp_path):
    data = TokenData.open(token_folder)

    def fingerprint(**changes: Any) -> str:
        return Distill(small(**changes), data).identity()["fingerprint"]

    shutil.copytree(teacher, tmp_path / "copy")
    save_model(build_model(preset("looplm_tiny", **SHAPE), seed=4), tmp_path / "other")
    same = fingerprint()
    assert fingerprint(teacher=str(tmp_path / "copy")) == same
    assert fingerprint(execution={"recompute": True}) == same
    assert fingerprint(teacher=str(tmp_path / "other")) != same
    assert fingerprint(distill={"alignment": 0.0}) != same


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": "nowhere"}, "teacher=nowhere is no folder"),
        ({"model": {"width": 32}}, "model.width=32 does not match the teacher's width=16"),
        ({"model": {"chunk": 17}}, "model.chunk=17 must be at most distill.context=16"),
        ({"model": {"loops": 3}}, "model.loops=3 does not match the teacher's loops=2"),
        ({"execution": {"strategy": "fsdp"}}, "execution.strategy=fsdp is not for distill"),
        ({"distill": {"batch_size": 3}, "execution": {"devices": 2}}, "distill.batch_size=3 must be a multiple"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(small, token_folder, changes, message):
    with pytest.raises(ConfigError, match=message):
        Distill(small(**changes), TokenData.open(token_folder)).require_fit()


def test_other_loops_are_accepted_where_loops_are_not_compared(small, token_folder):
    alone = {"interpolation": False, "every_loop": False, "alignment": 0.0}
    Distill(small(model={"loops": 3}, distill=alone), TokenData.open(token_folder)).require_fit()


def test_only_a_looplm_teaches_and_only_a_melt_learns(small, token_folder, tmp_path, finished):
    data = TokenData.open(token_folder)
    with pytest.raises(ConfigError, match="is a melt, not a looplm"):
        Distill(small(teacher=str(finished / "out")), data).require_fit()
    config = settings(model=preset("looplm_tiny", **SHAPE), model_name="looplm_tiny", teacher=str(tmp_path))
    with pytest.raises(ConfigError, match="model=looplm_tiny is a looplm, not a melt"):
        Distill(config, data).require_fit()


def test_an_altered_teacher_is_refused(small, token_folder, teacher, tmp_path):
    folder = Path(shutil.copytree(teacher, tmp_path / "altered"))
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(StageError, match="its SHA-256 differs"):
        Distill(small(teacher=str(folder)), TokenData.open(token_folder)).require_fit()


def test_a_teacher_of_another_tokenizer_is_refused(small, token_folder, teacher, tmp_path):
    folder = Path(shutil.copytree(teacher, tmp_path / "other"))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"teacher=.*other was trained with another tokenizer"):
        Distill(small(teacher=str(folder)), TokenData.open(token_folder)).require_fit()


@pytest.mark.parametrize(
    ("distill", "message"),
    [
        ({"phase1_steps": 0, "phase2_steps": 0}, "leave nothing to do"),
        ({"alignment": -0.1}, "alignment=-0.1 must be at least 0"),
        ({"gate_lr": 0.0}, "gate_lr=0.0 must be above 0"),
        ({"validation_tokens": 8}, "validation_tokens=8 must be at least context=16"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused_by_name(small, distill, message):
    with pytest.raises(ConfigError, match=message):
        small(distill=distill)
