"""Frozen configs that refuse what they do not understand, by name, before any work starts.

Special here: the type hints of a config are its validation. `Literal` lists the accepted values, unknown keys are
answered with the nearest valid name, and relations between fields live in `validate`.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

C = TypeVar("C", bound="Config")


class ConfigError(ValueError):
    """A configuration value that cannot be used: names the field, the value and what is accepted."""


class Config:
    """Base of every frozen config dataclass. Construction raises `ConfigError` when a field does not fit its hint."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, field.name, _fit(hints[field.name], getattr(self, field.name), field.name))
        self.validate()

    def validate(self) -> None:
        """Relations between fields; raises `ConfigError`."""


def config_from(cls: type[C], values: Mapping[str, Any], where: str = "") -> C:
    """Build `cls` from nested plain mappings.

    Args:
        cls: the config dataclass.
        values: field name -> plain value; nested configs as mappings.
        where: dotted prefix put before field names in messages, such as `"model"`.
    Raises:
        ConfigError: for an unknown or missing field, a mistyped value, or a relation that does not hold.
    """
    prefix = f"{where}." if where else ""
    hints = get_type_hints(cls)
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown field {prefix}{name}{nearest(str(name), known)}; accepted: {', '.join(known)}")
    arguments = {}
    for name, value in values.items():
        hint = hints[name]
        nested = is_dataclass(hint) and isinstance(value, Mapping)
        arguments[name] = config_from(hint, value, f"{prefix}{name}") if nested else value  # type: ignore[type-var]
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}" if prefix and not str(error).startswith(prefix) else str(error)) from None
    except TypeError as error:
        raise ConfigError(f"{where or cls.__name__}: {error}") from None


def nearest(name: str, known: list[str]) -> str:
    """`" (did you mean 'h_cycles'?)"` when a known name is close, else an empty string."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def _fit(hint: Any, value: Any, name: str) -> Any:
    """`value` as `hint` asks for it (a list becomes a tuple, a whole float an int), or `ConfigError`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in arguments or type(value) not in {type(a) for a in arguments}:
            close = nearest(str(value), [str(a) for a in arguments])
            raise ConfigError(f"{name}={value!r} is not accepted{close}; choose from {', '.join(map(str, arguments))}")
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _fit(next(a for a in arguments if a is not type(None)), value, name)
    if origin is tuple:
        if isinstance(value, str) or not hasattr(value, "__iter__"):
            raise ConfigError(f"{name}={value!r} must be a list")
        return tuple(_fit(arguments[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}={value!r} must be a mapping")
        return dict(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} must be a finite number")
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is not Any and (not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool)):
        raise ConfigError(f"{name}={value!r} must be {hint.__name__}, not {type(value).__name__}")
    return value
