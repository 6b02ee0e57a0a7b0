"""The command line: one configuration, mistakes answered by name in one line, exit codes that tell the truth."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from models import preset
from models.configuration import ConfigError
from pipelines.command import PROJECT, execute, load
from pipelines.config import PipelineConfig, StageError, StoppedError


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    """Commands start in an empty folder, and what they change of the process is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")


def command(monkeypatch, capsys, *arguments: str, stage=lambda config: None) -> tuple[int, str, str]:
    """Run a stage as `python -m` would; returns the exit code and what it printed to stdout and stderr."""
    monkeypatch.setattr("sys.argv", ["stage", *arguments])
    code = execute(stage)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_every_preset_is_a_choice_with_the_changes_of_the_params_file():
    config = load(["model=transformer_pp_tiny_window", "model.layers=2", "seed=3", "pretrain.lr=1"])
    assert (config.model_name, config.model.family, config.seed, config.pretrain.lr) == (
        "transformer_pp_tiny_window",
        "transformer",
        3,
        1.0,
    )
    assert config.model == preset("transformer_pp_tiny_window", layers=2)
    assert load(["model=looplm_tiny"]).model.family == "looplm"


def test_students_are_melts_and_stand_beside_the_models(tmp_path):
    params = yaml.safe_load((PROJECT / "params.yaml").read_text())

    def with_students(**students: dict) -> list[str]:
        (tmp_path / "params.yaml").write_text(yaml.safe_dump(params | {"students": students}))
        return list(load(["model=melt_tiny"], tmp_path).students)

    assert with_students(melt_tiny={"gate": "scalar"}) == ["melt_tiny"]
    assert load(["model=melt_tiny"], tmp_path).model == preset("melt_tiny", gate="scalar")
    assert with_students() == []
    with pytest.raises(ConfigError, match=r"students\.titans_tiny is a mela"):
        with_students(titans_tiny={})
    with pytest.raises(ConfigError, match="mela_tiny: in models and in students"):
        with_students(mela_tiny={})


def test_the_params_file_changes_presets_and_the_vocabulary_follows_the_data(tmp_path):
    params = yaml.safe_load((PROJECT / "params.yaml").read_text())
    params["models"] = {"transformer_pp_tiny": {"layers": 7}}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    config = load(["model=transformer_pp_tiny", "data.vocab_size=300"])
    assert config.model == preset("transformer_pp_tiny", layers=7, vocab_size=300)
    assert list(config.models) == ["transformer_pp_tiny"]
    assert config.models["transformer_pp_tiny"] == config.model
    assert load(["model=transformer_pp_tiny", "model.layers=1"]).model == preset("transformer_pp_tiny", layers=1)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model=transformer_pp_tiny", "model.layer=2"], "unknown field model.layer (did you mean 'layers'?)"),
        (
            ["model=transformer_pp_tny"],
            "model='transformer_pp_tny' is not accepted (did you mean 'transformer_pp_tiny'",
        ),
        (["pretrain.lrr=1"], "unknown field pretrain.lrr (did you mean 'lr'?)"),
        (["+pretrain.lrr=1"], "unknown field pretrain.lrr (did you mean 'lr'?)"),
        (["evaluat.windows=1"], "unknown field evaluat (did you mean 'evaluate'?)"),
        (["+evaluat.windows=1"], "unknown field evaluat (did you mean 'evaluate'?)"),
        (["+sweep=anything"], "unknown field sweep"),
        (["pretrain.lr=fast"], "pretrain.lr='fast' must be float, not str"),
        (["pretrain.lr=-1"], "pretrain.lr=-1.0 must be above 0"),
        (["pretrain.lr=inf"], "pretrain.lr=inf must be a finite number"),
        (["pretrain.clip=nan"], "pretrain.clip=nan must be a finite number"),
        (["model=looplm_tiny", "model.rope_theta=inf"], "model.rope_theta=inf must be a finite number"),
        (["seed=99999999999999999999"], "seed=99999999999999999999 must be at least 0 and below"),
        (["evaluate.contexts=[0,64]"], "evaluate.contexts=[0, 64] must be increasing lengths of at least 1"),
        (["pretrain.optimizer=adam"], "pretrain.optimizer='adam' is not accepted (did you mean 'adamw'?)"),
        (["seed=1.5"], "seed=1.5 must be int"),
        (["seed"], "seed"),
        (["seed=${sed}"], "Interpolation key 'sed' not found"),
        (["~seed"], "seed must be given"),
        (["model=[a]"], "model/a"),
        (["models.transformer_pp_tiny.layers=2"], "models.* and students.* are what params.yaml compares"),
        (["+models.transformer_pp_tiny.layers=2"], "models.* and students.* are what params.yaml compares"),
    ],
)
def test_mistakes_are_refused_by_name(overrides, named):
    with pytest.raises(ConfigError) as refused:
        load(overrides)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("seed: 0", "seed: [", "params.yaml is not YAML"),
        ("seed: 0", "", "seed must be given"),
        ("models:", "models:\n  mela_tny: {}", "mela_tny"),
    ],
)
def test_a_broken_params_file_is_named(tmp_path, monkeypatch, capsys, old, new, named):
    (tmp_path / "params.yaml").write_text((PROJECT / "params.yaml").read_text().replace(old, new, 1))
    code, out, err = command(monkeypatch, capsys)
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"error: .*{named}.*\n", err)


