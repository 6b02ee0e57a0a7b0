"""A sweep file: one ablation table, stated before it is run.

Factors and rows are the *scientific* hyperparameters, a budget's `nuisance` lists those tuned with an equal grid for
every arm, and everything under `fixed` and the budget's `config` is *fixed*.

Special here: contexts are written as multiples of the training context (`ppl/fixed_targets/4x`), so that the tiny and
the paper's budget share their measures and claims.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from models.configuration import Config, ConfigError, config_from, nearest, require
from pipelines.cells import Cell, check_cells, check_path, cross, flatten, select
from pipelines.claims import Claim, parse_claim
from pipelines.measures import check_measure
from pipelines.verdicts import LEAST_SEEDS, Rules

SWEEPS = Path(__file__).resolve().parent.parent / "sweeps"
STAGES = ("pretrain", "distill")  # each reads the section of its name, and not the other's
TUNING_SEED = 1000  # nuisance values are chosen on a seed that no verdict uses


@dataclass(frozen=True)
class Budget(Config):
    """How large the runs of a table are."""

    config: dict[str, Any]  # nested fields of the configuration, the same for every cell
    preset: str | None = None  # model of every row that names none
    presets: dict[str, str] | None = None  # what rows may call a preset -> the preset at this scale
    rows: dict[str, Any] | None = None  # rows whose values differ at this scale: name -> fields
    nuisance: dict[str, Any] | None = None  # nested fields, each with a list of values; the same grid for every arm


@dataclass(frozen=True)
class Pruner(Config):
    """Stop a run whose validation loss is worse than the baseline's of the same seed at the same step."""

    after: float = 0.25  # fraction of the steps before the first comparison
    margin: float = 0.05  # nats above the baseline's loss

    def validate(self) -> None:
        require(0 <= self.after < 1, f"after={self.after} must be in [0, 1)")
        require(self.margin >= 0, f"margin={self.margin} must be at least 0")


@dataclass(frozen=True)
class Search(Config):
    """Cells chosen by Optuna from a space, instead of a table."""

    space: dict[str, Any]  # nested fields of the configuration, each with a list of choices
    objectives: tuple[str, ...]  # measures to minimise together
    sampler: Literal["tpe", "random"] = "tpe"


