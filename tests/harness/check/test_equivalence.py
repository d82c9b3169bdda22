"""The verdict against numbers worked out by hand, its invariances, and how often it errs on simulated curves."""

from __future__ import annotations

import math
import warnings
from functools import partial

import numpy
import pytest
from check_results import REFERENCE, make_checked, make_pair, random_curves
from hypothesis import given, settings
from hypothesis import strategies as st
from results_factory import without_accuracy
from scipy import integrate, stats

from harness.check import compare as compare_scores
from harness.check import seeds_needed
from harness.check.equivalence import MAX_SEEDS, Verdict, curve_numbers, judge, power
from harness.check.power import RESPONSES, Scenario, count, simulate, stated_power
from oppo_kit.errors import ConfigError, StateError

# The factory gives accuracies by hand, and as scores twice those.
compare = partial(compare_scores, by="accuracy")
RANDOM_SEEDS = st.integers(0, 10_000)
FEW = settings(max_examples=40, deadline=None)


# --- by hand


def test_final_averages_the_last_fifth_and_area_is_the_mean_height() -> None:
    responses = numpy.array([0.0, 10.0, 80.0, 90.0, 100.0])
    values = numpy.array([[0.0, 1.0, 1.0, 2.0, 4.0]])
    # At exactly 80 % an evaluation is not after it. Area: (5 + 70 + 15 + 30) / 100.
    assert curve_numbers(responses, values)[0] == pytest.approx([3.0, 1.2])


def test_equal_curves_with_noise_are_equivalent_by_the_test_worked_out_by_hand() -> None:
    # Differences 0, 0.01, 0.02, -0.01: mean 0.005, variance 5e-4 / 3, standard error √(5e-4 / 12).
    found = compare(*make_pair([0.0, 0.01, 0.02, -0.01]))
    error = math.sqrt(5e-4 / 12)
    half, wide_half = 2.353363 * error, 3.182446 * error  # t(0.95, 3) and t(0.975, 3)
    assert found.verdict == "equivalent"
    assert found.seeds == (0, 1, 2, 3)
    assert found.seeds_needed is None
    final, area = found.quantities
    assert (final.run, final.reference, final.gain) == pytest.approx((0.605, 0.6, 0.4))
    assert final.differences == pytest.approx((0.0, 0.01, 0.02, -0.01))
    assert final.difference == pytest.approx(0.005)
    assert final.margin == pytest.approx(0.04)
    assert final.interval == pytest.approx((0.005 - half, 0.005 + half), rel=1e-6)
    assert final.wide_interval == pytest.approx((0.005 - wide_half, 0.005 + wide_half), rel=1e-6)
    # The last of three evaluations weighs a quarter in the area; the reference's area is 0.45, its gain 0.25.
    assert (area.reference, area.gain, area.margin) == pytest.approx((0.45, 0.25, 0.025))
    assert area.interval == pytest.approx(((0.005 - half) / 4, (0.005 + half) / 4), rel=1e-6)
    assert (final.is_inside, area.is_inside) == (True, True)


def test_the_verdict_turns_where_the_interval_leaves_the_margin() -> None:
    # The interval ends at 0.0201908, which is this share of the gain of 0.4.
    pair = make_pair([0.0, 0.01, 0.02, -0.01])
    edge = (0.005 + float(stats.t.ppf(0.95, 3)) * math.sqrt(5e-4 / 12)) / 0.4
    assert compare(*pair, margin=edge * 1.001).verdict == "equivalent"
    assert compare(*pair, margin=edge * 0.999).verdict == "undecided"


def test_a_difference_is_concluded_where_the_95_per_cent_interval_leaves_the_margin() -> None:
    # Mean -0.095, the same spread: the upper end is -0.095 + 3.182446 × 0.00645497 = -0.0744574, 0.186 of the gain.
    pair = make_pair([-0.1, -0.09, -0.08, -0.11])
    edge = -(-0.095 + float(stats.t.ppf(0.975, 3)) * math.sqrt(5e-4 / 12)) / 0.4
    found = compare(*pair, margin=edge * 0.999)
    assert (found.verdict, found.final.is_outside, found.area.is_outside) == ("different", True, False)
    assert compare(*pair, margin=edge * 1.001).verdict == "undecided"


