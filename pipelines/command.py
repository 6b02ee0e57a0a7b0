"""The edge between the command line and a stage: Hydra composes `params.yaml`, one typed config comes out.

Special here:
- the `params.yaml` in use is the current directory's, else the project's own; **relative paths are relative to it**,
  wherever the command is started from;
- every preset is an option of the group `model`, with the changes `params.yaml` states for it under `models` and the
  recipe that belongs to it (`recipes`);
- a user's mistake is one line and exit code 2, a failure at run time one line and exit code 1; a traceback is a bug.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import hydra
from hydra.conf import HelpConf, HydraConf, RunDir, SweepDir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from models.configuration import ConfigError, config_from, nearest, require
from models.language_model import ModelConfig
from models.presets import PRESETS, preset
from pipelines.config import PipelineConfig, StageError
from pipelines.recipes import RECIPES

PROJECT = Path(__file__).resolve().parent.parent
PARAMS = "params.yaml"
COMPARED = ("models", "students")  # sections: preset -> fields that differ from it
FIXED = f"models.* and students.* are what {PARAMS} compares: change it there; for one run use model.<field>=<value>"

HELP = """
Any field below can be set as field=value; relative paths are relative to the folder of params.yaml.

$CONFIG
--cfg job prints the configuration that the other arguments give, without running."""

Stage = Callable[[PipelineConfig], Any]


def main(run: Stage) -> None:
    """Run a stage from the command line: `if __name__ == "__main__": main(run)`."""
    sys.exit(execute(run))


def execute(run: Stage) -> int:
    """Compose the configuration from `sys.argv`, run the stage in the project's folder; returns the exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hand exceptions over instead of printing them and exiting
    codes = []

    def job(values: DictConfig) -> None:
        codes.append(guarded(lambda: run(typed(values, stated))))

    def compose() -> None:
        hydra.main(config_path=None, config_name="params", version_base="1.3")(job)()

    try:
        folder = project_folder()
        stated = register(folder, help_text=inspect.getdoc(run) or "")
    except (ConfigError, OmegaConfBaseException) as error:
        return report(explain(error), 2)
    os.chdir(folder)
    return guarded(compose) or max(codes, default=0)


def guarded(action: Callable[[], Any]) -> int:
    """Run `action`; returns 0, or the exit code of a known failure after printing it as one line."""
    try:
        action()
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        return report(explain(error), 2)
    except StageError as error:
        return report(str(error), error.exit_code)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return report(f"{error.strerror or error}{where}", 1)
    except KeyboardInterrupt:
        return report("interrupted", 130)
    return 0


def load(overrides: Sequence[str] = (), folder: str | Path | None = None) -> PipelineConfig:
    """The configuration as a stage would get it: `params.yaml` of `folder` with Hydra `overrides`.

    Raises:
        ConfigError: for anything unknown, mistyped or impossible, by name.
    """
    folder = Path(folder or project_folder()).resolve()
    try:
        stated = register(folder)
        with hydra.initialize(config_path=None, version_base="1.3"):
            return typed(hydra.compose("params", list(overrides)), stated)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from None


def project_folder() -> Path:
    """The folder whose `params.yaml` is in use: the current one, else the one that holds this source tree."""
    for folder in (Path.cwd(), PROJECT):
        if (folder / PARAMS).is_file():
            return folder
    raise ConfigError(f"no {PARAMS} in {Path.cwd()}: start from the project's folder")


def typed(values: DictConfig, stated: Mapping[str, Any]) -> PipelineConfig:
    """The composed values as frozen dataclasses.

    Args:
        values: what Hydra composed.
        stated: the sections `models` and `students` as `params.yaml` has them, already merged into the options of group
            `model`.
    Raises:
        ConfigError: for anything unknown, mistyped or impossible, by name.
    """
    plain: Any = OmegaConf.to_container(values, resolve=True)
    missing = [field.name for field in fields(PipelineConfig) if field.name not in plain]
    require(not missing, f"{', '.join(missing)} must be given: see the {PARAMS} of the project")
    shared = {"vocab_size": plain["data"]["vocab_size"]}
    for section in COMPARED:
        require(plain[section] == stated[section], FIXED)
        plain[section] = {
            name: _model(name, shared | dict(changes or {}), f"{section}.{name}")
            for name, changes in plain[section].items()
        }
    plain["model"] = _model(plain["model_name"], plain["model"], "model")
    return config_from(PipelineConfig, plain)


def explain(error: Exception) -> str:
    """One line for an exception of ours, Hydra's or OmegaConf's; unknown names are answered with the nearest one."""
    cause = error.__cause__ if isinstance(error, HydraException) else error
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        known = sorted(error.options)
        return f"{group}={option!r} is not accepted{nearest(option, known)}; choose from {', '.join(known)}"
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and cause.parent_node is not None:
        if str(cause.full_key).partition(".")[0] in COMPARED:
            return FIXED
        known = [str(key) for key in cause.parent_node if key != "hydra"]
        return f"unknown field {cause.full_key}{nearest(str(cause.key), known)}; accepted: {', '.join(known)}"
    return " ".join(str(error).split())


def _model(name: str, changes: Mapping[str, Any], where: str) -> ModelConfig:
    standard = preset(name)
    return config_from(type(standard), asdict(standard) | dict(changes), where)


def register(folder: Path, help_text: str = "", **hydra_options: str) -> dict[str, Any]:
    """Give Hydra `params.yaml` and the options of group `model`; returns what `params.yaml` compares, by section.

    `hydra_options` choose among Hydra's own groups: `sweeper="cells"`.

    Configs are stored, not searched for: Hydra would walk the whole project folder to list its groups.
    """
    try:
        params: Any = OmegaConf.to_container(OmegaConf.load(folder / PARAMS))
    except YAMLError as error:
        raise ConfigError(f"{folder / PARAMS} is not YAML: {' '.join(str(error).split())}") from None
    stated = {section: params.get(section) or {} for section in COMPARED}
    changes = stated["models"] | stated["students"]
    store = ConfigStore.instance()
    store.store(name="params", node=params)
    for name in PRESETS:
        standard = asdict(preset(name)) | {"vocab_size": "${data.vocab_size}"} | dict(changes.get(name) or {})
        chosen = {"model_name": name, "model": standard} | RECIPES.get(name, {})
        store.store(group="model", name=name, node=chosen, package="_global_")
    quiet = HydraConf(output_subdir=None, run=RunDir("."), sweep=SweepDir("multirun", "."))
    options = {"hydra_logging": "none", "job_logging": "none"} | hydra_options
    quiet.defaults = [*quiet.defaults, *({f"override {group}": option} for group, option in options.items())]
    quiet.help = HelpConf(template=f"{help_text}\n\nmodel=<one of>: {', '.join(PRESETS)}\n{HELP}")
    store.store(group="hydra", name="config", node=quiet, provider="hydra")
    return stated


def report(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code
