"""The memory table: the paper's figures from configurations, and live caches that are what they should be."""

import sys

import pytest

from pipelines import kv_table
from pipelines.reported import paper

FIGURES = {
    "melt_1b6": (0.196608, 3.272057, 6.44245, 6.29146),
    "ouro_1b4": (0.786432, 2.869305, 25.76980, 25.16582),
    "qwen3_1b7": (0.114688, 3.441136, 3.75810, 3.67002),
}


@pytest.mark.parametrize("name", list(FIGURES))
def test_figures_follow_from_the_configuration(name):
    values = kv_table.computed(name)
    figures = dict(zip(("kv_mb_per_token", "weights_gb", "kv_32768_gb", "kv_32000_gb"), FIGURES[name], strict=True))
    assert values == pytest.approx(figures, abs=5e-6)


def test_they_are_those_of_the_paper_but_for_its_rounded_count_of_qwen3s_weights():
    differing = {
        (name, key)
        for name, figures in paper("melt")["table2_kv_memory"].items()
        for key, reported in figures.items()
        if kv_table.computed(name)[key] != pytest.approx(reported, abs=10 ** -len(str(reported).split(".")[1]) / 2)
    }
    assert differing == {("qwen3_1b7", "weights_gb")}


def test_live_caches_are_what_the_configuration_says_and_melt_has_a_quarter_of_its_teachers():
    sizes = {name: kv_table.measured(name, tokens=70) for name in ("melt_tiny", "looplm_tiny")}
    assert all(live == stated for live, stated in sizes.values())
    assert sizes["looplm_tiny"][0] == 4 * sizes["melt_tiny"][0]


def test_the_command_prints_both_tables(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kv_table"])
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as ended:
        kv_table.main()
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for figure in ("0.196608", "3.272", "6.44245", "25.76980", "3.441 [3.442]", "3.75810", "equal"):
        assert figure in out
    assert "different" not in out