@dataclass(frozen=True)
class SweepFile(Config):
    """A checked sweep. Every field may be overridden on the command line, such as `seeds=5` or `budget=paper`."""

    name: str  # of the file
    title: str
    source: str  # which table of which paper, or that it is ours
    stage: Literal["pretrain", "distill"]  # what trains a cell; its evaluation follows
    factors: dict[str, Any]  # axes: nested fields, each with a list of levels
    rows: dict[str, Any]  # name -> nested fields, `preset` among them; crossed with the axes
    fixed: dict[str, Any]  # nested fields, the same for every cell and budget
    baseline: Any  # selector of one cell
    only: Any  # selector of the cells to run, with the baseline; null runs all
    seeds: int  # per cell: 0, 1, ...
    replicates: int  # times the same cell and seed is run; above 1 in the noise floor only
    measures: tuple[str, ...]  # the first one is judged, the others are printed with intervals
    budget: str  # which of `budgets`
    budgets: dict[str, Any]
    tune: bool  # choose the budget's nuisance values per arm, on a seed of its own; false: the same for every arm
    verdicts: Rules | None  # null: no verdicts asked
    claims: dict[str, Any]
    pruner: Pruner | None
    search: Search | None
    n_trials: int | None  # search: cells in total

    @property
    def scale(self) -> Budget:
        """The budget in use."""
        return config_from(Budget, self.budgets[self.budget], f"budgets.{self.budget}")

    @property
    def context(self) -> int:
        """Tokens of a training sequence, the unit of `4x`."""
        return self.shared[f"{self.stage}.context"]

    @property
    def shared(self) -> dict[str, Any]:
        """What every cell is run with, by dotted path, unless its row or an axis says otherwise."""
        return flatten(self.scale.config) | flatten(self.fixed)

    def measure(self, name: str) -> str:
        """A measure as the tracker names it: `ppl/fixed_targets/4x` -> `ppl/fixed_targets/2048`."""
        return "/".join(_tokens(part, self.context) for part in name.split("/"))

    def table(self) -> list[Cell]:
        """Every cell the file states, in order, `only` or not."""
        scale = self.scale
        rows = {name: _row(name, {**fields_, **_own(scale.rows, name)}, scale) for name, fields_ in self._stated_rows()}
        cells = cross(rows, flatten(self.factors), self.shared)
        return cells + [cell.again(copy) for copy in range(1, self.replicates) for cell in cells]

    def cells(self) -> list[Cell]:
        """The cells to run: all of the table, or those of `only` and the baseline."""
        table = self.table()
        if self.only is None:
            return table
        chosen = select(table, self.only, "only")
        return [cell for cell in table if cell in chosen or cell.name == self.baseline_name]

    @property
    def baseline_name(self) -> str:
        """The name of the baseline cell."""
        found = select(self.table(), self.baseline, "baseline")
        require(
            len(found) == 1, f"baseline={self.baseline} names {len(found)} cells: {', '.join(c.name for c in found)}"
        )
        return found[0].name

    def trial(self, choices: Mapping[str, Any]) -> Cell:
        """The cell of a search: one choice for each path of the space, everything else as in the baseline."""
        base = select(self.table(), self.baseline, "baseline")[0]
        return base.varied(choices)

    def stated(self) -> dict[str, str]:
        """Where the file states a field of the configuration, as the command line names both; the place that wins."""
        scale, budget = self.scale, f"budgets.{self.budget}"
        parts: list[tuple[str, Mapping[str, Any]]] = [
            (f"{budget}.config", scale.config),
            ("fixed", self.fixed),
            *((f"rows.{name}", fields_ or {}) for name, fields_ in self.rows.items()),
            *((f"{budget}.rows.{name}", fields_ or {}) for name, fields_ in (scale.rows or {}).items()),
            ("factors", self.factors),
            ("search.space", self.search.space if self.search else {}),
            (f"{budget}.nuisance", (scale.nuisance or {}) if self.tune else {}),
        ]
        return {path: f"{part}.{path}" for part, nested in parts for path in flatten(nested)}

    def tuning_cells(self, cell: Cell) -> list[Cell]:
        """An arm with each combination of nuisance values, to be run with `TUNING_SEED`."""
        grid = flatten(self.scale.nuisance or {})
        return [cell.varied(dict(zip(grid, values, strict=True))) for values in itertools.product(*grid.values())]

    def parsed_claims(self) -> list[Claim]:
        """The claims, their measures as the tracker names them."""
        return [self._claim(name, values) for name, values in self.claims.items()]

    def validate(self) -> None:
        require(
            self.budget in self.budgets,
            f"budget={self.budget!r}{nearest(self.budget, list(self.budgets))} is not one of {', '.join(self.budgets)}",
        )
        require(
            f"{self.stage}.context" in self.shared,
            f"budgets.{self.budget}.config must state {self.stage}.context",
        )
        require(self.seeds >= 1, f"seeds={self.seeds} must be at least 1")
        require(self.replicates >= 1, f"replicates={self.replicates} must be at least 1")
        require(bool(self.measures), "measures=[] must name at least one")
        require(
            self.verdicts is None or self.seeds >= LEAST_SEEDS,
            f"seeds={self.seeds} supports no verdict: at least {LEAST_SEEDS} are needed, or set verdicts=null",
        )
        require(bool(self.search) == bool(self.n_trials), "search and n_trials belong together: state both or neither")
        require(not self.tune or bool(self.scale.nuisance), f"tune=true needs budgets.{self.budget}.nuisance, a grid")
        require(
            not self.claims or self.verdicts is not None,
            "claims need verdicts: take them out (~claims) or state verdicts",
        )
        for path, levels in [
            *flatten(self.factors).items(),
            *flatten(self.scale.nuisance or {}).items(),
            *self._space().items(),
        ]:
            check_path(path, f"sweep {self.name!r}")
            require(isinstance(levels, list | tuple) and len(levels) > 0, f"{path}={levels!r} must be a list of levels")
        for path in flatten(self.fixed):
            require(
                path not in flatten(self.factors), f"fixed.{path}: it is a factor; choose its levels with only={{...}}"
            )
        self._check_stage()
        check_cells(self.table())
        for path, levels in self._space().items():
            check_cells([self.trial({path: level}) for level in levels])
        self.baseline_name  # noqa: B018 raises when it is not one cell
        self.cells()
        for claim in self.parsed_claims():
            claim.contrasts(self.table())
        self._check_measures()

    def _check_stage(self) -> None:
        """What varies must be read by the stage, else arms that differ in name only would be compared."""
        varied = {
            "factors": self.factors,
            "rows": dict(self._stated_rows()),
            f"budgets.{self.budget}.rows": self.scale.rows or {},
            f"budgets.{self.budget}.nuisance": self.scale.nuisance or {},
            "search.space": self.search.space if self.search else {},
        }
        for where, nested in varied.items():
            for fields_ in nested.values() if where.endswith("rows") else [nested]:
                for path in flatten(fields_ or {}):
                    section, _, field = path.partition(".")
                    require(
                        section not in STAGES or section == self.stage,
                        f"{where}: a {self.stage} sweep does not read {path}, so its arms would be identical; "
                        f"vary fields of {self.stage}, such as {self.stage}.{field}",
                    )

    def _stated_rows(self) -> list[tuple[str, dict[str, Any]]]:
        return [(name, dict(fields_ or {})) for name, fields_ in (self.rows or {"": {}}).items()]

    def _claim(self, name: str, values: Mapping[str, Any]) -> Claim:
        claim = parse_claim(name, values, self.measures[:1])
        others = getattr(claim.predicate, "than_measures", ())
        if others:
            claim = replace(claim, predicate=replace(claim.predicate, than_measures=tuple(map(self.measure, others))))
        return replace(claim, measures=tuple(map(self.measure, claim.measures)))

    def _space(self) -> dict[str, Any]:
        return flatten(self.search.space) if self.search else {}

    def _check_measures(self) -> None:
        """What is judged, claimed and searched for must be measured."""
        named = {"measures": self.measures, "search.objectives": self.search.objectives if self.search else ()}
        for key, claim in self.claims.items():
            named[f"claims.{key}.measures"] = tuple(claim.get("measures") or ())
            others = (each.get("than_measures") or () for each in claim.values() if isinstance(each, Mapping))
            named[f"claims.{key}.than_measures"] = tuple(itertools.chain.from_iterable(others))
        for where, names in named.items():
            for name in names:
                check_measure(name, self.measure(name), where, self.table())


