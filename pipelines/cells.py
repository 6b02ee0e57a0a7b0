"""The cells of an ablation table: what varies, by the names a claim uses, and the overrides that make each run.

A cell is a row crossed with one level of every axis. Its overrides are those of the command line
(`python -m pipelines.pretrain model=mela_tiny model.h_cycles=2 seed=1`), so a cell and a single run are the same thing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from models.configuration import ConfigError, nearest, require
from models.language_model import ModelConfig
from models.presets import preset
from pipelines.config import PipelineConfig

NOT_SCIENCE = ("execution", "tracking")  # sections of the configuration that change no result
ROW = "row"  # the name under which claims may give a row


@dataclass(frozen=True)
class Cell:
    """One arm of a table, to be run with several seeds."""

    name: str  # unique in its table: "no gate", "h_cycles=2 l_cycles=4"
    levels: dict[str, Any]  # "row" or the last part of a factor's path -> its level
    preset: str
    overrides: dict[str, Any]  # dotted path in the configuration -> value
    replicate: int = 0  # above 0: the same run once more, to measure what repeating alone changes

    def command_line(self, seed: int) -> list[str]:
        """The Hydra overrides of this cell's run with `seed`."""
        values = [f"{path}={_hydra(value)}" for path, value in self.overrides.items()]
        return [f"model={self.preset}", *values, f"seed={seed}"]

    def varied(self, choices: Mapping[str, Any]) -> Cell:
        """The cell with further values, by dotted path, and a name that says so."""
        named = {path.rpartition(".")[2]: value for path, value in choices.items()}
        words = [f"{label}={plain(value)}" for label, value in named.items()]
        return Cell(" ".join([self.name, *words]), self.levels | named, self.preset, self.overrides | dict(choices))

    def again(self, copy: int) -> Cell:
        """The same run once more."""
        name = " ".join([*([self.name] if self.name else []), "again" if copy == 1 else f"again {copy}"])
        return Cell(name, self.levels | {"replicate": copy}, self.preset, self.overrides, copy)

    def model_config(self) -> ModelConfig:
        """The model's config; `ConfigError` for an unknown field, a mistyped value or an impossible combination."""
        model = {path.removeprefix("model."): v for path, v in self.overrides.items() if path.startswith("model.")}
        return preset(self.preset, **model)


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted paths: `{model: {h_cycles: 2}}` -> `{"model.h_cycles": 2}`."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        path = f"{prefix}{key}"
        flat |= flatten(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return flat


def cross(
    rows: Mapping[str, tuple[str, Mapping[str, Any]]], axes: Mapping[str, Sequence[Any]], shared: Mapping[str, Any]
) -> list[Cell]:
    """Every row with every combination of levels, in the order written, rows slowest.

    Args:
        rows: name -> (preset, overrides by dotted path); the name "" is left out of names and levels.
        axes: dotted path -> levels.
        shared: overrides of every cell, by dotted path; axes and rows win over them.
    Raises:
        ConfigError: when two axes share their last name.
    """
    labels = [path.rpartition(".")[2] for path in axes]
    twice = [label for label in labels if labels.count(label) > 1]
    require(not twice, f"factors: two axes are called {twice[0] if twice else ''}; vary one of them by rows")
    cells = []
    for row, (model, overrides) in rows.items():
        for levels in itertools.product(*axes.values()):
            named = dict(zip(labels, levels, strict=True))
            name = " ".join([row] * bool(row) + [f"{label}={plain(level)}" for label, level in named.items()])
            values = {**shared, **overrides, **dict(zip(axes, levels, strict=True))}
            cells.append(Cell(name, {ROW: row} | named if row else named, model, values))
    return cells


def select(cells: Sequence[Cell], selector: Any, where: str) -> list[Cell]:
    """The cells a selector names, in table order.

    Args:
        selector: the name of a cell or row, a mapping of levels (`{h_cycles: 4}`; a list that is no level itself
            accepts each of its levels), or a list of selectors.
        where: what to call the selector in messages.
    Raises:
        ConfigError: when a part of the selector names no cell.
    """
    if isinstance(selector, list | tuple):
        chosen = [cell for part in selector for cell in select(cells, part, where)]
        return [cell for cell in cells if cell in chosen]
    if isinstance(selector, Mapping):
        known = list(dict.fromkeys(label for cell in cells for label in cell.levels))
        for label, wanted in selector.items():
            require(
                label in known, f"{where}: unknown factor {label!r}{nearest(label, known)}; named: {', '.join(known)}"
            )
            levels = [plain(level) for level in distinct(cell.levels.get(label) for cell in cells)]
            for level in wanted if isinstance(wanted, list | tuple) and plain(wanted) not in levels else [wanted]:
                require(
                    plain(level) in levels,
                    f"{where}: no cell has {label}={plain(level)}; the table has {', '.join(levels)}",
                )
        found = [cell for cell in cells if all(_fits(cell.levels.get(k), v) for k, v in selector.items())]
        require(bool(found), f"{where}: no cell has {selector}")
        return found
    found = [cell for cell in cells if cell.name == selector] or [
        cell for cell in cells if cell.levels.get(ROW) == selector
    ]
    names = [cell.name for cell in cells]
    require(
        bool(found),
        f"{where}: no cell is called {selector!r}{nearest(str(selector), names)}; cells: {', '.join(names)}",
    )
    return found


def pairs(cells: Sequence[Cell], first: Any, second: Any, where: str) -> list[tuple[Cell, Cell]]:
    """The cells of two selectors, each with those of the other that agree on every factor neither selector names."""
    named = _named(cells, first) | _named(cells, second)
    found = [
        (a, b)
        for a in select(cells, first, where)
        for b in select(cells, second, where)
        if all(b.levels.get(label) == level for label, level in a.levels.items() if label not in named)
    ]
    require(bool(found), f"{where}: {first} and {second} have no cells that differ in nothing else")
    return found


def _named(cells: Sequence[Cell], selector: Any) -> set[str]:
    """The factors a selector fixes."""
    if isinstance(selector, list | tuple):
        return set().union(*(_named(cells, part) for part in selector))
    if isinstance(selector, Mapping):
        return set(selector)
    return set().union({ROW}, *(cell.levels for cell in cells if cell.name == selector))


def check_path(path: str, where: str) -> None:
    """`ConfigError` unless `path` is a field of a scientific section; `preset` checks the model's own fields."""
    hints = get_type_hints(PipelineConfig)
    sections = [name for name, hint in hints.items() if is_dataclass(hint) and name not in NOT_SCIENCE]
    section, _, field = path.partition(".")
    if section not in sections or not field:
        raise ConfigError(
            f"{where}: {path!r} is not something a sweep can vary{nearest(section, sections)}; "
            f"name a field of {', '.join(sections)}, such as model.h_cycles"
        )
    if section != "model":
        known = [each.name for each in fields(hints[section])]
        require(field in known, f"{where}: unknown factor {path}{nearest(field, known)}; accepted: {', '.join(known)}")


def check_cells(cells: Sequence[Cell]) -> None:
    """Refuse, before anything runs, cells that cannot be built and cells that are the same run under two names."""
    seen: dict[str, str] = {}
    for cell in cells:
        for path in cell.overrides:
            check_path(path, f"cell {cell.name!r}")
        try:
            config = cell.model_config()
        except ConfigError as error:
            raise ConfigError(f"cell {cell.name!r}: {error}") from None
        other = {path: value for path, value in cell.overrides.items() if not path.startswith("model.")}
        key = f"{config!r} {sorted(other.items())} {cell.replicate}"
        require(key not in seen, f"cells {seen.get(key)!r} and {cell.name!r} are the same run: leave one of them out")
        seen[key] = cell.name


def _fits(level: Any, wanted: Any) -> bool:
    alternatives = wanted if isinstance(wanted, list | tuple) else []
    return any(plain(level) == plain(each) for each in [wanted, *alternatives])


def distinct(levels: Iterable[Any]) -> list[Any]:
    """Each level once, in order; a level may be a list."""
    found: dict[str, Any] = {}
    for level in levels:
        found.setdefault(plain(level), level)
    return list(found.values())


def plain(level: Any) -> str:
    """A level as a person writes it; 2 and 2.0 are one level."""
    if isinstance(level, float):
        return f"{level:g}"
    return level if isinstance(level, str) else json.dumps(level)


def _hydra(value: Any) -> str:
    """A value in the grammar of Hydra's command line."""
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_hydra, value)) + "]"
    return "null" if value is None else json.dumps(value)
