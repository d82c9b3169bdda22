"""Derived figures against numbers worked out by hand; the ladder of three pairs is in ``results_factory``."""

from __future__ import annotations

import pytest
from results_factory import make_evaluation, make_ladder, make_result, make_run, make_step, without_accuracy
from scipy import stats

from harness.schema import Bound, Result
from harness.statistics import (
    conservation_violations,
    fill_derived,
    judged_by,
    learning_differences,
    max_age,
    num_drain_steps,
    ratios,
    reward_target,
    steady_positions,
    summarise_runner,
    time_to_reward_s,
)


def test_whole_run_ratios_leave_the_warm_up_out_and_count_the_drain() -> None:
    found = ratios(make_ladder())
    assert list(found) == ["trl/sequential", "trl/overcommit", "sequential/overcommit"]
    assert found["trl/sequential"].pairs == pytest.approx([2.0, 2.5, 3.0])
    assert found["trl/overcommit"].pairs == pytest.approx([80 / 24, 100 / 24, 120 / 24])
    assert found["sequential/overcommit"].pairs == pytest.approx([40 / 24] * 3)


def test_a_ratio_reports_the_median_and_the_extreme_pairs() -> None:
    found = ratios(make_ladder())["trl/sequential"]
    assert (found.median, found.low, found.high) == pytest.approx((2.5, 2.0, 3.0))


def test_steady_ratios_leave_the_drain_out_too() -> None:
    found = ratios(make_ladder(), steady=True)
    assert found["trl/overcommit"].pairs == pytest.approx([4.0, 5.0, 6.0])
    assert found["sequential/overcommit"].pairs == pytest.approx([2.0] * 3)


def test_steady_ratios_leave_out_the_steps_in_which_ages_settle() -> None:
    # Warm-up is 2 and max_age 2, so positions 2, 3 and 4 are still settling: 50 s there must not show.
    slow = make_run([1.0, 1.0, 50.0, 50.0, 50.0, *[3.0] * 7])
    fast = make_run([1.0] * 12)
    result = make_result({"trl": [slow], "sequential": [fast]})
    assert ratios(result, steady=True)["trl/sequential"].pairs == pytest.approx([3.0])
    assert ratios(result)["trl/sequential"].pairs == pytest.approx([17.1])


def test_the_steady_steps_wait_for_the_largest_age_that_is_allowed() -> None:
    result = make_result({"overcommit": [make_run([1.0] * 12, delta=6)]})
    run = result.runners["overcommit"].runs[0]
    assert steady_positions(result, run) == range(5, 10)
    result.workload.config["overlap"] = {"max_age": 4}
    assert steady_positions(result, run) == range(7, 10)


def test_without_a_configured_bound_the_largest_age_seen_is_taken() -> None:
    result = make_result({"overcommit": [make_run([1.0] * 4, delta=2)]})
    result.workload.config.clear()
    assert max_age(result) == 1


def test_the_drain_is_what_could_no_longer_be_filled_after_the_last_draw() -> None:
    # 48 draws in all. Δ = 6: after step 10 there are 46, after 11 all 48, with 4 and then 0 groups held.
    assert num_drain_steps(make_run([1.0] * 12, delta=6)) == 2
    # Δ = 4 = B: all 48 are drawn after step 11, but it still holds 4, so only the last step drains.
    assert num_drain_steps(make_run([1.0] * 12, delta=4)) == 1
    assert num_drain_steps(make_run([1.0] * 12, delta=0)) == 0


def test_rejections_before_the_last_draw_are_no_drain() -> None:
    run = make_run([1.0] * 12, delta=6)
    run.steps[9] = make_step(9, 1.0, delta=6, drawn=46, in_flight=5, rejected={"abstained": 1})
    assert num_drain_steps(run) == 2


def test_a_run_that_stopped_with_a_full_buffer_has_no_drain() -> None:
    run = make_run([1.0] * 12, delta=6)
    run.steps = run.steps[:8]
    assert num_drain_steps(run) == 0


def test_a_missing_runner_leaves_its_ratios_out() -> None:
    ladder = make_ladder()
    del ladder.runners["trl"]
    assert list(ratios(ladder)) == ["sequential/overcommit"]
    assert list(learning_differences(ladder)) == [
        "overcommit-sequential",
        "overcommit-sequential/score_mean",
    ]


def test_only_runs_of_the_same_pair_and_seed_are_compared() -> None:
    result = make_result(
        {
            "trl": [make_run([2.0] * 12, seed=0, pair=0), make_run([9.0] * 12, seed=1, pair=1)],
            "sequential": [make_run([1.0] * 12, seed=0, pair=0), make_run([1.0] * 12, seed=2, pair=1)],
        }
    )
    assert ratios(result)["trl/sequential"].pairs == pytest.approx([2.0])


