"""Lengths with and without the drain, by hand."""

from __future__ import annotations

from results_factory import make_result, make_run

from harness.response_lengths import drawn_lengths, lengths_before_drain, summarise_lengths


def test_lengths_before_the_drain_lack_what_was_postponed() -> None:
    run = make_run([1.0] * 12, delta=2)
    run.steps[-1].trained_lengths = [50, 51, 52, 53]
    runner = make_result({"overcommit": [run]}).runners["overcommit"]
    assert (len(drawn_lengths(runner)), len(lengths_before_drain(runner))) == (48, 44)
    assert (max(drawn_lengths(runner)), max(lengths_before_drain(runner))) == (53, 30)


def test_a_length_distribution_has_mean_median_ninetieth_percentile_and_maximum() -> None:
    found = summarise_lengths([10, 20, 20, 30, 120])
    assert found is not None
    # Rank 0.9 × 4 = 3.6 lies between 30 and 120.
    assert (found.num_responses, found.mean, found.p50, found.p90, found.max) == (5, 40.0, 20.0, 84.0, 120)
    assert summarise_lengths([]) is None