def test_one_number_that_is_open_keeps_the_check_from_passing() -> None:
    # The middle of the curve alone: final is the same, area is 0.02 lower on average and noisy.
    middles = (0.48, 0.44, 0.5, 0.42)
    run = make_checked([(0.2, middle, 0.6) for middle in middles])
    found = compare(run, make_checked([REFERENCE] * 4, runner="trl"))
    assert (found.final.is_inside, found.area.is_inside, found.verdict) == (True, False, "undecided")


def test_one_number_that_is_outside_makes_a_difference() -> None:
    run = make_checked([(0.2, middle, 0.6) for middle in (0.3, 0.31, 0.32)])
    found = compare(run, make_checked([REFERENCE] * 3, runner="trl"))
    assert (found.final.is_inside, found.area.is_outside, found.verdict) == (True, True, "different")


def test_learning_more_than_the_margin_is_a_difference_too() -> None:
    assert compare(*make_pair([0.1, 0.11, 0.12])).verdict == "different"


def test_repeats_of_a_seed_count_once_with_their_mean() -> None:
    run, reference = make_pair([0.0, 0.01, 0.02, -0.01])
    extra = make_checked({0: (0.2, 0.5, 0.7)}).runners["both"].runs
    run.runners["both"].runs.extend(extra)
    assert compare(run, reference).final.differences == pytest.approx((0.05, 0.01, 0.02, -0.01))


def test_scores_are_compared_unless_accuracy_is_asked_for() -> None:
    pair = make_pair([0.0, 0.01, 0.02, -0.01])
    by_default, by_accuracy = compare_scores(*pair), compare_scores(*pair, by="accuracy")
    assert (by_default.curves.field, by_accuracy.curves.field) == ("score_mean", "accuracy")
    assert by_default.final.difference == pytest.approx(2 * by_accuracy.final.difference)
    assert compare_scores(*map(without_accuracy, pair)).final == by_default.final


# --- without a spread


@pytest.mark.parametrize(
    ("difference", "verdict"), [(0.0, "equivalent"), (0.03, "equivalent"), (-0.05, "different")]
)
def test_two_seeds_without_a_spread_are_judged_by_their_mean(difference: float, verdict: Verdict) -> None:
    run = make_checked(
        [(0.2, 0.5 + difference, 0.6 + difference), (0.21, 0.47 + difference, 0.63 + difference)]
    )
    reference = make_checked([(0.2, 0.5, 0.6), (0.21, 0.47, 0.63)], runner="trl")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compare(run, reference)
    assert found.verdict == verdict
    assert found.final.interval == pytest.approx((difference, difference), abs=1e-12)


def test_one_seed_is_undecided_and_asks_for_two() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compare(*make_pair([0.0]))
    assert (found.verdict, found.seeds_needed) == ("undecided", 2)
    assert found.final.interval == (-math.inf, math.inf)


def test_one_seed_against_several_is_undecided_and_says_how_many_their_spread_asks_for() -> None:
    finals = (0.6, 0.63, 0.57)
    reference = make_checked([(0.2, 0.5, final) for final in finals], runner="trl")
    found = compare(make_checked([(0.2, 0.5, 0.6)]), reference)
    # As if the sides shared nothing: √2 times their 0.03 in final, a quarter of that in area.
    spread = math.sqrt(2) * 0.03
    assert found.verdict == "undecided"
    assert found.seeds == (0,)
    assert found.seeds_needed == seeds_needed([spread, spread / 4], [0.04, 0.025])
    assert found.seeds_needed is not None
    assert found.seeds_needed > 2


# --- refusals


@pytest.mark.parametrize("margin", [0.0, -0.1, 1.0, math.nan])
def test_a_margin_that_is_no_share_is_refused(margin: float) -> None:
    with pytest.raises(
        ConfigError, match=r"margin=\S+ must be a share of the reference's gain above 0 and below"
    ):
        compare(*make_pair([0.0, 0.0]), margin=margin)


