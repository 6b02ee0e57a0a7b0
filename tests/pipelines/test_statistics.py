"""Tests against scipy's own, by hand, and by simulation: what the numbers promise is what happens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import ArrayLike
from scipy import stats

from pipelines.power import detectable_effect, seeds_needed
from pipelines.statistics import at_last_look, differences_to, holm, paired, sequential_p, spending

TABLES = 10_000


def simulated(rng: np.random.Generator, seeds: int, effects: ArrayLike = 0.0) -> np.ndarray:
    """`[tables, 9, seeds]`: what a seed does to every cell, and noise of sd 1 between paired cells."""
    shared = 3 * rng.normal(size=(TABLES, 1, seeds))
    return 20 + shared + rng.normal(scale=np.sqrt(0.5), size=(TABLES, 9, seeds)) + np.reshape(effects, (-1, 1))


def p_of(result: Any) -> Any:
    return result.pvalue


def test_paired_t_is_scipys():
    a, b = np.random.default_rng(0).normal(size=(2, 7, 5))
    theirs: Any = stats.ttest_rel(a, b, axis=-1)
    ours = paired(a - b)
    np.testing.assert_allclose(ours.p, theirs.pvalue, rtol=1e-12)
    interval = theirs.confidence_interval(0.95)
    np.testing.assert_allclose(ours.interval(0.95), (interval.low, interval.high), rtol=1e-12)
    np.testing.assert_allclose(ours.one_sided(), p_of(stats.ttest_rel(a, b, axis=-1, alternative="less")), rtol=1e-12)


def test_a_seed_without_a_pair_is_left_out():
    d = np.array([0.1, np.nan, 0.4, 0.2])
    ours = paired(d)
    assert ours.n == 3
    assert ours.p == pytest.approx(p_of(stats.ttest_1samp([0.1, 0.4, 0.2], 0)))


def test_what_never_varies_is_certain():
    same, different, single, none = paired([[0, 0, 0], [2, 2, 2], [2, np.nan, np.nan], [np.nan] * 3]).p
    assert (same, different) == (1, 0)
    assert np.isnan([single, none]).all()


def test_equivalence_is_the_larger_of_two_one_sided_tests():
    d = np.random.default_rng(1).normal(0.1, 1, size=12)
    upper = p_of(stats.ttest_1samp(d, 0.8, alternative="less"))
    lower = p_of(stats.ttest_1samp(d, -0.8, alternative="greater"))
    assert paired(d).within(0.8) == pytest.approx(max(upper, lower))
    assert paired(d).within(0.0) >= 0.5


def test_differences_are_to_the_same_seed_of_the_baseline():
    d = differences_to([[1.0, 2.0], [1.5, 4.0]], baseline=0)
    assert np.isnan(d[0]).all()
    np.testing.assert_array_equal(d[1], [0.5, 2.0])


def test_rounding_is_no_difference():
    base = np.array([83.7, 84.1, 82.9])
    d = differences_to([base, np.nextafter(base, 100), base + 0.1], baseline=0)
    np.testing.assert_array_equal(d[1], 0)
    assert paired(d).p[1] == 1
    np.testing.assert_allclose(d[2], 0.1)


def test_holm_by_hand():
    np.testing.assert_allclose(holm([0.01, 0.04, np.nan, 0.03]), [0.03, 0.06, np.nan, 0.06])
    np.testing.assert_allclose(holm([[0.5, 0.9], [0.02, 0.02]]), [[1, 1], [0.04, 0.04]])


@given(arrays(float, st.integers(1, 12), elements=st.floats(0, 1)))
def test_holm_keeps_the_order_and_lies_between_the_raw_p_and_bonferronis(p):
    adjusted = holm(p)
    assert (adjusted >= p).all()
    assert (adjusted <= np.minimum(1, p * len(p)) + 1e-12).all()
    assert (np.diff(adjusted[np.argsort(p, kind="stable")]) >= 0).all()


@pytest.mark.parametrize("seeds", [3, 5])
def test_a_table_without_effects_rarely_shows_one(seeds):
    differences = differences_to(simulated(np.random.default_rng(seeds), seeds), baseline=0)
    assert (np.nanmin(holm(paired(differences).p), axis=-1) < 0.05).mean() < 0.05


@pytest.mark.parametrize("seeds", [3, 5])
def test_cells_without_an_effect_stay_so_beside_real_ones(seeds):
    effects = [0, -30, -10, -3, 0, 0, 0, 0, 0]
    differences = differences_to(simulated(np.random.default_rng(seeds), seeds, effects), baseline=0)
    adjusted = holm(paired(differences).p)
    assert (adjusted[:, 4:].min(axis=-1) < 0.05).mean() < 0.05
    assert (adjusted[:, 1] < 0.05).mean() > 0.9


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_intervals_cover_the_truth(seeds):
    effects = np.linspace(0, 4, 9)
    low, high = paired(differences_to(simulated(np.random.default_rng(seeds), seeds, effects), 0)).interval()
    covered = (low <= effects - effects[0]) & (effects - effects[0] <= high)
    assert 0.93 <= covered[:, 1:].mean() <= 0.97


@pytest.mark.parametrize(("n", "alpha"), [(3, 0.05), (5, 0.05 / 8), (12, 0.05)])
def test_the_detectable_effect_is_found_as_often_as_said(n, alpha):
    effect = detectable_effect(1.0, n, alpha)
    d = np.random.default_rng(n).normal(effect, 1, size=(2 * TABLES, n))
    assert (paired(d).p < alpha).mean() == pytest.approx(0.8, abs=0.015)


@pytest.mark.parametrize("alpha", [0.05, 0.05 / 8])
@pytest.mark.parametrize(("n", "effect"), [(3, 0.5), (3, 1.0), (5, 0.5), (5, 1.0)])
def test_recommended_seeds_reach_their_power(n, effect, alpha):
    """Over all estimates of the spread that n seeds may give, about 0.8; never the half of a plan that trusts them."""
    rng, most = np.random.default_rng(0), 400
    d = rng.normal(effect, 1, size=(2_000, most))
    totals = [seeds_needed(effect, float(sd), n, alpha, most=most) or most for sd in paired(d[:, :n]).sd]
    p = np.array([paired(row[:total]).p for row, total in zip(d, totals, strict=True)])
    assert 0.78 < (p < alpha).mean() < 0.93


def test_more_spread_or_a_smaller_effect_needs_more_seeds():
    totals = [seeds_needed(1.0, sd, 5, most=1000) or 0 for sd in (0.2, 1.0, 2.0, 4.0)]
    assert totals == sorted(totals)
    assert totals[0] == 5
    assert seeds_needed(1.0, 4.0, 5, most=20) is None
    assert seeds_needed(0.0, 1.0, 5) is None
    assert seeds_needed(0.0, 0.0, 5) is None
    assert seeds_needed(0.1, 0.0, 5) == 5


def test_alpha_is_spent_by_the_seeds_spent():
    np.testing.assert_allclose(spending((3, 5, 8, 12, 20)), [0.15, 0.1, 0.15, 0.2, 0.4])


def test_one_look_is_the_plain_test():
    d = np.random.default_rng(0).normal(size=(4, 5))
    np.testing.assert_allclose(sequential_p(d, (5,)), paired(d).p)


def test_a_look_counts_when_all_its_seeds_are_there():
    d = np.array([1.0, 1.1, 0.9, np.nan, 1.0])
    first = min(1.0, float(paired(d[:3]).p) / 0.6)
    assert sequential_p(d, (3, 5)) == pytest.approx(first)
    assert np.isnan(sequential_p(d[:2], (3, 5)))


def test_the_last_complete_look_decides():
    d = np.array([[5.0, 6.0, 5.5, -40.0], [5.0, 6.0, 5.5, 5.2], [5.0, 6.0, np.nan, 5.2]])
    last = at_last_look(d, (3, 4, 6))
    np.testing.assert_array_equal(last[:2], d[:2])
    np.testing.assert_array_equal(last[2], d[2])
    np.testing.assert_allclose(sequential_p(d, (3, 4, 6))[:2], np.minimum(1, paired(d[:2]).p * 6))
    np.testing.assert_array_equal(at_last_look(d, (3, 6))[1], [5.0, 6.0, 5.5, np.nan])
    np.testing.assert_allclose(sequential_p(d, (3, 6))[:2], paired(d[:2, :3]).p * 2)
    assert np.isnan(sequential_p(d, (3, 6))[2])


def test_adding_seeds_where_the_verdict_is_open_keeps_the_error_of_the_table():
    """Every cell is looked at five times and stops as soon as it is real: the worst that allocation can do."""
    looks = (3, 5, 8, 12, 20)
    differences = differences_to(simulated(np.random.default_rng(0), 20), baseline=0)
    found = np.zeros(TABLES, dtype=bool)
    for look in looks:
        found |= np.nanmin(holm(sequential_p(differences[..., :look], looks)), axis=-1) < 0.05
    assert found.mean() < 0.05
    naive = np.min([paired(differences[..., :look]).p for look in looks], axis=0)
    assert (np.nanmin(holm(naive), axis=-1) < 0.05).mean() > 0.08, "looking again and again without spending alpha"


@pytest.mark.parametrize(("looks", "share"), [((3,), 0.05), ((3, 5), 0.06), ((3, 5, 8, 12, 20), 0.1)])
def test_looks_that_nobody_stated_cost_what_the_documentation_says(looks, share):
    """The first look has all of alpha, each later one spends it over the looks so far: docs/sweeps.md."""
    differences = differences_to(simulated(np.random.default_rng(0), 20), baseline=0)
    found = np.zeros(TABLES, dtype=bool)
    for taken in (looks[: n + 1] for n in range(len(looks))):
        p = sequential_p(differences, taken) if len(taken) > 1 else paired(differences[..., : taken[0]]).p
        found |= np.nanmin(holm(p), axis=-1) < 0.05
    assert found.mean() == pytest.approx(share, abs=0.0075)
