"""A sweep as it is run: frozen when it is launched, so that no later edit of a file reaches it.

Special here: a run is known by a key, the fingerprint of everything its numbers depend on. Two sweeps that contain the
same run share it, and a sweep whose file or code changed runs only what the change concerns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from models.configuration import ConfigError, require
from models.families import FAMILIES
from models.serialization import WEIGHTS
from pipelines.cells import NOT_SCIENCE, Cell
from pipelines.command import typed
from pipelines.config import ExecutionConfig, PipelineConfig, TrackingConfig
from pipelines.files import sha256_file
from pipelines.identity import code_digest, fingerprint
from pipelines.sweep_file import TUNING_SEED, SweepFile, sweep_from
from pipelines.token_index import INDEX, read_index

SECTIONS = {"pretrain": ("model", "pretrain", "evaluate"), "distill": ("model", "pretrain", "distill", "evaluate")}
GROWING = ("seeds", "n_trials")  # more of them extend a sweep; anything else makes another one


@dataclass(frozen=True)
class Local:
    """What a machine decides for itself; it changes no number."""

    tracking: TrackingConfig
    execution: ExecutionConfig


@dataclass(frozen=True)
class Task:
    """One run: a cell with a seed."""

    cell: Cell
    seed: int
    key: str

    @property
    def label(self) -> str:
        return f"{self.cell.name} · seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """Plain values only, to be stored with the queue."""

    name: str
    values: dict[str, Any]  # of the sweep, for `sweep_from`
    bases: dict[str, dict[str, Any]]  # preset -> configuration before a cell's overrides, references unresolved
    data: dict[str, str]  # folder of token data, or of a teacher -> digest
    code: dict[str, str]  # family -> digest of the code its runs execute

    @cached_property
    def sweep(self) -> SweepFile:
        return sweep_from(self.name, self.values)

    @property
    def digest(self) -> str:
        """What tells one sweep of this name from another."""
        values = {key: value for key, value in self.values.items() if key not in GROWING}
        bases = {
            preset: {key: value for key, value in base.items() if key not in NOT_SCIENCE}
            for preset, base in self.bases.items()
        }
        precision = [base["execution"]["precision"] for base in self.bases.values()]
        return fingerprint(asdict(self) | {"values": values, "bases": bases, "precision": precision})

    @property
    def study(self) -> str:
        return f"{self.name}-{self.digest[:8]}"

    def config(self, cell: Cell, seed: int, local: Local | None = None) -> PipelineConfig:
        """The configuration of a run: that of `cell.command_line(seed)`, without the command line."""
        values = OmegaConf.create(self.bases[cell.preset])
        for path, value in {**cell.overrides, "seed": seed}.items():
            OmegaConf.update(values, path, list(value) if isinstance(value, tuple) else value, merge=False)
        try:
            config = typed(values, self.bases[cell.preset])
        except ConfigError as error:
            raise ConfigError(f"cell {cell.name!r}: {error}") from None
        if local is None:
            return config
        execution = replace(local.execution, precision=config.execution.precision)  # it changes numbers
        return replace(config, tracking=local.tracking, execution=execution)

    def task(self, cell: Cell, seed: int) -> Task:
        config, stage = self.config(cell, seed), self.sweep.stage
        teacher = {"teacher": self.data[config.teacher]} if stage == "distill" else {}
        science = {
            **{section: asdict(getattr(config, section)) for section in SECTIONS[stage]},
            "stage": stage,
            "seed": seed,
            "replicate": cell.replicate,
            "precision": config.execution.resolved_precision,
            "family": config.model.family,
            "data": self.data[config.data.directory],
            "code": self.code[config.model.family],
            **teacher,
        }
        return Task(cell, seed, fingerprint(science))

    def cells(self, tuning: Mapping[str, Mapping[str, Any]]) -> list[Cell]:
        """The cells to run, the baseline first, with the nuisance values that were chosen for each."""
        cells = sorted(self.sweep.cells(), key=lambda cell: cell.name != self.sweep.baseline_name)
        return [replace(cell, overrides=cell.overrides | dict(tuning.get(cell.name, {}))) for cell in cells]

    def tasks(self, seeds: Iterable[int], tuning: Mapping[str, Mapping[str, Any]] = {}) -> list[Task]:
        """Every cell with every seed, seed by seed: a table that is stopped early has whole pairs."""
        cells = self.cells(tuning)
        return [self.task(cell, seed) for seed in seeds for cell in cells]

    def tuning_tasks(self) -> list[Task]:
        """Every cell with each combination of nuisance values, on the seed that no verdict uses."""
        if not self.sweep.tune:
            return []
        return [self.task(tried, TUNING_SEED) for cell in self.cells({}) for tried in self.sweep.tuning_cells(cell)]

    def trial_task(self, name: str, choices: Mapping[str, Any]) -> Task:
        """The run of a search."""
        return self.task(replace(self.sweep.trial(choices), name=name), 0)


def freeze(name: str, values: Mapping[str, Any], bases: Mapping[str, dict[str, Any]], absent: bool = False) -> Plan:
    """A plan of a checked sweep.

    Args:
        bases: for each preset of the table what Hydra composed, as plain values with references unresolved.
        absent: accept token data that is not there; nothing can be run then.
    Raises:
        ConfigError: for a cell that cannot be built.
        DataError: when token data is not there.
    """
    unknown = Plan(name, dict(values), dict(bases), {}, {})
    configs = [unknown.config(cell, 0) for cell in unknown.sweep.cells()]
    precision = {"precision": configs[0].execution.resolved_precision}  # of this machine, for every worker
    frozen = {preset: {**base, "execution": {**base["execution"], **precision}} for preset, base in bases.items()}
    folders = dict.fromkeys(config.data.directory for config in configs)
    data = {folder: data_digest(folder, absent) for folder in folders}
    if unknown.sweep.stage == "distill":
        data |= {folder: teacher_digest(folder, absent) for folder in dict.fromkeys(c.teacher for c in configs)}
    families = dict.fromkeys(config.model.family for config in configs)
    code = {family: code_of(unknown.sweep.stage, family) for family in families}
    return replace(unknown, bases=frozen, data=data, code=code)


def data_digest(folder: str, absent: bool = False) -> str:
    """Of token data, as its index states it. Raises `DataError` where there is none, unless it may be `absent`."""
    if absent and not (Path(folder) / INDEX).is_file():
        return "absent"
    return read_index(Path(folder))["digest"]


def teacher_digest(folder: str, absent: bool = False) -> str:
    """Of a teacher's weights. Raises `ConfigError` where there are none, unless they may be `absent`."""
    file = Path(folder) / WEIGHTS
    if absent and not file.is_file():
        return "absent"
    require(file.is_file(), f"teacher={folder} holds no {WEIGHTS}: pretrain a LoopLM or import one first")
    return sha256_file(file)


def modules_of(stage: str, family: str) -> list[str]:
    """What a run of a family executes: the stage that trains it, its evaluation, the model and its teacher."""
    teacher = [FAMILIES["looplm"]] if stage == "distill" else []
    return [f"pipelines.{stage}", "pipelines.evaluate", FAMILIES[family], *teacher]


@cache
def code_of(stage: str, family: str) -> str:
    """Digest of the code as it was when this process first asked."""
    return code_digest(modules_of(stage, family))
