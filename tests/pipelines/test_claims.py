"""Claims on made-up tables: each predicate, each ruling, and how often claims about nothing are ruled on."""

from __future__ import annotations

import numpy as np
import pytest

from models.configuration import ConfigError
from pipelines.claims import figure, judge_claims, parse_claim
from pipelines.outcomes import Outcome
from pipelines.verdicts import Rules
from tests.pipelines.tables_of_seeds import grid, outcomes, rows

SEEDS = 5
BASE = np.array([50.0, 53.0, 48.0, 51.0, 52.0])
JITTER = np.array([0.02, -0.03, 0.01, 0.04, -0.02])


def rule(cells, values, predicate, measures=("ppl",), replaced=(), **fields):
    claim = parse_claim("it", {"says": "So it is.", **predicate, **fields}, measures)
    return judge_claims([claim], cells, outcomes(values, replaced), Rules())[0]


def shifted(**by):
    """One measure per cell: the baseline's seeds, shifted, with a little noise of each cell's own."""
    return {name: {"ppl": BASE + shift + np.roll(JITTER, i)} for i, (name, shift) in enumerate(by.items())}


@pytest.mark.parametrize(("gap", "ruling"), [(1.0, "supported"), (-1.0, "contradicted"), (0.0, "not shown")])
def test_lower(gap, ruling):
    found = rule(rows("a", "b"), shifted(a=0, b=gap), {"lower": {"cell": "a", "than": "b"}})
    assert found.ruling == ruling


def test_means_alone_support_nothing():
    values = {"a": {"ppl": BASE}, "b": {"ppl": BASE + np.array([9, -6, 7, -5, 2])}}
    assert values["b"]["ppl"].mean() > values["a"]["ppl"].mean()
    assert rule(rows("a", "b"), values, {"lower": {"cell": "a", "than": "b"}}).ruling == "not shown"


def test_every_comparison_of_a_claim_must_be_shown():
    claim = {"lower": {"cell": "a", "than": ["b", "c"]}}
    found = rule(rows("a", "b", "c"), shifted(a=0, b=1, c=0), claim)
    assert (found.ruling, found.shown, found.contrasts) == ("not shown", 1, 2)
    assert rule(rows("a", "b", "c"), shifted(a=0, b=1, c=-1), claim).ruling == "contradicted"


def test_a_factor_lower_by_a_ratio_and_between_measures():
    values = {"a": {"near": BASE, "far": 3 * BASE + JITTER}}
    twice = {"lower": {"cell": "a", "than": "a", "than_measures": ["far"], "factor": 0.5}}
    assert rule(rows("a"), values, twice, measures=("near",)).ruling == "supported"
    four = {"lower": {"cell": "a", "than": "a", "than_measures": ["far"], "factor": 0.25}}
    assert rule(rows("a"), values, four, measures=("near",)).ruling == "contradicted"


@pytest.mark.parametrize(("gap", "ruling"), [(0.1, "supported"), (2.0, "contradicted"), (0.5, "not shown")])
def test_equal_within_a_margin(gap, ruling):
    found = rule(rows("a", "b"), shifted(a=gap, b=0), {"equal": {"cell": "a", "than": "b", "within": 0.01}})
    assert found.ruling == ruling


def test_bytes_are_equal_exactly_or_not_at_all():
    values = {"four": {"bytes": [1024] * 3}, "one": {"bytes": [256] * 3}}
    quarter = {"equal": {"cell": "one", "than": "four", "factor": 0.25}}
    assert rule(rows("four", "one"), values, quarter, measures=("bytes",)).ruling == "supported"
    values["one"]["bytes"] = [260] * 3
    assert rule(rows("four", "one"), values, quarter, measures=("bytes",)).ruling == "contradicted"


@pytest.mark.parametrize(
    ("levels", "direction", "ruling"),
    [
        ((0, -1, -2), "falls", "supported"),
        ((0, -1, -2), "rises", "contradicted"),
        ((0, -1, -1), "falls", "not shown"),
        ((0, 1, -2), "falls", "contradicted"),
    ],
)
def test_monotone(levels, direction, ruling):
    values = shifted(**{f"layers={n}": shift for n, shift in zip((1, 2, 4), levels, strict=True)})
    found = rule(grid(layers=[1, 2, 4]), values, {"monotone": {"factor": "layers", "direction": direction}})
    assert (found.ruling, found.contrasts) == (ruling, 2)


def test_pairs_agree_on_the_factors_a_claim_does_not_name_and_may_be_averaged():
    cells = grid(layers=[1, 2], heads=[2, 4])
    values = shifted(**{"layers=1 heads=2": 0, "layers=1 heads=4": 5, "layers=2 heads=2": -2, "layers=2 heads=4": 5})
    deeper = {"lower": {"cell": {"layers": 2}, "than": {"layers": 1}}}
    each = rule(cells, values, deeper)
    assert (each.ruling, each.shown, each.contrasts) == ("not shown", 1, 2)
    mean = rule(cells, values, deeper, average=True)
    assert (mean.ruling, mean.contrasts) == ("supported", 1)