def test_ratios_are_per_trained_response_not_per_step() -> None:
    halved = make_run([1.0] * 12)
    for step in halved.steps:
        step.responses_trained = 2
    result = make_result({"trl": [halved], "sequential": [make_run([1.0] * 12)]})
    assert ratios(result)["trl/sequential"].median == pytest.approx(2.0)


def test_a_run_without_measured_steps_gives_no_ratio() -> None:
    result = make_result({"trl": [make_run([1.0, 1.0])], "sequential": [make_run([1.0, 1.0])]})
    assert ratios(result) == {}
    assert ratios(result, steady=True) == {}


def test_time_to_reward_is_interpolated_to_ninety_per_cent_of_the_baselines_gain() -> None:
    # trl gains 0.5 from 0.2, so the target is 0.65. Its runs take 280, 300, 320 s and cross at 7/8 of that.
    found = time_to_reward_s(make_ladder())
    assert reward_target(make_ladder()) == pytest.approx(0.65)
    assert found["trl"] == pytest.approx(0.875 * 300)
    assert found["sequential"] == pytest.approx(0.875 * 240)
    # Of 224 s, from 0.45 at 112 s to 0.71, 0.69, 0.67: the middle one is 112 + 112 × 0.2 / 0.24.
    assert found["overcommit"] == pytest.approx(112 + 112 * 0.2 / 0.24)


def test_without_accuracy_a_policy_is_judged_by_its_score() -> None:
    # The factory's scores are twice its accuracies, so the times are those of the test above.
    ladder = without_accuracy(make_ladder())
    assert judged_by(make_ladder()) == "accuracy"
    assert judged_by(ladder) == "score_mean"
    assert reward_target(ladder) == pytest.approx(1.30)
    assert time_to_reward_s(ladder) == pytest.approx(time_to_reward_s(make_ladder()))


def test_without_trl_the_sequential_runner_is_the_baseline() -> None:
    ladder = make_ladder()
    ladder.runners["sequential"].runs = [make_run([1.0] * 10, accuracies=(0.0, 1.0))]
    del ladder.runners["trl"]
    assert reward_target(ladder) == pytest.approx(0.9)
    assert time_to_reward_s(ladder) == {"sequential": pytest.approx(9.0), "overcommit": None}


def test_half_of_the_runs_must_reach_the_target() -> None:
    def runs(*finals: float) -> list:
        return [
            make_run([1.0] * 10, seed=i, pair=i, accuracies=(0.0, final)) for i, final in enumerate(finals)
        ]

    found = time_to_reward_s(
        make_result(
            {"trl": runs(1.0, 1.0, 1.0), "sequential": runs(1.0, 0.9, 0.1), "overcommit": runs(1.0, 0.1)}
        )
    )
    assert found == {"trl": pytest.approx(9.0), "sequential": pytest.approx(10.0), "overcommit": None}


@pytest.mark.parametrize("accuracies", [(0.5, 0.5), (0.5, 0.4), (None, None), (0.5,), ()])
def test_a_baseline_without_gain_leaves_every_time_to_reward_open(accuracies: tuple) -> None:
    result = make_result({"trl": [make_run([1.0] * 10, accuracies=accuracies)]})
    assert reward_target(result) is None
    assert time_to_reward_s(result) == {"trl": None}


def test_learning_differences_are_paired_by_seed_with_a_student_interval() -> None:
    # 0.71, 0.69, 0.67 less 0.7: mean -0.01, s = 0.02, t(0.95, 2) = 2.919986, so half is 0.0337171.
    found = learning_differences(make_ladder())["overcommit-trl"]
    assert found.pairs == pytest.approx([0.01, -0.01, -0.03])
    assert found.mean == pytest.approx(-0.01)
    assert (found.low, found.high) == pytest.approx((-0.0437171, 0.0237171), abs=1e-6)
    expected = stats.ttest_rel([0.71, 0.69, 0.67], [0.7] * 3).confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_held_out_scores_have_their_own_difference() -> None:
    found = learning_differences(make_ladder())["overcommit-trl/score_mean"]
    assert found.pairs == pytest.approx([0.02, -0.02, -0.06])


def test_one_seed_gives_a_difference_without_an_interval() -> None:
    result = make_result(
        {"trl": [make_run([1.0] * 4)], "sequential": [make_run([1.0] * 4, accuracies=(0.2, 0.9))]}
    )
    found = learning_differences(result)["sequential-trl"]
    assert found.mean == pytest.approx(0.1)
    assert (found.low, found.high) == (None, None)


def test_repeats_of_one_seed_count_once() -> None:
    def runs(*finals: float) -> list:
        return [
            make_run([1.0] * 4, seed=7, pair=i, accuracies=(0.0, final)) for i, final in enumerate(finals)
        ]

    found = learning_differences(make_result({"trl": runs(0.4, 0.6), "sequential": runs(0.6, 0.8)}))
    assert found["sequential-trl"].pairs == pytest.approx([0.2])
    assert found["sequential-trl"].low is None