@pytest.mark.parametrize(
    ("curve", "words"),
    [
        ((0.3, 0.3, 0.3), "accuracy was 0.3 before training and 0.3 at the end"),
        ((0.3, 0.1, 0.7), "accuracy was 0.3 before training and 0.3 on average over the curve"),
        ((0.35, 0.25, 0.55), "accuracy was 0.35 before training and 0.35 on average over the curve"),
        ((0.27, 0.13, 0.55), "accuracy was 0.27 before training and 0.27 on average over the curve"),
        ((0.3, 0.5, 0.2), "accuracy was 0.3 before training and 0.2 at the end"),
        ((0.2, 0.0, 0.25), "accuracy was 0.2 before training and 0.1125 on average over the curve"),
    ],
)
def test_a_reference_that_gained_nothing_is_refused(curve: tuple[float, ...], words: str) -> None:
    reference = make_checked([curve] * 3, runner="trl")
    with pytest.raises(StateError, match=f"the reference gained nothing: its mean held-out {words}"):
        compare(make_checked([REFERENCE] * 3), reference)


# --- invariances


@FEW
@given(seed=RANDOM_SEEDS, order=st.permutations(range(5)))
def test_the_order_of_runs_does_not_matter(seed: int, order: list[int]) -> None:
    run, reference = random_curves(seed)
    straight = compare(make_checked(run), make_checked(reference, runner="trl"))
    shuffled = compare(
        make_checked({each: run[each] for each in order}), make_checked(reference, runner="trl")
    )
    assert shuffled == straight


@FEW
@given(seed=RANDOM_SEEDS, shift=st.floats(-5, 5), scale=st.floats(0.01, 100))
def test_shifting_and_scaling_the_scores_changes_no_verdict(seed: int, shift: float, scale: float) -> None:
    run, reference = random_curves(seed)
    before = compare(make_checked(run), make_checked(reference, runner="trl"))
    after = compare(make_checked(run * scale + shift), make_checked(reference * scale + shift, runner="trl"))
    assert after.verdict == before.verdict
    assert after.seeds_needed == before.seeds_needed
    assert after.area.interval == pytest.approx([bound * scale for bound in before.area.interval], abs=1e-9)


@FEW
@given(seed=RANDOM_SEEDS)
def test_swapping_the_sides_mirrors_the_intervals(seed: int) -> None:
    run, reference = (
        make_checked(curves, runner=name) for curves, name in zip(random_curves(seed), "ab", strict=True)
    )
    there, back = compare(run, reference), compare(reference, run)
    for ours, theirs in zip(there.quantities, back.quantities, strict=True):
        assert theirs.interval == pytest.approx((-ours.interval[1], -ours.interval[0]))
        assert theirs.wide_interval == pytest.approx((-ours.wide_interval[1], -ours.wide_interval[0]))
        assert theirs.differences == pytest.approx([-difference for difference in ours.differences])


@FEW
@given(seed=RANDOM_SEEDS, margins=st.tuples(st.floats(0.01, 0.9), st.floats(0.01, 0.9)))
def test_a_wider_margin_never_takes_equivalence_away_nor_makes_a_difference(
    seed: int, margins: tuple[float, float]
) -> None:
    run, reference = random_curves(seed)
    narrow, wide = (
        compare(make_checked(run), make_checked(reference, runner="trl"), margin=margin).verdict
        for margin in sorted(margins)
    )
    towards_equivalence = ("different", "undecided", "equivalent")
    assert towards_equivalence.index(wide) >= towards_equivalence.index(narrow)


def test_the_random_curves_of_these_tests_reach_every_verdict() -> None:
    found = set()
    for seed in range(30):
        run, reference = random_curves(seed)
        found.add(compare(make_checked(run), make_checked(reference, runner="trl")).verdict)
    assert found == {"equivalent", "different", "undecided"}


# --- power


