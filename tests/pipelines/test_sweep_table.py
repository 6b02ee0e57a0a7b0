"""The table of a sweep: from a queue to pages, and back to the ledger, with nothing lost, altered or invented."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelines.config import TrackingConfig
from pipelines.ledger import open_run
from pipelines.outcomes import Outcome
from pipelines.sweep_file import SWEEPS, read_sweep, sweep_from
from pipelines.sweeping import pages
from pipelines.sweeping.ablation import UNPLANNED, Ablation
from pipelines.sweeping.check import check
from pipelines.sweeping.drawings import drawings
from pipelines.sweeping.plan import code_of

MEASURES = ("ppl/window_mean/128", "ppl/window_mean/512", "ppl/window_mean/1024", "ppl/window_mean/2048")


def made_up(effects: Sequence[float], seeds: int = 3, sweep: str = "gating", noise: float = 0.05) -> Ablation:
    """Cells whose perplexity differs from the baseline's by `effects`, with seeds that move all cells together."""
    values = read_sweep(SWEEPS / f"{sweep}.yaml")
    cells, draw = sweep_from(sweep, values).cells(), np.random.default_rng(0)
    together, outcomes, curves = draw.normal(0, 1, seeds), [], {}
    for k, (cell, effect) in enumerate(zip(cells, [*effects, *[0.0] * len(cells)], strict=False)):
        for seed in range(seeds):
            perplexity = {name: float(20 + together[seed] + effect + draw.normal(0, noise)) for name in MEASURES}
            costs = {"parameters": 1e6, "tokens": 262144.0, "training_flops_per_token": 1e7 * (k + 1)}
            others = {"bits_per_byte/512": 1.5, "state_bytes/2048": 4096.0}
            code = code_of("pretrain", "transformer")
            source = {"commit": "c" * 40, "data_digest": "d" * 64, "family": "transformer", "code": code}
            source["run_id"] = f"{cell.name}{seed}"
            outcomes.append(Outcome(cell.name, seed, "done", perplexity | costs | others, "", source))
            curves[f"{cell.name} · seed {seed}"] = [[8, 1024, 5.0], [16, 2048, 4.0 + effect / 100]]
    return Ablation(sweep, f"{sweep}-12345678", values, tuple(range(seeds)), (seeds,), tuple(outcomes), curves)


def test_effects_that_are_there_are_found_and_the_pages_say_so(tmp_path):
    ablation = made_up([0, 1.0, -1.0])
    baseline, worse, better = ablation.effects(ablation.measures[0])
    assert [effect.text for effect in (baseline, worse, better)] == ["baseline", "real: worse", "real: better"]
    page = pages.write(ablation, tmp_path / "gating")
    for file in ("index.html", "table.md", "table.tex"):
        assert "real: better" in (page.parent / file).read_text()
    assert {drawing.name for drawing in drawings(ablation)} == {"effects", "seeds", "training", "frontier"}
    assert all((page.parent / f"{drawing.name}.png").stat().st_size > 1000 for drawing in drawings(ablation))


def test_without_an_effect_nothing_is_real():
    texts = [effect.text for effect in made_up([0, 0.001, -0.001], noise=0.5).effects(MEASURES[1])[1:]]
    assert not any("real" in text for text in texts)


def test_pages_are_a_function_of_their_data(tmp_path):
    ablation = made_up([0, 1.0, -1.0], sweep="hlr_cycles")
    page = pages.write(ablation, tmp_path / "hlr_cycles")
    again = pages.read(page.parent)
    assert (again.outcomes, again.sweep) == (ablation.outcomes, ablation.sweep)
    written = {name: (page.parent / name).read_text() for name in ("table.md", "table.tex", "index.html")}
    assert pages.texts(again) == written
    assert all(f"{drawing}.png" in written["table.md"] for drawing in ("heat_map", "effects"))


def test_a_second_look_costs_alpha():
    once = made_up([0, 0.3, -0.3], seeds=5)
    twice = replace(once, looks=(3, 5))
    assert twice.rules.looks == (3, 5)
    assert twice.effects(MEASURES[1])[1].p > once.effects(MEASURES[1])[1].p


def test_looks_that_nobody_stated_are_told_with_what_they_cost():
    once = made_up([0, 0.3, -0.3], seeds=5)
    stated = replace(once, values=once.values | {"verdicts": {"looks": [3, 5]}})
    assert UNPLANNED in replace(once, looks=(3, 5)).effects_table().caption
    assert UNPLANNED not in once.effects_table().caption
    assert UNPLANNED not in replace(stated, looks=(3, 5)).effects_table().caption


def test_a_run_with_uncommitted_changes_is_marked():
    ablation = made_up([0])
    first, second, *rest = ablation.outcomes
    first = replace(first, provenance={**first.provenance, "dirty": "true"})
    second = replace(second, provenance={**second.provenance, "dirty": "False"})
    table = replace(ablation, outcomes=(first, second, *rest)).runs_table()
    assert [row[4].text for row in table.rows[:3]] == ["cccccccc+", "cccccccc", "cccccccc"]
    assert "uncommitted changes" in table.caption