def test_a_task_without_accuracy_has_score_differences_only() -> None:
    runs = {name: [make_run([1.0] * 4, accuracies=())] for name in ("trl", "sequential")}
    for (of_runner,), score in zip(runs.values(), (1.0, 1.5), strict=True):
        of_runner.evaluations = [make_evaluation(4, 4.0, None, score_mean=score)]
    found = learning_differences(make_result(runs))
    assert list(found) == ["sequential-trl/score_mean"]
    assert found["sequential-trl/score_mean"].mean == pytest.approx(0.5)


def test_a_runner_is_summarised_over_its_measured_steps() -> None:
    found = summarise_runner(make_ladder(), "overcommit")
    assert (found.num_runs, found.num_steps) == (3, 30)
    assert found.step_s == pytest.approx(2.0)
    assert found.s_per_response == pytest.approx(24 / 40)
    assert found.decoded_tokens_per_s == pytest.approx(3000 / 72)
    assert found.stage_fracs == pytest.approx(
        {"generate": 0.5, "score": 0.125, "train": 0.25, "sync": 0.0625, "engine": 0.0625}
    )
    assert (found.age_mean, found.age_max, found.deferred_frac) == (0.5, 1, 0.25)
    assert found.untrained_tokens == 30 * 20
    assert found.final_accuracy == pytest.approx(0.69)


def test_the_deferred_share_counts_groups() -> None:
    result = make_result({"overcommit": [make_run([1.0] * 12, delta=2)]})
    result.workload.group_size = 2
    assert summarise_runner(result, "overcommit").deferred_frac == pytest.approx(0.5)


def test_a_runner_without_measured_steps_has_no_numbers() -> None:
    found = summarise_runner(make_result({"trl": [make_run([1.0], accuracies=())]}), "trl")
    assert (found.step_s, found.s_per_response, found.decoded_tokens_per_s, found.final_accuracy) == (
        None,
    ) * 4


def test_a_step_that_loses_a_group_is_found() -> None:
    result = make_ladder()
    assert conservation_violations(result) == []
    result.runners["overcommit"].runs[1].steps[3].queued += 1
    (found,) = conservation_violations(result)
    assert (found.runner, found.seed, found.pair, found.step) == ("overcommit", 1, 1, 3)
    assert (found.drawn, found.accounted) == (22, 23)


def test_rejected_groups_are_accounted_for() -> None:
    result = make_ladder()
    step = result.runners["trl"].runs[0].steps[3]
    step.drawn += 3
    step.rejected = {"abstained": 2, "non_finite": 1}
    assert conservation_violations(result) == []


def test_derived_fields_are_computed_anew_and_the_input_is_left_alone() -> None:
    bound = Bound(
        decode_s_per_token=1e-3,
        score_s_per_token=1e-4,
        train_s_per_token=2e-3,
        step_s={"trl": 5.0, "absent": 1.0},
        share_reached={"trl": 99.0},
    )
    ladder = make_ladder().model_copy(update={"bound": bound, "time_to_reward_s": {"stale": 1.0}})
    filled = fill_derived(ladder)
    assert filled.ratios == ratios(ladder)
    assert filled.ratios_steady == ratios(ladder, steady=True)
    assert filled.time_to_reward_s == time_to_reward_s(ladder)
    assert filled.learning_differences == learning_differences(ladder)
    assert filled.bound is not None
    assert filled.bound.share_reached == {"trl": pytest.approx(0.5)}
    assert (ladder.ratios, ladder.time_to_reward_s) == ({}, {"stale": 1.0})
    assert Result.model_validate_json(filled.model_dump_json()) == filled


def test_every_rung_is_compared_with_the_baselines_and_with_its_neighbour() -> None:
    ladder = make_ladder()
    ladder.runners["both"] = ladder.runners["overcommit"].model_copy(update={"name": "both"})
    ladder.runners["sample"] = ladder.runners["sequential"].model_copy(update={"name": "sample"})
    assert set(ratios(ladder)) == {
        *(f"trl/{name}" for name in ("sequential", "sample", "overcommit", "both")),
        *(f"sequential/{name}" for name in ("sample", "overcommit", "both")),
        "sample/overcommit",
        "overcommit/both",
    }


def test_what_scorers_did_is_summed_up_over_the_measured_steps() -> None:
    ladder = make_ladder()
    for run in ladder.runners["overcommit"].runs:
        for index, step in enumerate(run.steps):
            step.score_busy_s = 0.5 * step.step_s
            step.tokens_prefetched, step.tokens_scored = 30, 10
            step.score_at, step.chunk_tokens = ("chunk", 32) if index >= 10 else ("batch", 0)
    summary = summarise_runner(ladder, "overcommit")
    assert summary.score_busy_frac == pytest.approx(0.5)
    assert summary.prefetched_frac == pytest.approx(0.75)
    num_runs = len(ladder.runners["overcommit"].runs)
    assert summary.score_plans == f"batch × {8 * num_runs}, chunk 32 × {2 * num_runs}"
    assert summarise_runner(ladder, "trl").prefetched_frac is None
