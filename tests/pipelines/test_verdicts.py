"""Verdicts on made-up tables, and the rates of right and wrong ones over many of them."""

from __future__ import annotations

import numpy as np
import pytest

from models.configuration import ConfigError
from pipelines.noise_floor import noise_floor
from pipelines.outcomes import Outcome
from pipelines.statistics import differences_to, holm, paired
from pipelines.verdicts import Rules, allocate, judge
from tests.pipelines.tables_of_seeds import outcomes

PPL = "ppl/window_mean/512"
BASE = np.array([50.0, 53.0, 48.0, 51.0, 52.0])


def verdicts(cells, rules=Rules(), measure=PPL, replaced=()):  # noqa: B008 a frozen config
    named = {name: {measure: np.asarray(values, float)} for name, values in {"base": BASE, **cells}.items()}
    return {effect.cell: effect for effect in judge(outcomes(named, replaced), measure, "base", rules)}


def test_a_clear_paired_effect_is_real_although_seeds_differ_by_more():
    found = verdicts({"deeper": BASE - [1.0, 1.1, 0.9, 1.05, 0.95]})
    assert found["deeper"].text == "real: better"
    assert found["deeper"].low < -1 < found["deeper"].high < 0
    assert found["base"].text == "baseline"
    assert found["base"].mean == pytest.approx(BASE.mean())


@pytest.mark.parametrize(("measure", "word"), [(PPL, "worse"), ("recall/mqar", "better"), ("state_bytes/512", "worse")])
def test_direction_follows_the_measure(measure, word):
    assert verdicts({"more": BASE + np.array([1, 1.1, 0.9, 1, 1])}, measure=measure)["more"].text == f"real: {word}"


def test_an_open_effect_says_how_many_seeds_would_settle_it():
    effect = verdicts({"maybe": BASE - [2.0, 0.1, 1.4, 0.2, 1.0]})["maybe"]
    assert effect.verdict == "needs more seeds"
    assert 1 <= effect.more_seeds <= 15
    assert effect.text == f"needs {effect.more_seeds} more seeds (better so far)"


def test_noise_is_not_shown():
    assert verdicts({"same": BASE + np.array([0.5, -0.6, 0.3, -0.4, 0.25])})["same"].text == "not shown (worse so far)"


def test_equal_runs_are_not_shown_to_differ():
    effect = verdicts({"copy": BASE})["copy"]
    assert (effect.verdict, effect.text, effect.difference) == ("not shown", "not shown", 0)


def test_an_effect_shown_to_be_smaller_than_of_interest_needs_no_more_seeds():
    tiny = BASE + np.array([0.2, -0.1, 0.15, -0.05, 0.1])
    assert verdicts({"tiny": tiny}, Rules(smallest_effect=0.02))["tiny"].text == "not shown: smaller than of interest"
    assert not verdicts({"tiny": tiny})["tiny"].equivalent


@pytest.mark.parametrize("third", [np.nan, 51.001])
def test_nothing_is_shown_to_be_small_below_three_seeds(third):
    tiny = np.array([50.001, 53.002, third, np.nan, np.nan])
    base = np.array([50.0, 53.0, 51.0, np.nan, np.nan])
    named = {"base": {PPL: base}, "tiny": {PPL: tiny}}
    _, effect = judge(outcomes(named), PPL, "base", Rules(smallest_effect=0.02))
    assert effect.equivalent == np.isfinite(third)


def test_equivalence_pays_for_its_looks():
    tiny = BASE + np.array([0.9, -0.5, 0.7, -0.3, 0.5])
    bound = 0.02  # of the baseline's mean
    plain = paired(tiny - BASE).within(bound * BASE.mean())
    assert 0.4 * 0.05 < plain < 0.05  # enough in one look, not for the 2 of 5 seeds' share of the last of two
    assert verdicts({"tiny": tiny}, Rules(smallest_effect=bound))["tiny"].equivalent
    assert not verdicts({"tiny": tiny}, Rules(smallest_effect=bound, looks=(3, 5)))["tiny"].equivalent


def test_no_verdict_below_three_seeds():
    effect = verdicts({"early": [49, 52, np.nan, np.nan, np.nan]})["early"]
    assert (effect.verdict, effect.more_seeds, effect.seeds) == ("needs more seeds", 1, 2)
    assert np.isnan(effect.adjusted_p)


@pytest.mark.parametrize("status", ["failed", "pruned"])
def test_survivors_of_a_failed_or_pruned_cell_are_not_judged(status):
    better = BASE - [1.0, 1.1, 0.9, 1.05, 0.95]
    gone = Outcome("deeper", 4, status, reason="at step 40")
    effect = verdicts({"deeper": better, "also": better}, replaced=[gone])
    assert effect["deeper"].text == f"no verdict ({status}: 1 of 5 seeds (at step 40))"
    assert effect["also"].verdict == "real"