def test_levels_that_are_lists_are_drawn_and_claimed():
    ablation = made_up([0, 1.0])
    betas = [[0.9, 0.95], [0.9, 0.99]]
    values = {
        **ablation.values,
        "factors": {"pretrain": {"betas": betas}},
        "baseline": {"betas": betas[0]},
        "claims": {"lower": {"says": "Lower is better.", "monotone": {"factor": "betas"}}},
    }
    cells = sweep_from("gating", values).cells()
    names = dict(zip(ablation.table.cells, [cell.name for cell in cells], strict=False))
    outcomes = tuple(replace(o, cell=names[o.cell]) for o in ablation.outcomes if o.cell in names)
    listed = replace(ablation, values=values, outcomes=outcomes)
    assert [judgement.ruling for judgement in listed.judgements] == ["contradicted"]
    assert "effects" in {drawing.name for drawing in drawings(listed)}


def test_failed_and_pruned_runs_stay_in_the_table(tmp_path):
    ablation = made_up([0, 1.0, -1.0])
    cells = ablation.table.cells
    lost = [
        Outcome(cells[1], 0, "failed", reason="the loss is NaN"),
        Outcome(cells[2], 1, "pruned", reason="at step 8"),
    ]
    kept = [each for each in ablation.outcomes if (each.cell, each.seed) not in {(o.cell, o.seed) for o in lost}]
    spoilt = replace(ablation, outcomes=(*kept, *lost))
    text = pages.texts(spoilt)["table.md"]
    assert "failed: the loss is NaN" in text
    assert "pruned: at step 8" in text
    assert [effect.verdict for effect in spoilt.effects(MEASURES[1])] == ["baseline", "no verdict", "no verdict"]
    assert [outcome.cell for outcome in spoilt.failed] == [cells[1]]


@pytest.fixture
def recorded(tmp_path, ledger_file) -> tuple[Path, TrackingConfig]:
    """A table whose numbers are in the ledger."""
    tracking = TrackingConfig(f"sqlite:///{ledger_file}", "gating")
    ablation, outcomes = made_up([0, 1.0, -1.0]), []
    for each in ablation.outcomes:
        run = open_run(tracking, each.provenance["run_id"], "run", {}, {}, {"name": "toy", "digest": "d" * 64})
        run.record([(0, each.values)])
        outcomes.append(replace(each, provenance={**each.provenance, "run_id": run.run_id}))
    page = pages.write(replace(ablation, outcomes=tuple(outcomes)), tmp_path / "gating")
    return page.parent, tracking


def test_a_table_the_ledger_agrees_with_passes(recorded):
    assert check(*recorded) == []


def test_a_pruned_run_is_no_problem(recorded):
    folder, tracking = recorded
    ablation = pages.read(folder)
    last = ablation.outcomes[-1]
    gone = Outcome(last.cell, last.seed, "pruned", reason="at step 8")
    pages.write(replace(ablation, outcomes=(*ablation.outcomes[:-1], gone)), folder)
    assert check(folder, tracking) == []


def test_commits_with_the_same_code_are_not_mixed(recorded):
    folder, tracking = recorded
    data = json.loads((folder / pages.DATA).read_text())
    data["outcomes"][0]["provenance"] |= {"commit": "b" * 40}
    pages.write(Ablation.load(data), folder)
    assert check(folder, tracking) == []


def test_every_kind_of_untruth_is_found_with_its_cell(recorded):
    folder, tracking = recorded
    data = json.loads((folder / pages.DATA).read_text())
    first, second, third, *rest = data["outcomes"]
    first["values"]["ppl/window_mean/512"] += 0.001
    second["provenance"] |= {"data_digest": "e" * 64}
    third["provenance"] |= {"code": "an older digest", "commit": "b" * 40}
    cell, missing = rest[-1]["cell"], rest[-1]["seed"]
    ablation = Ablation.load(data | {"outcomes": data["outcomes"][:-1]})
    pages.write(ablation, folder)
    (folder / "table.tex").write_text("better")
    found = "\n".join(check(folder, tracking))
    name = f"{first['cell']} · seed {first['seed']}"
    assert f"{name}: ppl/window_mean/512 is {first['values']['ppl/window_mean/512']} here" in found
    other = f"{second['cell']} · seed {second['seed']}"
    assert f"mixed data: {name} dddddddd; {other} eeeeeeee" in found
    older = f"{third['cell']} · seed {third['seed']}"
    assert f"mixed commits, between which the code differs: {name} cccccccc; {older} bbbbbbbb" in found
    assert f"{third['cell']} · seed {third['seed']}: stale, the code of transformer changed" in found
    assert f"{cell} · seed {missing}: missing" in found
    assert "table.tex is not what data.json gives" in found
