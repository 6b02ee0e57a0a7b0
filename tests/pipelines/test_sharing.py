"""The stage `sharing`: every strategy on the same targets, and where they must agree."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from torch.nn import functional

from models import build_model, preset, save_model
from models.configuration import ConfigError
from models.looped.distillation import start_from
from models.looped.looplm import LoopLM
from models.looped.melt import Melt
from models.serialization import WEIGHTS
from pipelines import sharing
from pipelines.data import TokenData
from pipelines.evaluation import HeldOut
from pipelines.files import sha256_file
from pipelines.looped_results import read_sharing
from tests.pipelines.settings import settings

SHAPE = {"vocab_size": 257, "width": 16, "layers": 1, "heads": 2, "hidden": 32}
NAMES = ["first_loop", "last_loop", "first_loop_prompt_kept", "last_loop_prompt_kept"]
EVALUATE = {"contexts": [32, 128], "score_tokens": 8, "windows": 3}


def pair(loops: int, gate: str = "elementwise") -> tuple[LoopLM, Melt]:
    teacher = build_model(preset("looplm_tiny", **SHAPE, loops=loops), seed=3)
    student = build_model(preset("melt_tiny", **SHAPE, loops=loops, gate=gate), seed=4)
    assert isinstance(teacher, LoopLM)
    assert isinstance(student, Melt)
    start_from(student, teacher)
    return teacher.eval(), student.eval()


@pytest.fixture
def folders(tmp_path) -> dict[str, str]:
    for name, model in zip(("teacher", "student"), pair(loops=3), strict=True):
        save_model(model, tmp_path / name)
    taught = {"teacher": "runs/teacher", "teacher_weights": sha256_file(tmp_path / "teacher" / WEIGHTS)}
    said = {"model": "melt_tiny", "seed": 0, "fingerprint": "f", "run_id": "r"} | taught
    (tmp_path / "student" / "metrics.json").write_text(json.dumps(said))
    return {"teacher": str(tmp_path / "teacher"), "checkpoint": str(tmp_path / "student")}


def run(token_folder: Path, output: Path, **changes: Any) -> dict[str, Any]:
    sections = {"data": {"directory": str(token_folder)}, "evaluate": EVALUATE, "execution": {"threads": 1}}
    return sharing.run(settings(output=str(output), **sections, **changes))


def test_every_strategy_is_scored_on_the_fixed_targets_of_the_shortest_context(token_folder, tmp_path, folders, capsys):
    metrics = run(token_folder, tmp_path / "out", **folders)
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()) == metrics
    assert list(metrics["strategies"]) == ["teacher", "student", *NAMES]
    assert (metrics["context"], metrics["prompt"], metrics["run_id"]) == (32, 24, "r")
    assert capsys.readouterr().out.count("perplexity") == 6

    data = TokenData.open(token_folder)
    text = HeldOut(data.documents("held_out"), data.token_bytes)
    windows = torch.stack([text.tokens(window, 128) for window in text.choose(128, 3)])
    teacher, _ = pair(loops=3)
    with torch.no_grad():
        logits = teacher(windows[:, 96:-1])[:, 24:]
    loss = functional.cross_entropy(logits.flatten(0, 1), windows[:, 121:].flatten())
    assert metrics["strategies"]["teacher"]["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)
    assert metrics["strategies"]["teacher"]["to_teacher"] == 1.0


def test_every_window_is_kept_and_its_losses_average_to_the_perplexity(token_folder, tmp_path, folders):
    metrics = run(token_folder, tmp_path / "out", **folders)
    windows = pd.read_csv(tmp_path / "out" / "windows.csv")
    assert list(windows.strategy.unique()) == list(metrics["strategies"])
    assert len(windows) == 6 * metrics["windows"]
    assert windows.document.nunique() == metrics["documents"]
    for name, rows in windows.groupby("strategy"):
        assert np.exp(rows.loss.mean()) == pytest.approx(metrics["strategies"][name]["perplexity"], rel=1e-6)


def test_the_report_s_interval_is_scipy_s_on_the_windows(token_folder, tmp_path, folders):
    metrics = run(token_folder, tmp_path / "sharing" / "student", **folders)
    found = read_sharing(tmp_path / "sharing" / "student").change("last_loop", "teacher")
    windows = pd.read_csv(tmp_path / "sharing" / "student" / "windows.csv")
    last, teacher = (windows[windows.strategy == name].loss.to_numpy() for name in ("last_loop", "teacher"))
    expected = stats.ttest_rel(last, teacher).confidence_interval()
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == pytest.approx(tuple(np.expm1(expected)))
    assert found.value == pytest.approx(metrics["strategies"]["last_loop"]["to_teacher"] - 1)


def test_the_last_loop_s_loss_is_the_one_of_the_strategy_and_each_loop_has_its_own(token_folder, tmp_path, folders):
    metrics = run(token_folder, tmp_path / "out", **folders)
    for name, by_loop in metrics["loop_losses"].items():
        assert list(by_loop) == ["1", "2", "3"]
        assert np.exp(by_loop["3"]) == pytest.approx(metrics["strategies"][name]["perplexity"], rel=1e-5)
        assert len(set(by_loop.values())) == 3


def test_loops_of_a_student_are_scored_as_decoded():
    """In chunks of one token, `forward` is decoding."""
    _, student = pair(loops=3)
    tokens = torch.randint(257, (2, 12), generator=torch.Generator().manual_seed(0))
    student.config = replace(student.config, inference_chunk=1)
    with torch.no_grad():
        logits = student.loop_logits(tokens[:, :-1])[:, :, 5:]
    expected = [float(functional.cross_entropy(loop.flatten(0, 1), tokens[:, 6:].flatten())) for loop in logits]
    assert sharing.loop_losses(student, tokens, 5) == pytest.approx(expected, rel=1e-5)


def test_what_a_strategy_keeps():
    teacher, student = pair(loops=3)
    sizes = {name: sharing.cache_bytes(name, teacher, student, 32, 24) for name in ("teacher", "student", *NAMES)}
    row = 2 * 16 * 4  # keys and values of a token in the one layer
    assert sizes["teacher"] == 32 * 3 * row
    assert sizes["student"] == sizes["first_loop"] == sizes["last_loop"] == 32 * row
    assert sizes["first_loop_prompt_kept"] == sizes["last_loop_prompt_kept"] == (24 * 3 + 8) * row


def test_with_one_loop_all_are_the_same():
    teacher, student = pair(loops=1)
    tokens = torch.randint(257, (2, 12), generator=torch.Generator().manual_seed(0))
    exact = sharing.losses(sharing.strategies(teacher, student)["teacher"], tokens, 5)
    assert exact.shape == (2, 6)
    for name, decode in sharing.strategies(teacher, student).items():
        torch.testing.assert_close(sharing.losses(decode, tokens, 5), exact, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("loop", ["first", "last"])
def test_an_untrained_student_is_sharing_once_its_prompt_is_one_token(loop):
    teacher, student = pair(loops=3, gate=loop)
    tokens = torch.randint(257, (2, 12), generator=torch.Generator().manual_seed(0))
    decode = sharing.strategies(teacher, student)
    ours, untrained = (sharing.losses(decode[name], tokens, 1) for name in ("student", f"{loop}_loop"))
    torch.testing.assert_close(ours, untrained, rtol=0, atol=1e-5)


def test_recall_asks_every_fact_after_the_prompt():
    task = sharing._recall_task(torch.randint(257, (3, 65)), 257, 256)
    assert task.answers.sum() == sharing.ROWS * sharing.PAIRS
    assert not task.answers[:, : 2 * sharing.PAIRS].any()

    def knowing(tokens: torch.Tensor, prompt: int) -> torch.Tensor:
        return functional.one_hot(tokens.roll(-1, dims=1)[:, prompt:], 257).float()

    assert sharing.accuracy(knowing, task) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint": None}, "checkpoint=None is no folder"),
        ({"teacher": "nowhere"}, "teacher=nowhere is no folder"),
    ],
)
def test_missing_models_are_refused_by_name(token_folder, tmp_path, folders, changes, message):
    with pytest.raises(ConfigError, match=message):
        run(token_folder, tmp_path / "out", **folders | changes)


def test_a_student_in_the_teachers_place_is_refused(token_folder, tmp_path, folders):
    with pytest.raises(ConfigError, match=r"teacher=.* is a melt, not a looplm"):
        run(token_folder, tmp_path / "out", **folders | {"teacher": folders["checkpoint"]})


def test_another_teacher_of_the_same_shape_is_refused(token_folder, tmp_path, folders):
    save_model(build_model(preset("looplm_tiny", **SHAPE, loops=3), seed=5), tmp_path / "other")
    message = r"teacher=.*other is not the teacher of checkpoint=.*student.* \(then in runs/teacher\)"
    with pytest.raises(ConfigError, match=message):
        run(token_folder, tmp_path / "out", **folders | {"teacher": str(tmp_path / "other")})


def test_the_teacher_may_have_moved(token_folder, tmp_path, folders):
    moved = (tmp_path / "teacher").rename(tmp_path / "elsewhere")
    metrics = run(token_folder, tmp_path / "out", **folders | {"teacher": str(moved)})
    assert metrics["teacher_weights"] == sha256_file(moved / WEIGHTS)


def test_a_student_that_was_not_distilled_is_refused(token_folder, tmp_path, folders):
    Path(folders["checkpoint"], "metrics.json").write_text('{"model": "melt_tiny"}')
    with pytest.raises(ConfigError, match=r"was not distilled: its metrics\.json names no teacher_weights"):
        run(token_folder, tmp_path / "out", **folders)


@pytest.mark.parametrize("field", ["teacher", "checkpoint"])
def test_a_model_of_another_tokenizer_is_refused(token_folder, tmp_path, folders, field):
    Path(folders[field], "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"{field}=.* was trained with another tokenizer"):
        run(token_folder, tmp_path / "out", **folders)