def test_a_failed_baseline_takes_every_verdict():
    found = verdicts({"deeper": BASE - 1}, replaced=[Outcome("base", 0, "failed", reason="NaN")])
    assert found["deeper"].text == "no verdict (baseline failed: 1 of 5 seeds (NaN))"


def test_cells_still_running_count_in_the_correction():
    p = verdicts({"a": BASE - [1, 0.4, 0.8, 0.9, 0.7]})["a"]
    beside = verdicts({"a": BASE - [1, 0.4, 0.8, 0.9, 0.7], **{f"later {i}": [np.nan] * 5 for i in range(7)}})["a"]
    assert beside.adjusted_p == pytest.approx(8 * p.adjusted_p)


def test_judged_tables_are_the_simulated_ones():
    """What `test_statistics` simulates by the ten thousand is what `judge` does to one table."""
    values = 20 + np.random.default_rng(3).normal(size=(9, 3))
    values[4] -= 6
    table = outcomes({f"cell {i}": {PPL: row} for i, row in enumerate(values)})
    judged = judge(table, PPL, "cell 0", Rules())
    adjusted = holm(paired(differences_to(values, 0)).p)
    np.testing.assert_allclose([effect.adjusted_p for effect in judged], adjusted)
    assert [effect.verdict == "real" for effect in judged] == list(adjusted < 0.05)


def test_every_verdict_of_a_table_without_effects():
    """500 whole tables of 9 equal cells and 3 seeds through `judge`: at most 5 % with any "real"."""
    rng, wrong = np.random.default_rng(5), 0
    for _ in range(500):
        values = 20 + rng.normal(size=(9, 3)) + rng.normal(size=(1, 3))
        judged = judge(outcomes({f"cell {i}": {PPL: row} for i, row in enumerate(values)}), PPL, "cell 0", Rules())
        wrong += any(effect.verdict == "real" for effect in judged)
    assert wrong / 500 <= 0.05


def test_following_a_recommendation_usually_settles_the_cell():
    """Planned for the observed effect of 1.2 sd: of the cells told to add k seeds, at least 3 of 4 become real."""
    rng, rules = np.random.default_rng(7), Rules(max_seeds=60)
    told, real = 0, 0
    for _ in range(300):
        d = rng.normal(1.2, 1, size=60)
        first = judge(outcomes({"base": {PPL: np.zeros(5)}, "cell": {PPL: d[:5]}}), PPL, "base", rules)[1]
        if first.verdict == "needs more seeds":
            told += 1
            real += float(paired(d[: 5 + first.more_seeds]).p) < rules.alpha
    assert told > 50
    assert real / told > 0.75


def test_looks_spend_alpha_and_the_next_seeds_go_to_open_cells():
    rules = Rules(looks=(3, 5, 8, 12, 20))
    found = verdicts({"clear": BASE - [5, 5.02, 4.99, 5, 5.01], "open": BASE - [2.0, 0.1, 1.4, 0.2, 1.0]}, rules)
    assert found["clear"].verdict == "real"
    assert found["open"].verdict == "needs more seeds"
    assert found["open"].seeds + found["open"].more_seeds in rules.looks
    assert allocate(list(found.values()), rules) == [("open", 8)]
    plain = verdicts({"open": BASE - [2.0, 0.1, 1.4, 0.2, 1.0]})["open"]
    assert found["open"].low < plain.low
    assert found["open"].high > plain.high


@pytest.mark.parametrize("fourth", [-40.0, -4.0, 5.2])
def test_direction_interval_and_verdict_speak_of_the_same_seeds(fourth):
    """A fourth seed that contradicts the first three takes their verdict back."""
    effect = verdicts({"odd": [55, 59, 53.5, 51 + fourth, np.nan]}, Rules(looks=(3, 4)))["odd"]
    assert effect.seeds == 4
    assert (effect.verdict == "real") == (fourth > 0)
    assert (effect.low < 0 < effect.high) == (fourth < 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"looks": (5, 3)}, "looks"),
        ({"looks": (2, 4)}, "at least 3"),
        ({"alpha": 0}, "alpha"),
        ({"smallest_effect": 0}, "smallest_effect"),
        ({"max_seeds": 2}, "max_seeds"),
    ],
)
def test_impossible_rules_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Rules(**fields)


def test_noise_floor_of_a_configuration_against_itself():
    table = outcomes({"base": {PPL: BASE}, "again": {PPL: BASE}})
    floor = noise_floor(table, PPL, "base", "again")
    assert floor.seed_sd == pytest.approx(np.std(BASE, ddof=1))
    assert "same seed twice: no difference" in floor.text.lower()
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, floor.seed_sd, size=(2, 4000, 5)).mean(axis=-1)
    assert (np.abs(a - b) > floor.unpaired).mean() < 0.05
    assert "not measured" in noise_floor(outcomes({"base": {PPL: BASE[:1]}}), PPL, "base").text
