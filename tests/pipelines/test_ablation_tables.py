"""Tables of a made-up ablation: nothing is hidden, every print says the same, LaTeX is well formed."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pipelines.ablation_tables import claims_table, effects_table, latex, measures_table
from pipelines.claims import judge_claims, parse_claim
from pipelines.fairness import Choice, audit, choose
from pipelines.noise_floor import noise_floor
from pipelines.outcomes import Outcome
from pipelines.tables import table
from pipelines.verdicts import Rules, judge
from tests.pipelines.tables_of_seeds import outcomes, rows

PPL, BYTES, FLOPS = "ppl/window_mean/512", "state_bytes/2048", "training_flops_per_token"
BASE = np.array([50.0, 53.0, 48.0])
RULES = Rules()


def cell(ppl, size=4096, **costs):
    """Three seeds of one cell, with costs that do not vary."""
    fixed = {BYTES: size, FLOPS: 2e6, "parameters": 1_000_000, "tokens": 65536} | costs
    return {PPL: ppl, **{name: [value] * 3 for name, value in fixed.items()}}


@pytest.fixture
def ablation():
    values = {
        "full": cell(BASE),
        "no_gate & more_100%": cell(BASE + np.array([2.0, 2.1, 1.95]), size=2048, parameters=900_000),
        "unstable": cell(BASE + 1),
        "pruned": cell(BASE + 1),
        "late": cell([49.0, np.nan, np.nan]),
    }
    gone = [
        Outcome("unstable", 1, "failed", reason="the loss is not finite at step 40"),
        Outcome("pruned", 2, "pruned", reason="at step 64"),
        Outcome("late", 1, "running"),
        Outcome("late", 2, "missing"),
    ]
    return outcomes(values, gone)


def printed(ablation):
    effects = judge(ablation, PPL, "full", RULES)
    return effects_table("Components", PPL, effects, ablation, RULES, noise_floor(ablation, PPL, "full").text)


def test_every_cell_is_there_with_what_became_of_it(ablation):
    found = {row[0].text: [each.text for each in row] for row in printed(ablation).rows}
    assert list(found) == ablation.cells
    assert found["full"][1:] == ["3", "50.33", "–", "–", "–", "–", "–", "baseline"]
    assert found["no_gate & more_100%"][1] == "3"
    assert found["no_gate & more_100%"][3] == "+2.017 [+1.827, +2.206]"
    assert found["no_gate & more_100%"][-1] == "real: worse"
    assert found["unstable"][1] == "2 of 3"
    assert found["unstable"][-1] == "no verdict (failed: 1 of 3 seeds (the loss is not finite at step 40))"
    assert found["pruned"][-1] == "no verdict (pruned: 1 of 3 seeds (at step 64))"
    assert found["late"][1] == "1 of 3"
    assert found["late"][-1] == "needs 2 more seeds (better so far)"


def test_the_caption_says_how_it_was_judged(ablation):
    caption = printed(ablation).caption
    assert "paired by seed" in caption
    assert "Holm's correction over 4 comparisons" in caption
    assert "Noise floor (A/A)" in caption
    effects = judge(ablation, PPL, "full", Rules(looks=(3, 5)))
    assert "looks of 3, 5" in effects_table("x", PPL, effects, ablation, Rules(looks=(3, 5))).caption


def test_a_baseline_of_zero_has_no_relative_differences():
    recall = "recall/mqar/512"
    arms = outcomes({"full": {recall: [0.0] * 3}, "other": {recall: [0.0, 0.1, 0.2]}})
    found = effects_table("x", recall, judge(arms, recall, "full", RULES), arms, RULES).rows
    assert found[1][4].text == "–"


def test_all_prints_hold_the_same_numbers(ablation):
    found = printed(ablation)
    for print_ in (found.markdown(), found.html(), latex(found)):
        for row in found.rows:
            for each in row:
                for number in re.findall(r"\d+\.\d+", each.text):
                    assert number in print_


def test_other_measures_come_with_intervals_and_without_verdicts(ablation):
    effects = {name: judge(ablation, name, "full", RULES) for name in (PPL, BYTES, FLOPS)}
    found = {row[0].text: [each.text for each in row] for row in measures_table("All", effects, RULES).rows}
    assert found["full"][1:] == ["50.33", "4.00 KiB", "2.00M"]
    assert found["no_gate & more_100%"][1] == "52.35 (+2.017 [+1.827, +2.206])"
    assert found["no_gate & more_100%"][2:] == ["2.00 KiB (−2.00 KiB)", "2.00M"]


@pytest.mark.parametrize(("seeds", "speaks_of_intervals"), [(1, False), (3, True)])
def test_a_caption_speaks_of_intervals_where_there_are_some(seeds, speaks_of_intervals):
    arms = outcomes({"full": {PPL: BASE[:seeds]}, "other": {PPL: BASE[:seeds] + np.arange(1, seeds + 1)}})
    caption = measures_table("All", {PPL: judge(arms, PPL, "full", RULES)}, RULES).caption
    assert ("95 % interval" in caption) == speaks_of_intervals
    assert ("one seed has no interval" in caption) != speaks_of_intervals


def test_claims_stand_beside_the_papers_figures():
    cells = rows("full", "no gate", "no attention")
    stated = {
        "gate": {
            "says": "The gate helps.",
            "lower": {"cell": "full", "than": "no gate"},
            "reported": ["mela.table4_components.no_gate"],
        },
        "attention": {"says": "So does attention.", "lower": {"cell": "full", "than": "no attention"}},
    }
    claims = [parse_claim(name, values, [PPL]) for name, values in stated.items()]
    table_of = outcomes({"full": cell(BASE), "no gate": cell(BASE + np.array([2.0, 2.1, 1.95]))})
    found = claims_table(judge_claims(claims, cells, table_of, RULES), RULES, "mela_tiny, 262k tokens").rows
    assert [each.text for each in found[0]][:3] == ["The gate helps.", "supported", "1 for, 0 against, of 1"]
    assert found[0][3].text == "no gate: 17.64"
    assert [found[1][i].text for i in (1, 2, 3)] == ["not tested", "left out of this run: no attention", "no figure"]


def test_reported_figures_are_readable():
    stated = {"says": "x", "lower": {"cell": "a", "than": "b"}, "reported": ["mela.table2_hlr_cycles.by_l_cycles"]}
    judged = judge_claims([parse_claim("x", stated, [PPL])], rows("a", "b"), outcomes({"a": cell(BASE)}), RULES)
    text = claims_table(judged, RULES, "tiny").rows[0][3].text
    assert text.startswith("by l cycles: 1 (21.24 at 1024, 14.96 at 4096), 2 (23.72 at 1024)")


def test_latex_is_escaped_and_balanced(ablation):
    text = latex(printed(ablation))
    assert r"no\_gate \& more\_100\%" in text
    assert r"\toprule" in text
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
    assert text.isascii()
    assert text.count("$") % 2 == 0
    columns = len(printed(ablation).columns)
    body = text[text.index(r"\toprule") : text.index(r"\bottomrule")]
    lines = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 1 + len(ablation.cells)
    assert all(len(re.findall(r"(?<!\\)&", line)) == columns - 1 for line in lines)
    assert not re.search(r"\\\\\s*\[", text), "a bracket after a line break is read as its argument"


@pytest.mark.parametrize(
    "text", ["a_b", "50 %", "$x$", "{a}", "#1", "~^\\", "a < b | c > d", "[0.1, 0.2]", "−1 ± 2 ≤ 3 × 4"]
)
def test_no_character_of_a_cell_reaches_latex_raw(text):
    body = latex(table("t", ["c"], [[text]])).splitlines()[7]
    assert body.endswith(r" \\")
    raw = re.sub(r"\\text[a-z]+\{\}|\\[&%$#_{}]|\$[^$]*\$|\{\[\}", "", body[:-3])
    assert not set(raw) & set("&%$#_{}~^\\<>|[")


def test_fairness_prints_every_gap(ablation):
    choices = {
        "full": Choice({"pretrain.lr": 3e-3}),
        "no_gate & more_100%": Choice({"pretrain.lr": 6e-3}, edges=("pretrain.lr",)),
    }
    found = {row[0].text: [each.text for each in row] for row in audit(ablation, "full", BYTES, choices).rows}
    assert found["full"][1:] == ["1.00M", "65.5k", "2.00M", "4.00 KiB", "lr=0.003"]
    assert found["no_gate & more_100%"][1] == "900k (−10.0 %)"
    assert found["no_gate & more_100%"][4:] == ["2.00 KiB (−50.0 %)", "lr=0.006 (edge of its grid)"]
    assert found["unstable"][-1] == "not tuned"


def test_a_winner_on_the_edge_of_its_grid_is_flagged():
    grid = {"pretrain": {"lr": [1e-3, 3e-3, 9e-3], "weight_decay": [0.1]}}
    scores = [
        ({"pretrain.lr": lr, "pretrain.weight_decay": 0.1}, loss)
        for lr, loss in ((1e-3, 3.2), (3e-3, 3.0), (9e-3, 3.1))
    ]
    assert choose(grid, scores) == Choice({"pretrain.lr": 3e-3, "pretrain.weight_decay": 0.1})
    scores[2] = (scores[2][0], 2.9)
    assert choose(grid, scores).edges == ("pretrain.lr",)
    scores[2] = (scores[2][0], np.nan)
    assert choose(grid, scores).values["pretrain.lr"] == 3e-3
