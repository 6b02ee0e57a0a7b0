"""From the command line to a frozen plan, and on to workers: what the sweeper plugin calls.

Special here: Hydra composes every preset once, before anything runs; a cell's overrides are then applied to that as the
command line would apply them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from models.configuration import config_from, nearest, require
from pipelines.cells import flatten
from pipelines.command import COMPARED, explain
from pipelines.config import ExecutionConfig, PipelineConfig, TrackingConfig
from pipelines.sweep_file import SWEEPS, SweepFile, sweep_from
from pipelines.sweeping.options import Options
from pipelines.sweeping.plan import Local, Plan, freeze
from pipelines.sweeping.queue import latest_study
from pipelines.sweeping.storage import open_storage
from pipelines.sweeping.worker import Settings, work
from pipelines.verdicts import LOOKS

SECTIONS = [field.name for field in fields(PipelineConfig)]
FIELDS = [field.name for field in fields(SweepFile) if field.name != "name"]
OPTIONS = [field.name for field in fields(Options)]
HERE = ("basic", "joblib", "submitit_local")  # launchers whose jobs share this machine
CHOSEN = "the sweep chooses it: give it as factors, rows or fixed, such as +fixed.model.layers=2, or seeds=5"


def start(config: DictConfig, arguments: Sequence[str], loader: ConfigLoader, launcher: Launcher) -> None:
    """Launch or resume the sweep that was composed, or be a worker of it.

    Args:
        config: everything composed, the sweep file in it.
        arguments: the overrides of the command line, Hydra's own apart.
        launcher: starts jobs, each of which is a worker.
    Raises:
        ConfigError: for anything that cannot be run, by name, before any run.
        StageError: when runs failed, or the storage, the ledger or the data cannot be used.
    """
    choices = config.hydra.runtime.choices
    known = ", ".join(sorted(path.stem for path in SWEEPS.glob("*.yaml")))
    require("sweep" in choices, f"name a sweep: +sweep=<one of {known}>")
    if config.worker:
        job(config)
        return
    stated = _read(config)
    plan = _freeze(stated, choices["sweep"], arguments, loader)
    if stated.options.dry_run:
        from pipelines.sweeping.preview import preview

        preview(plan, stated.local, stated.options)
        return
    from pipelines.sweeping.launch import launch

    told = [*arguments, "worker=true", f"study={plan.study}"]
    elsewhere = choices["hydra/launcher"] != "basic"
    jobs = (lambda: _finished(launcher, [told] * stated.options.workers)) if elsewhere else None
    launch(plan, stated.local, stated.options, jobs)


def job(config: DictConfig) -> None:
    """Be a worker of a sweep that was launched, until nothing is left."""
    stated = _read(config)
    study = stated.options.study
    name = study.rpartition("-")[0] if study else str(config.hydra.runtime.choices["sweep"])
    storage = stated.options.where(name)
    found = study or latest_study(open_storage(storage), name)
    work(Settings(storage, found, stated.local, stated.options.retries, stay=True))


def _finished(launcher: Launcher, jobs: Sequence[Sequence[str]]) -> list[str]:
    """Run jobs until all have ended; one line for each that failed: Hydra keeps what a job raises to itself."""
    failed = [job for job in launcher.launch(jobs, initial_job_idx=0) if job.status != JobStatus.COMPLETED]
    return [f"a worker failed: {explain(job._return_value)}" for job in failed]


@dataclass(frozen=True)
class Stated:
    """What was composed, in its parts."""

    values: dict[str, Any]
    options: Options
    local: Local


def _read(config: DictConfig) -> Stated:
    plain: Any = OmegaConf.to_container(config, resolve=False)
    named = [*FIELDS, *OPTIONS]
    for name in plain:
        accepted = name in named or name in (*SECTIONS, *COMPARED, "hydra")
        require(accepted, f"unknown field {name}{nearest(name, named)}; a sweep has {', '.join(named)}")
    options = config_from(Options, {name: plain[name] for name in OPTIONS}, "options")
    execution = config_from(ExecutionConfig, plain["execution"], "execution")
    require(
        execution.devices * execution.nodes == 1,
        f"execution.devices={execution.devices}, execution.nodes={execution.nodes}: a sweep gives every run one "
        "device; start more workers instead: workers=2",
    )
    require(
        not execution.rerun,
        "execution.rerun=true: a sweep runs every cell and seed once, and what is finished stays; replicates=2 runs "
        "each once more",
    )
    launcher = config.hydra.runtime.choices["hydra/launcher"]
    alone = launcher not in HERE or (options.worker and launcher == "basic")
    sharing = 1 if alone else options.workers
    shared = replace(execution, threads=max(1, execution.threads // sharing))
    local = Local(config_from(TrackingConfig, plain["tracking"], "tracking"), shared)
    return Stated({name: plain[name] for name in FIELDS if name in plain}, options, local)


def _freeze(stated: Stated, name: str, arguments: Sequence[str], loader: ConfigLoader) -> Plan:
    """The plan of what was composed; token data may be absent where nothing will run."""
    values = stated.values
    sweep = sweep_from(name, values)
    if stated.options.allocate:
        require(sweep.verdicts is not None, f"allocate=true needs verdicts, and sweep {name!r} states none")
        assert sweep.verdicts is not None
        looks = sweep.verdicts.looks or tuple(n for n in LOOKS if n <= sweep.verdicts.max_seeds)
        values = values | {"verdicts": (values.get("verdicts") or {}) | {"looks": list(looks)}}
    for override in OverridesParser.create().parse_overrides(list(arguments)):
        path = override.key_or_group
        require(path not in ("model", "seed") and not path.startswith("model."), f"{path}: {CHOSEN}")
        _require_effect(override, sweep)
    bases = {}
    for preset in dict.fromkeys(cell.preset for cell in sweep.table()):
        overrides = [*arguments, f"model={preset}"]
        composed = loader.load_configuration("params", overrides, RunMode.RUN)
        plain: Any = OmegaConf.to_container(composed, resolve=False)
        bases[preset] = {section: plain[section] for section in SECTIONS}
    return freeze(name, values, bases, absent=stated.options.dry_run)


def _require_effect(override: Override, sweep: SweepFile) -> None:
    """Refuse to set a field that every cell, or some, would set again."""
    path, value, places = override.key_or_group, override.value(), sweep.stated()
    for field in flatten({path: value}) if isinstance(value, dict) else [path]:
        require(
            field not in places,
            f"{field}: the sweep states it, and that wins; change it there: {places.get(field)}=...",
        )
