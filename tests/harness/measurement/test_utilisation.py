"""Hand-computed figures of a window."""

from __future__ import annotations

import pytest

from harness.measurement.utilisation import WindowSummary, summarise, to_results
from harness.schema import UtilisationSeries
from oppo_kit.telemetry.utilisation import Series


def watts(times_s: list[float], values: list[float | None]) -> UtilisationSeries:
    return UtilisationSeries(name="gpu0/power_watts", unit="watts", times_s=times_s, values=values)


def joules(times_s: list[float], values: list[float | None]) -> UtilisationSeries:
    return UtilisationSeries(name="gpu0/energy_joules", unit="joules", times_s=times_s, values=values)


def test_a_series_keeps_its_holes_and_its_reason_in_the_results_file() -> None:
    sampled = Series("gpu0/utilisation_frac", "fraction", [0.0, 0.2], [None, 0.5])
    absent = Series("gpu0/power_watts", "watts", absent_reason="not here")
    results = to_results([sampled, absent])
    assert results[0] == UtilisationSeries(
        name="gpu0/utilisation_frac", unit="fraction", times_s=[0.0, 0.2], values=[None, 0.5]
    )
    assert results[1] == UtilisationSeries(
        name="gpu0/power_watts", unit="watts", times_s=[], values=[], absent_reason="not here"
    )
    assert UtilisationSeries.model_validate_json(results[0].model_dump_json()) == results[0]


def test_mean_and_maximum_are_over_the_known_samples_inside_the_window_with_its_edges() -> None:
    series = UtilisationSeries(
        name="cpu/utilisation_frac",
        unit="fraction",
        times_s=[0, 1, 2, 3, 4],
        values=[1.0, 0.5, None, 0.25, 1.0],
    )
    assert summarise(series, 1, 3) == WindowSummary(
        mean=0.375, maximum=0.5, energy_joules=None, num_samples=2
    )


def test_a_window_without_a_sample_has_no_figures_rather_than_zeros() -> None:
    assert summarise(watts([0, 1], [100.0, 100.0]), 5, 6) == WindowSummary(None, None, None, 0)


def test_an_absent_series_stays_absent_with_its_reason() -> None:
    series = UtilisationSeries(
        name="gpu/power_watts", unit="watts", times_s=[], values=[], absent_reason="no driver"
    )
    assert summarise(series, 0, 10) == WindowSummary(None, None, None, 0, absent_reason="no driver")


def test_energy_is_the_growth_of_the_counter_interpolated_at_the_edges() -> None:
    # 1000 J at 0.5 s on the way to 1100 J, 1250 J at 2.5 s on the way to 1300 J.
    series = joules([0, 1, 2, 3], [900.0, 1100.0, 1200.0, 1300.0])
    summary = summarise(series, 0.5, 2.5)
    assert summary.energy_joules == pytest.approx(250.0, abs=1e-9)
    assert (summary.mean, summary.maximum, summary.num_samples) == (None, None, 2)


def test_energy_from_power_is_the_area_below_it() -> None:
    # 100 W at 0.5 s to 200 W at 1 s: 75 J; 200 W for a second over the hole at 2 s: 400 J in two seconds.
    series = watts([0, 1, 2, 3], [0.0, 200.0, None, 200.0])
    assert summarise(series, 0.5, 3).energy_joules == pytest.approx(75.0 + 400.0, abs=1e-9)


def test_energy_is_not_extrapolated_beyond_the_samples() -> None:
    assert summarise(watts([1, 2], [100.0, 100.0]), 0, 10).energy_joules == pytest.approx(100.0, abs=1e-9)


def test_a_counter_that_was_reset_gives_no_energy() -> None:
    assert summarise(joules([0, 1, 2], [900.0, 10.0, 20.0]), 0, 2).energy_joules is None


def test_one_sample_spans_no_energy() -> None:
    assert summarise(joules([1], [900.0]), 0, 2).energy_joules is None