@pytest.mark.parametrize("num_seeds", [2, 3, 10, 100, MAX_SEEDS])
@pytest.mark.parametrize("difference", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("spread", [0.001, 0.03, 0.2])
def test_power_agrees_with_adaptive_quadrature_over_the_chi_square(
    num_seeds: int, difference: float, spread: float
) -> None:
    freedom, error = num_seeds - 1, spread / math.sqrt(num_seeds)
    quantile = stats.t.ppf(0.95, freedom)

    def inside(probability: float) -> float:
        room = 0.1 - quantile * error * math.sqrt(stats.chi2.ppf(probability, freedom) / freedom)
        both = stats.norm.cdf((room - difference) / error) - stats.norm.cdf((-room - difference) / error)
        return max(0.0, both)

    # Over probabilities instead of the chi-square itself, whose density has no bound with one degree of freedom.
    end = stats.chi2.cdf(freedom * (0.1 / (quantile * error)) ** 2, freedom)
    expected, _ = integrate.quad(inside, 0.0, end, limit=200)
    assert power(num_seeds, spread, 0.1, difference) == pytest.approx(expected, abs=1e-7)


def test_power_without_a_spread_or_a_second_seed_is_certain() -> None:
    assert power(1, 0.01, 0.1) == 0.0
    assert power(2, 0.0, 0.1) == 1.0
    assert power(2, 0.0, 0.1, difference=-0.2) == 0.0


def test_the_seeds_needed_are_the_fewest_that_reach_80_per_cent() -> None:
    needed = seeds_needed([0.05], [0.1])
    assert needed is not None
    assert power(needed, 0.05, 0.1) >= 0.8 > power(needed - 1, 0.05, 0.1)


def test_two_numbers_need_more_seeds_than_one_and_a_certain_one_adds_none() -> None:
    one = seeds_needed([0.05], [0.1])
    assert one is not None
    assert (seeds_needed([0.05, 0.05], [0.1, 0.1]) or 0) > one
    assert seeds_needed([0.05, 0.0], [0.1, 0.1]) == one
    assert seeds_needed([0.0, 0.0], [0.1, 0.1]) == 2


def test_too_many_seeds_to_ask_for_are_none() -> None:
    assert seeds_needed([10.0], [0.1]) is None


# --- how often it errs


def test_a_true_difference_of_the_margin_passes_in_at_most_five_per_cent_of_checks() -> None:
    num_simulations = 4000
    noise = 3 * math.sqrt(0.05 * 0.95 / num_simulations)
    for num_seeds in (3, 8):
        cell = count(Scenario(num_seeds, 0.03, 1.0), num_simulations, numpy.random.default_rng(1))
        assert cell.num_equivalent / num_simulations <= 0.05 + noise
        assert cell.num_different / num_simulations <= 0.05 + noise


@pytest.mark.parametrize(("num_seeds", "spread_frac"), [(5, 0.03), (10, 0.05)])
def test_equal_arms_pass_with_the_power_that_is_stated(num_seeds: int, spread_frac: float) -> None:
    num_simulations = 4000
    cell = count(Scenario(num_seeds, spread_frac, 0.0), num_simulations, numpy.random.default_rng(2))
    at_least, at_most = stated_power(num_seeds, spread_frac)
    noise = 3 * math.sqrt(0.25 / num_simulations)
    assert 0.5 < at_least < 0.99
    assert at_least - noise <= cell.num_equivalent / num_simulations <= at_most + noise


def test_simulated_curves_are_judged_as_the_same_curves_in_results_are() -> None:
    verdicts = set()
    for difference in (0.0, 1.0, 2.0):
        curves = simulate(Scenario(5, 0.04, difference), 10, numpy.random.default_rng(3))
        judged = judge(RESPONSES, *curves, 0.1)
        for index, (run, reference) in enumerate(zip(*curves, strict=True)):
            found = compare(make_checked(run), make_checked(reference, runner="trl"))
            assert (found.verdict == "equivalent") == bool(judged.is_equivalent[index])
            assert (found.verdict == "different") == bool(judged.is_different[index])
            assert found.area.interval == pytest.approx((judged.low[index, 1], judged.high[index, 1]))
            verdicts.add(found.verdict)
    assert verdicts == {"equivalent", "different", "undecided"}
