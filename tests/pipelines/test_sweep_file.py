"""Sweep files: every shipped one builds every cell, and what cannot be run is refused by name."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any, get_type_hints

import pytest
from omegaconf import OmegaConf

from models.configuration import ConfigError
from models.mela.config import MelaConfig
from models.mela.layout import chunks_written, patches_read
from models.mela.mela import Mela
from pipelines.claims import figure
from pipelines.command import load
from pipelines.config import PipelineConfig
from pipelines.evaluate import logged
from pipelines.measures import check_measure
from pipelines.protocol import PROTOCOLS
from pipelines.recipes import RECIPES
from pipelines.sweep_file import SWEEPS, read_sweep, sweep_from
from pipelines.sweeping.run_cell import TRAINED, _timing
from tests.pipelines.tables_of_seeds import rows

DISTILLS = ("melt_gates", "melt_training")
SHIPPED = sorted(path.stem for path in SWEEPS.glob("*.yaml"))

MINIMAL = {
    "title": "Depth",
    "source": "ours",
    "factors": {"model": {"layers": [1, 2], "heads": [2, 4]}},
    "baseline": {"layers": 1, "heads": 4},
    "measures": ["ppl/window_mean/1x", "ppl/window_mean/4x"],
    "budgets": {
        "tiny": {
            "preset": "transformer_pp_tiny",
            "config": {"pretrain": {"context": 64, "tokens": 4096}, "evaluate": {"contexts": [64, 256]}},
        }
    },
    "claims": {"deeper": {"says": "Deeper is better.", "lower": {"cell": {"layers": 2}, "than": {"layers": 1}}}},
}


@pytest.fixture(params=SHIPPED)
def shipped(request):
    """The name of a shipped sweep whose stage is there."""
    if request.param in DISTILLS and "distill" not in get_type_hints(PipelineConfig):
        pytest.skip("the configuration has no section distill yet")
    return request.param


def sweep(**changes):
    return sweep_from("depth", copy.deepcopy(MINIMAL) | changes)


def budget(**changes):
    tiny = MINIMAL["budgets"]["tiny"]
    return {"budgets": {"tiny": tiny | changes}}


def searching(objective):
    return {"search": {"space": {"model": {"layers": [1, 2]}}, "objectives": [objective]}, "n_trials": 2}


def claiming(measures=None, than=()):
    lower = {"cell": {"layers": 2}, "than": {"layers": 1}, "than_measures": list(than)}
    return {"claims": {"x": {"says": "x", "lower": lower} | ({"measures": measures} if measures else {})}}


def test_the_papers_tables_and_open_questions_are_shipped():
    assert set(SHIPPED) == {
        *("hlr_cycles", "module_depth", "gating", "fusion", "chunk_size", "ns_steps", "components", "length"),
        *("recursion", "controls", "melt_gates", "melt_training", "melt_kv_memory", "melt_loops", "melt_chunk"),
        *("melt_gqa", "hlr_search", "noise_floor"),
    }


@pytest.mark.parametrize("budget", ["tiny", "paper"])
def test_every_shipped_sweep_is_accepted_with_all_its_cells(shipped, budget):
    found = sweep_from(shipped, read_sweep(SWEEPS / f"{shipped}.yaml") | {"budget": budget})
    cells = found.table()
    assert found.baseline_name in [cell.name for cell in cells]
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        config = cell.model_config()
        for path, value in cell.overrides.items():
            if path.startswith("model."):
                assert getattr(config, path.removeprefix("model.")) == value
    for claim in found.parsed_claims():
        assert claim.contrasts(cells)
        assert all(figure(path) is not None for path in claim.reported)


@pytest.mark.parametrize("budget", ["tiny", "paper"])
def test_every_memory_is_read_and_written_in_training(shipped, budget):
    found = sweep_from(shipped, read_sweep(SWEEPS / f"{shipped}.yaml") | {"budget": budget})
    for cell in found.table():
        config = cell.model_config()
        if isinstance(config, MelaConfig) and config.memory == "on":
            read = patches_read(config, found.context)
            assert read > 0, cell.name
            assert not config.neural_memory or chunks_written(config, read) > 0, cell.name


@pytest.mark.parametrize("name", ["controls", "length"])
@pytest.mark.parametrize("budget", ["tiny", "paper"])
def test_local_controls_see_as_much_text_as_mela(name, budget):
    table = sweep_from(name, read_sweep(SWEEPS / f"{name}.yaml") | {"budget": budget}).table()
    cells: dict[str, Any] = {cell.name: cell.model_config() for cell in table}
    assert cells["window"].window == cells["chunk"].chunk == cells["Mela"].text_chunk


def test_the_command_line_of_a_cell_is_accepted(shipped):
    found = sweep_from(shipped, read_sweep(SWEEPS / f"{shipped}.yaml"))
    cell = found.table()[-1]
    config = load(cell.command_line(seed=2), SWEEPS.parent)
    assert (config.seed, config.model_name) == (2, cell.preset)
    section = getattr(config, found.stage)
    stated = found.budgets["tiny"]["config"][found.stage]
    assert {name: getattr(section, name) for name in stated} == stated
    assert section.context == found.context


@pytest.mark.parametrize("name", ["hlr_cycles", "length", "melt_kv_memory"])
def test_the_papers_budgets_are_accepted(name):
    found = sweep_from(name, read_sweep(SWEEPS / f"{name}.yaml") | {"budget": "paper"})
    assert load(found.table()[0].command_line(seed=0), SWEEPS.parent).pretrain.tokens >= 256_000_000


@pytest.mark.parametrize("name", DISTILLS)
def test_the_papers_distillations_keep_its_recipe(name):
    found = sweep_from(name, read_sweep(SWEEPS / f"{name}.yaml") | {"budget": "paper"})
    recipe = RECIPES["melt_1b6"]["distill"] | found.fixed.get("distill", {})
    distill = asdict(load(found.table()[0].command_line(seed=0), SWEEPS.parent).distill)
    assert {field: distill[field] for field in recipe} == recipe | {"betas": tuple(recipe["betas"])}


def test_what_hydra_makes_of_a_sweep_is_the_sweep(shipped):
    """Names and values survive OmegaConf, which is how a sweep reaches the sweeper."""
    values = read_sweep(SWEEPS / f"{shipped}.yaml")
    through: dict = OmegaConf.to_container(OmegaConf.create(values), resolve=True)  # type: ignore[assignment]
    assert sweep_from(shipped, through) == sweep_from(shipped, values)


def test_what_is_fixed_wins_over_the_budget():
    assert {cell.overrides["pretrain.tokens"] for cell in sweep(fixed={"pretrain": {"tokens": 8192}}).table()} == {8192}


def test_everything_a_run_measures_can_be_named():
    shares = {"256": 0.5}
    metrics = {
        **{protocol: dict.fromkeys(Mela.controls, shares) for protocol in PROTOCOLS},
        **{"bits_per_byte": shares, "state_bytes": shares, "peak_memory_bytes": shares},
        "streaming": {"tokens": 9, "perplexity": 2.0},
        "recall": {"chance": 0.1, "mqar": shares, "needle": {"256": {"0.25": 0.5}}, "facts": {"1": 0.5}}
        | {"questions": {"mqar": shares, "needle": shares, "facts": {"1": 4}}},
    }
    timing = {"prefill_tokens_per_second": shares, "decode_tokens_per_second": 1.0, "seconds": 2.0}
    for name in (*logged(metrics), *_timing(timing), *TRAINED):
        check_measure(name, name, "measures", rows("a"))


def test_axes_are_crossed_and_cells_are_command_lines():
    cells = sweep().table()
    assert [cell.name for cell in cells] == [
        "layers=1 heads=2",
        "layers=1 heads=4",
        "layers=2 heads=2",
        "layers=2 heads=4",
    ]
    assert cells[1].command_line(seed=3) == [
        "model=transformer_pp_tiny",
        "pretrain.context=64",
        "pretrain.tokens=4096",
        "evaluate.contexts=[64,256]",
        "model.layers=1",
        "model.heads=4",
        "seed=3",
    ]


def test_rows_are_crossed_with_axes_and_win_over_what_all_cells_share():
    rows = {"full": {}, "narrow": {"model": {"width": 64}, "pretrain": {"tokens": 8192}}}
    found = sweep(rows=rows, factors={"model": {"layers": [1, 2]}}, baseline={"row": "full", "layers": 1})
    assert [cell.name for cell in found.table()] == [
        "full layers=1",
        "full layers=2",
        "narrow layers=1",
        "narrow layers=2",
    ]
    assert found.table()[2].overrides["pretrain.tokens"] == 8192
    assert found.table()[2].overrides["model.width"] == 64


def test_measures_follow_the_training_context():
    assert sweep().measure("ppl/window_mean/4x") == "ppl/window_mean/256"
    assert sweep().measure("state_bytes/0.5x/zero") == "state_bytes/32/zero"
    assert sweep().measure("training_flops_per_token") == "training_flops_per_token"
    assert sweep().parsed_claims()[0].measures == ("ppl/window_mean/64",)


def test_only_runs_a_part_with_the_baseline_and_keeps_the_claims():
    found = sweep(only={"heads": [2]})
    assert [cell.name for cell in found.cells()] == ["layers=1 heads=2", "layers=1 heads=4", "layers=2 heads=2"]
    assert found.parsed_claims() == sweep().parsed_claims()


def test_replicates_are_the_same_run_once_more():
    rows = {"reference": {}}
    found = sweep(rows=rows, factors={}, baseline="reference", replicates=2, claims={})
    first, again = found.table()
    assert (first.name, again.name) == ("reference", "reference again")
    assert (first.overrides, first.replicate, again.replicate) == (again.overrides, 0, 1)


def test_tuning_cells_are_the_same_grid_for_every_arm():
    budgets = copy.deepcopy(MINIMAL["budgets"])
    budgets["tiny"]["nuisance"] = {"pretrain": {"lr": [1e-3, 3e-3], "weight_decay": [0.0, 0.1]}}
    found = sweep(budgets=budgets)
    for cell in found.table():
        grid = found.tuning_cells(cell)
        assert [(each.overrides["pretrain.lr"], each.overrides["pretrain.weight_decay"]) for each in grid] == [
            (1e-3, 0.0),
            (1e-3, 0.1),
            (3e-3, 0.0),
            (3e-3, 0.1),
        ]
        assert all(each.overrides.items() >= cell.overrides.items() for each in grid)


def test_trials_of_a_search_vary_the_baseline():
    space = {"model": {"layers": [1, 2], "heads": [2, 4]}}
    found = sweep(
        rows={"reference": {}},
        factors={},
        baseline="reference",
        claims={},
        verdicts=None,
        seeds=1,
        search={"space": space, "objectives": ["ppl/window_mean/1x"]},
        n_trials=4,
    )
    trial = found.trial({"model.layers": 2, "model.heads": 4})
    assert trial.name == "reference layers=2 heads=4"
    assert trial.overrides["model.layers"] == 2


def test_a_budget_may_take_over_a_shared_one(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "budgets.yaml").write_text("base: {preset: a, config: {pretrain: {context: 8, lr: 0.1}}}")
    (tmp_path / "one.yaml").write_text("budgets: {tiny: {like: base, config: {pretrain: {lr: 0.2}}}}")
    assert read_sweep(tmp_path / "one.yaml")["budgets"]["tiny"] == {
        "preset": "a",
        "config": {"pretrain": {"context": 8, "lr": 0.2}},
    }
    (tmp_path / "one.yaml").write_text("budgets: {tiny: {like: bass}}")
    with pytest.raises(ConfigError, match=r"budgets.tiny.like='bass' \(did you mean 'base'\?\)"):
        read_sweep(tmp_path / "one.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factors": {"model": {"layres": [1, 2]}}, "baseline": {"layres": 1}, "claims": {}}, "did you mean 'layers'"),
        (
            {"factors": {"pretrain": {"lrs": [1, 2]}}, "baseline": {"lrs": 1}, "claims": {}},
            "unknown factor pretrain.lrs",
        ),
        (
            {"factors": {"execution": {"threads": [1, 2]}}, "baseline": {"threads": 1}},
            "'execution.threads' is not some",
        ),
        ({"factors": {"seed": [1, 2]}, "baseline": {"seed": 1}}, "'seed' is not something a sweep can vary"),
        ({"factors": {"model": {"layers": 2}}, "baseline": {"layers": 2}}, "model.layers=2 must be a list"),
        ({"factors": {"model": {"layers": [1, "two"]}}, "baseline": {"layers": 1}}, "cell 'layers=two'.*must be int"),
        ({"baseline": {"layers": 3}}, "baseline: no cell has layers=3; the table has 1, 2"),
        ({"baseline": {"layers": 1}}, "names 2 cells: layers=1 heads=2, layers=1 heads=4"),
        ({"baseline": "layers=1"}, "no cell is called 'layers=1'"),
        ({"seeds": 1}, "seeds=1 supports no verdict: at least 3 are needed, or set verdicts=null"),
        ({"verdicts": None}, "claims need verdicts"),
        (
            {"claims": {"x": {"says": "x", "lower": {"cell": {"layers": 8}, "than": {"layers": 1}}}}},
            "no cell has layers=8",
        ),
        (
            {"rows": {"a": {}, "b": {"model": {"width": 128}}}, "factors": {}, "baseline": "a"},
            "'a' and 'b' are the same",
        ),
        ({"rows": {"a": {"preset": "mamba"}}, "factors": {}, "baseline": "a"}, "rows.a.preset='mamba'"),
        (
            {"factors": {"model": {"vocab_size": [300]}, "data": {"vocab_size": [300]}}},
            "two axes are called vocab_size",
        ),
        ({"budget": "papr"}, "budget='papr'"),
        ({"measures": ["ppl/window_mean/8x"]}, r"measure 'ppl/window_mean/8x' needs a context of 512 tokens"),
        ({"measures": ["ppl/window_mean/0.3x"]}, "not a whole number of tokens"),
        ({"measures": []}, "at least one"),
        ({"tittle": "x"}, r"tittle \(did you mean 'title'\?\)"),
        ({"verdicts": {"alfa": 0.1}}, "verdicts.alfa.*did you mean 'alpha'"),
        ({"only": {"layers": 5}}, "only: no cell has layers=5"),
        ({"budgets": {"tiny": {"preset": "transformer_pp_tiny", "config": {}}}}, "must state pretrain.context"),
        ({"search": {"space": {"model": {"heads": [3]}}, "objectives": []}, "n_trials": 2}, "heads"),
        ({"n_trials": 8}, "search and n_trials belong together"),
        ({"tune": True}, "tune=true needs budgets.tiny.nuisance"),
        (
            {"factors": {"distill": {"lr": [1e-3, 2e-3]}}, "baseline": {"lr": 1e-3}, "claims": {}},
            "factors: a pretrain sweep does not read distill.lr, .* such as pretrain.lr",
        ),
        ({"rows": {"a": {}, "b": {"distill": {"lr": 1.0}}}, "factors": {}}, "rows: a pretrain sweep does not read"),
        (budget(rows={"a": {"distill": {"lr": 1.0}}}), "budgets.tiny.rows: a pretrain sweep does not read distill.lr"),
        (budget(nuisance={"distill": {"lr": [1.0]}}), "budgets.tiny.nuisance: a pretrain sweep does not read"),
        (
            {"stage": "distill", **budget(nuisance={"pretrain": {"lr": [1.0]}}, config={"distill": {"context": 64}})},
            "budgets.tiny.nuisance: a distill sweep does not read pretrain.lr",
        ),
        (
            {"search": {"space": {"distill": {"lr": [1.0]}}, "objectives": []}, "n_trials": 2},
            "search.space: a pretrain sweep does not read distill.lr",
        ),
        ({"fixed": {"model": {"layers": 3}}}, "fixed.model.layers.* is a factor"),
        ({"measures": ["pll/window_mean/1x"]}, r"unknown measure 'pll/window_mean/1x' \(did you mean 'ppl/window_mean"),
        ({"measures": ["ppl/window_mean/1x/zeroed"]}, "measures: unknown measure"),
        (searching("ppl/window_mean"), "search.objectives: unknown measure 'ppl/window_mean'"),
        (searching("bits_per_byte/2x"), r"search.objectives: measure 'bits_per_byte/2x' needs a context of 128 tokens"),
        (claiming(measures=["bits_per_bite/1x"]), "claims.x.measures: unknown measure 'bits_per_bite/1x'"),
        (claiming(than=["ppl/window_mean/8x"]), "claims.x.than_measures: .* needs a context of 512 tokens"),
        (
            {"measures": ["ppl/window_mean/1x/zero"], "fixed": {"evaluate": {"controls": False}}},
            "needs evaluate.controls=true",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        sweep(**changes)