@pytest.mark.parametrize(("far", "ruling"), [(-3.0, "supported"), (-1.0, "not shown"), (0.0, "contradicted")])
def test_a_gain_that_grows_is_a_difference_of_differences(far, ruling):
    values = {
        "a": {"near": BASE, "far": BASE + 10 + np.roll(JITTER, 1)},
        "b": {"near": BASE - 1 + JITTER, "far": BASE + 10 + far + np.roll(JITTER, 2)},
    }
    grows = {"gain": {"start": "a", "end": "b", "trend": "grows"}}
    assert rule(rows("a", "b"), values, grows, measures=("near", "far")).ruling == ruling
    opposite = {"supported": "contradicted", "contradicted": "supported"}
    shrinks = {"gain": {"start": "a", "end": "b", "trend": "shrinks"}}
    assert rule(rows("a", "b"), values, shrinks, measures=("near", "far")).ruling == opposite.get(ruling, ruling)


def test_a_claim_about_failed_left_out_or_unfinished_cells_is_not_tested():
    claim = {"lower": {"cell": "a", "than": "b"}}
    values = shifted(a=0, b=1)
    failed = rule(rows("a", "b"), values, claim, replaced=[Outcome("b", 0, "failed", reason="NaN at step 3")])
    assert failed.ruling == "not tested"
    assert "b failed: 1 of 5 seeds (NaN at step 3)" in failed.note
    left_out = rule(rows("a", "b"), shifted(a=0), claim)
    assert (left_out.ruling, left_out.note) == ("not tested", "left out of this run: b")
    values["b"]["ppl"] = values["b"]["ppl"][:2]
    assert rule(rows("a", "b"), values, claim).note == "2 of at least 3 seeds"


def test_claims_about_nothing_are_rarely_ruled_on():
    """Eight claims, none of them true by more than chance: any ruling at all in under 5 % of 500 tables."""
    cells = rows("base", *(f"cell {i}" for i in range(8)))
    claims = [
        parse_claim(f"{i}", {"says": "Better.", "lower": {"cell": f"cell {i}", "than": "base"}}, ["ppl"])
        for i in range(8)
    ]
    rng, wrong = np.random.default_rng(2), 0
    for _ in range(500):
        values = {cell.name: {"ppl": row} for cell, row in zip(cells, rng.normal(size=(9, 4)), strict=True)}
        judged = judge_claims(claims, cells, outcomes(values), Rules())
        wrong += any(each.ruling != "not shown" for each in judged)
    assert wrong / 500 < 0.05


def test_looks_apply_to_claims_too():
    claim = parse_claim("it", {"says": "Better.", "lower": {"cell": "a", "than": "b"}}, ["ppl"])
    values = {"a": {"ppl": BASE}, "b": {"ppl": BASE + np.array([1.0, 0.6, 1.4, 0.9, 1.1])}}
    plain = judge_claims([claim], rows("a", "b"), outcomes(values), Rules())[0]
    looked = judge_claims([claim], rows("a", "b"), outcomes(values), Rules(looks=(3, 5, 20)))[0]
    assert plain.ruling == looked.ruling == "supported"
    assert looked.adjusted_p > 5 * plain.adjusted_p


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"lower": {"cell": "a", "than": "d"}}, "claim 'it': no cell is called 'd'.*cells: a, b"),
        ({"lower": {"cell": {"depth": 2}, "than": "b"}}, "unknown factor 'depth'"),
        ({"lower": {"cell": "a", "then": "b"}}, r"claims.it.lower.then \(did you mean 'than'\?\)"),
        ({"lowre": {"cell": "a", "than": "b"}}, r"claims.it.lowre \(did you mean 'lower'\?\)"),
        ({}, "exactly one of lower, equal, monotone, gain; it states 0"),
        ({"lower": {"cell": "a", "than": "b"}, "equal": {"cell": "a", "than": "b"}}, "it states 2"),
        ({"monotone": {"factor": "layers"}}, "unknown factor 'layers'"),
        ({"gain": {"start": "a", "end": "b", "trend": "grows"}}, "at least two measures"),
        (
            {"lower": {"cell": "a", "than": "b"}, "reported": ["mela.table2"]},
            "'table2' is not reported.*table2_hlr_cycles",
        ),
        ({"lower": {"cell": "a", "than": "b"}, "reported": ["gpt.table1"]}, "no figures of a paper 'gpt'"),
        ({"lower": {"cell": "a", "than": "b", "than_measures": ["x", "y"]}}, "one measure for each"),
        ({"lower": {"cell": "a", "than": "b"}, "says": ""}, "says"),
    ],
)
def test_a_claim_that_cannot_be_tested_is_refused_by_name(stated, message):
    with pytest.raises(ConfigError, match=message):
        parse_claim("it", {"says": "So it is.", **stated}, ["ppl"]).contrasts(rows("a", "b"))


def test_a_level_that_is_not_in_the_table_is_named():
    claim = parse_claim("it", {"says": "x", "lower": {"cell": {"layers": 8}, "than": {"layers": 1}}}, ["ppl"])
    with pytest.raises(ConfigError, match="no cell has layers=8; the table has 1, 2, 4"):
        claim.contrasts(grid(layers=[1, 2, 4]))


def test_figures_come_from_the_papers():
    assert figure("mela.table2_hlr_cycles.gap_h2_minus_h4")[8192] == 0.33
    assert figure("mela.table5_length.400m.mela.32768") == 14.5