def test_a_mistake_is_one_line_and_exit_code_2_before_the_stage_starts(monkeypatch, capsys):
    def stage(config):
        raise AssertionError("started")

    for argument in ("model.layer=2", "pretrain.lr=fast", "a b==", "model=transformer_pp_tny"):
        code, out, err = command(monkeypatch, capsys, argument, stage=stage)
        assert (code, out) == (2, "")
        assert re.fullmatch(r"error: .*\n", err)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("checkpoint: name a folder"), 2, "checkpoint: name a folder"),
        (StageError("the loss is nan"), 1, "the loss is nan"),
        (StoppedError("stopped by SIGTERM", 15), 143, "stopped by SIGTERM"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x/y"), 1, "No space left on device: x/y"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_known_failures_are_one_line_and_their_exit_code(monkeypatch, capsys, error, code, line):
    def stage(config):
        raise error

    assert command(monkeypatch, capsys, stage=stage) == (code, "", f"error: {line}\n")


def test_an_unknown_failure_is_not_hidden(monkeypatch, capsys):
    with pytest.raises(ZeroDivisionError):
        command(monkeypatch, capsys, stage=lambda config: 1 / 0)


def test_relative_paths_are_those_of_the_folder_of_the_params_file(tmp_path, monkeypatch, capsys):
    folders = []
    command(monkeypatch, capsys, stage=lambda config: folders.append(Path.cwd()))
    (tmp_path / "params.yaml").write_text((PROJECT / "params.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    command(monkeypatch, capsys, stage=lambda config: folders.append(Path.cwd()))
    assert folders == [PROJECT, tmp_path]


def test_nothing_is_left_behind(tmp_path, monkeypatch, capsys):
    (tmp_path / "params.yaml").write_text((PROJECT / "params.yaml").read_text())
    configs: list[PipelineConfig] = []
    assert command(monkeypatch, capsys, "output=a", "checkpoint=b", stage=configs.append)[0] == 0
    assert (configs[0].output, configs[0].checkpoint) == ("a", "b")
    assert [path.name for path in tmp_path.iterdir()] == ["params.yaml"]


def test_help_and_cfg_print_and_run_nothing(monkeypatch, capsys):
    def stage(config):
        """What the stage does."""
        raise AssertionError("started")

    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, capsys, "--help", stage=stage)
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert shown.startswith("What the stage does.")
    assert "transformer_pp_tiny_window" in shown
    code, out, _ = command(monkeypatch, capsys, "--cfg", "job", "model=transformer_pp_tiny", "seed=5", stage=stage)
    assert code == 0
    assert yaml.safe_load(out)["seed"] == 5
    assert yaml.safe_load(out)["model_name"] == "transformer_pp_tiny"


def test_a_stage_refuses_before_it_imports_what_takes_seconds(tmp_path):
    script = "import sys, pipelines.pretrain, pipelines.command; print({'lightning', 'mlflow'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", script], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
    command = [sys.executable, "-m", "pipelines.pretrain", "model=transformer_pp_tiny", "model.layer=2"]
    ran = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("error: unknown field model.layer (did you mean 'layers'?)")