def sweep_from(name: str, values: Mapping[str, Any]) -> SweepFile:
    """A checked sweep from plain mappings: a file's content with command-line overrides.

    Raises:
        ConfigError: for anything unknown or impossible, by name, before any run.
    """
    known = [field.name for field in fields(SweepFile) if field.name != "name"]
    for key in values:
        require(
            key in known, f"unknown field {key}{nearest(key, known)} in sweep {name!r}; accepted: {', '.join(known)}"
        )
    stated = {"name": name, **DEFAULTS, **values}
    for key, kind in (("verdicts", Rules), ("pruner", Pruner), ("search", Search)):
        if stated[key] is not None:
            stated[key] = config_from(kind, stated[key], key)
    return config_from(SweepFile, stated)


def read_sweep(path: Path) -> dict[str, Any]:
    """The content of a sweep file with every field present, as Hydra's group `sweep` needs it to override any."""
    values = DEFAULTS | _yaml(path)
    if values["verdicts"] is not None:
        values["verdicts"] = asdict(Rules()) | values["verdicts"]
    values["budgets"] = {name: _budget(name, stated or {}, path.parent) for name, stated in values["budgets"].items()}
    return values


DEFAULTS: dict[str, Any] = {
    "stage": "pretrain",
    "factors": {},
    "rows": {},
    "fixed": {},
    "only": None,
    "seeds": 3,
    "replicates": 1,
    "budget": "tiny",
    "tune": False,
    "verdicts": {},
    "claims": {},
    "pruner": None,
    "search": None,
    "n_trials": None,
}


def _budget(name: str, stated: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A budget with everything it takes over from the shared one it is `like`."""
    own = dict(stated)
    base = own.pop("like", None)
    if base is None:
        return own
    shared = _yaml(folder / "shared" / "budgets.yaml")
    require(
        base in shared,
        f"budgets.{name}.like={base!r}{nearest(base, list(shared))}; shared budgets: {', '.join(shared)}",
    )
    return _merged(shared[base], own)


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings, `own` winning."""
    both = {
        key: _merged(base[key], own[key])
        for key in own
        if isinstance(base.get(key), Mapping) and isinstance(own[key], Mapping)
    }
    return {**base, **own, **both}


def _yaml(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _row(name: str, fields_: Mapping[str, Any], scale: Budget) -> tuple[str, dict[str, Any]]:
    """The preset and the overrides of a row."""
    values = dict(fields_)
    wanted = values.pop("preset", None)
    presets = scale.presets or {}
    if wanted is not None and wanted not in presets:
        raise ConfigError(
            f"rows.{name}.preset={wanted!r}{nearest(wanted, list(presets))}: the budget knows {', '.join(presets)}"
        )
    preset = scale.preset if wanted is None else presets[wanted]
    if preset is None:
        raise ConfigError(f"rows.{name} names no preset, and the budget has none for every row")
    return preset, flatten(values)


def _own(rows: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    return dict((rows or {}).get(name) or {})


def _tokens(part: str, context: int) -> str:
    """`4x` -> four times the training context; anything else as it is."""
    if not re.fullmatch(r"\d+(\.\d+)?x", part):
        return part
    tokens = float(part[:-1]) * context
    require(tokens.is_integer(), f"{part} of a training context of {context} tokens is not a whole number of tokens")
    return str(int(tokens))
