"""The whole pipeline on a slice of the default corpus, through DVC, and every command the README shows."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import time
import urllib.request

import pytest
import yaml

from tests.workspace import PROJECT, environment, make_workspace, shell

pytestmark = pytest.mark.slow

MODELS = ("transformer_pp_tiny", "mela_tiny", "looplm_tiny", "melt_tiny")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A small copy in which `dvc repro report` has run once."""
    folder = make_workspace(tmp_path_factory.mktemp("project"))
    repro = shell("dvc repro report", folder)
    assert repro.returncode == 0, repro.stdout + repro.stderr
    return folder


def test_repro_makes_a_comparable_result_for_every_model(workspace):
    for model in MODELS:
        metrics = json.loads((workspace / "evaluations" / model / "metrics.json").read_text())
        training = json.loads((workspace / "artifacts" / model / "metrics.json").read_text())
        assert set(metrics["fixed_targets"]["on"]) == {"64", "128"}
        assert metrics["run_id"] == training["run_id"]
        assert 1 < metrics["fixed_targets"]["on"]["128"] < 600
        controls = {"on", "zero", "reset", "shuffle"} if model == "mela_tiny" else {"on"}
        assert set(metrics["fixed_targets"]) == controls
    assert (workspace / "reports" / "index.html").stat().st_size > 10_000


def test_the_ledger_holds_one_finished_run_per_model(workspace):
    with sqlite3.connect(workspace / "mlflow.db") as database:
        runs = database.execute("select run_uuid, status from runs").fetchall()
        steps = database.execute(
            "select run_uuid, count(*), count(distinct step) from metrics where key = 'train/loss' group by run_uuid"
        ).fetchall()
    assert len(runs) == len(MODELS)
    assert {status for _, status in runs} == {"FINISHED"}
    assert [(count, distinct) for _, count, distinct in steps] == [(8, 8)] * len(MODELS)


def test_a_second_repro_does_nothing(workspace):
    repro = shell("dvc repro report", workspace)
    assert repro.returncode == 0
    assert "Running stage" not in repro.stdout
    assert "up to date" in repro.stdout


def test_metrics_show_lists_perplexity_per_model_and_context(workspace):
    shown = json.loads(shell("dvc metrics show --json", workspace).stdout)[""]["data"]
    for model in MODELS:
        data = shown[f"evaluations/{model}/summary.json"]["data"]
        assert {name: set(by_context) for name, by_context in data.items()} == {
            name: {"64", "128"} for name in ("fixed_targets", "window_mean", "bits_per_byte")
        }
    decoded = shown["evaluations/melt_tiny/sharing/summary.json"]["data"]["decoded"]
    assert {"teacher", "student", "last_loop"} <= set(decoded)


def test_student_teacher_and_untrained_sharing_are_scored_side_by_side(workspace):
    sharing = json.loads((workspace / "evaluations" / "melt_tiny" / "sharing" / "metrics.json").read_text())
    assert {"teacher", "student", "last_loop"} <= set(sharing["strategies"])
    assert sharing["strategies"]["student"]["cache_bytes"] * 2 == sharing["strategies"]["teacher"]["cache_bytes"]


def test_plots_show(workspace):
    plots = shell("dvc plots show -o dvc_plots", workspace)
    assert plots.returncode == 0, plots.stderr
    assert (workspace / "dvc_plots" / "index.html").is_file()


def test_an_experiment_reruns_only_the_model_it_changes(workspace):
    shell("git add -A && git commit -q -m results", workspace)
    ran = shell("dvc exp run -n shorter -S models.mela_tiny.h_cycles=1 report", workspace)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    started = re.findall(r"Running stage '([^']+)'", ran.stdout)
    assert started == ["pretrain@mela_tiny", "evaluate@mela_tiny", "report"]
    shown = json.loads(shell("dvc exp show --json", workspace).stdout)
    assert "shorter" in json.dumps(shown)


def test_ui_serves_the_recorded_runs_on_loopback(workspace):
    command = ["mlflow", "ui", "--backend-store-uri", "sqlite:///mlflow.db", "--host", "127.0.0.1", "--port", "5055"]
    with subprocess.Popen(
        command, cwd=workspace, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            assert _answers("http://127.0.0.1:5055/health")
        finally:
            server.terminate()
            server.wait()


def test_readme_commands(workspace):
    """Every command in a `bash` block of the README runs; those `make` targets that only call others are listed."""
    elsewhere = ("git clone", "cd ", "make ", "python -m benchmarks", ". .venv", "source ")
    for command in _readme_commands():
        if not command.startswith(elsewhere):
            ran = shell(command, workspace)
            assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"


def test_readme_make_targets_exist():
    targets = re.findall(r"^([a-z]+):", (PROJECT / "Makefile").read_text(), flags=re.MULTILINE)
    named = {command.split()[1] for command in _readme_commands() if command.startswith("make ")}
    assert named
    assert named <= set(targets)


def test_dvc_yaml_is_the_default_comparison_and_the_ablations():
    stages = yaml.safe_load((PROJECT / "dvc.yaml").read_text())["stages"]
    compared = ["tokenize", "pretrain", "distill", "evaluate", "evaluate_student", "sharing", "report"]
    assert list(stages) == [*compared, "ablations"]


def _readme_commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (PROJECT / "README.md").read_text(), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def _answers(url: str, seconds: float = 90) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return response.status == 200
        except OSError:
            time.sleep(1)
    return False
