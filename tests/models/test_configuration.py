"""What a config accepts, and how it says no."""

from dataclasses import FrozenInstanceError, dataclass
from typing import Any, Literal

import pytest

from models import preset
from models.configuration import Config, ConfigError, config_from, nearest, require
from models.transformer import TransformerConfig


@dataclass(frozen=True)
class Inner(Config):
    depth: int = 2


@dataclass(frozen=True)
class Outer(Config):
    name: str
    inner: Inner
    count: int = 3
    rate: float = 0.5
    limit: int | None = None
    flag: bool = False
    mode: Literal["add", "learned", 3] = "add"
    sizes: tuple[int, ...] = (1, 2)
    extra: Any = None

    def validate(self) -> None:
        require(self.count <= 9, f"count={self.count} must be at most 9")


def outer(**values: Any) -> Outer:
    return config_from(Outer, {"name": "n", "inner": {}, **values}, where="section")


def test_plain_values_become_what_the_hints_ask_for():
    config = outer(inner={"depth": 4}, rate=1, sizes=[4, 5.0], count=2.0, limit=7, mode=3, extra=["kept"])
    assert config.inner == Inner(depth=4)
    assert config.sizes == (4, 5)
    assert (config.rate, type(config.rate)) == (1.0, float)
    assert (config.count, type(config.count)) == (2, int)
    assert (config.limit, config.mode, config.extra) == (7, 3, ["kept"])
    assert outer(limit=None).limit is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"cuont": 1}, ("section.cuont", "did you mean 'count'")),
        ({"inner": {"dept": 1}}, ("section.inner.dept", "did you mean 'depth'")),
        ({"inner": {"depth": "x"}}, ("depth='x'", "int")),
        ({"count": "3"}, ("count='3'", "int", "str")),
        ({"count": 2.5}, ("count=2.5", "int")),
        ({"count": True}, ("count=True", "int")),
        ({"count": None}, ("count=None",)),
        ({"rate": False}, ("rate=False", "float")),
        ({"flag": 1}, ("flag=1", "bool")),
        ({"limit": "none"}, ("limit='none'", "int")),
        ({"mode": "lerned"}, ("mode='lerned'", "did you mean 'learned'", "add")),
        ({"mode": True}, ("mode=True",)),
        ({"sizes": "12"}, ("sizes='12'", "list")),
        ({"sizes": [1, "x"]}, ("sizes[1]='x'",)),
        ({"count": 10}, ("count=10", "at most 9")),
        ({"inner": 3}, ("inner=3", "Inner")),
    ],
    ids=str,
)
def test_values_that_do_not_fit_are_refused_by_name(values, words):
    with pytest.raises(ConfigError) as caught:
        outer(**values)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_field_is_named():
    with pytest.raises(ConfigError, match="name"):
        config_from(Outer, {"inner": {}})


def test_construction_checks_too():
    with pytest.raises(ConfigError, match="depth='x'"):
        Inner(depth="x")  # type: ignore[arg-type]


def test_configs_are_frozen_and_hashable():
    config = TransformerConfig()
    with pytest.raises(FrozenInstanceError):
        config.width = 3  # type: ignore[misc]
    assert hash(config) == hash(TransformerConfig())


def test_only_close_names_are_suggested():
    assert nearest("h_cycle", ["h_cycles", "l_cycles"]) == " (did you mean 'h_cycles'?)"
    assert nearest("banana", ["h_cycles"]) == ""


def test_an_unknown_preset_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'transformer_pp_tiny'"):
        preset("transformer_pp_tny")
