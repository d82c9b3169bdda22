"""Sampled utilisation: from the sampler's series to the results file's, and to figures of a window of time.

Knows nothing of how anything was sampled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from harness.schema import UtilisationSeries
from oppo_kit.telemetry.utilisation import Series


@dataclass(frozen=True, slots=True)
class WindowSummary:
    """One quantity over one window.

    Attributes:
        mean: of the samples inside; None without one, and for the energy counter, whose mean says nothing.
        maximum: likewise.
        energy_joules: of ``joules`` the counter's growth, of ``watts`` the integral; None for other units and
            where fewer than two samples span the window.
        num_samples: that have a value and lie inside.
        absent_reason: as the series'.
    """

    mean: float | None
    maximum: float | None
    energy_joules: float | None
    num_samples: int
    absent_reason: str | None = None


def to_results(series: Iterable[Series]) -> list[UtilisationSeries]:
    """The sampler's series as the results file stores them."""
    return [
        UtilisationSeries(
            name=one.name,
            unit=one.unit,
            times_s=one.times_s,
            values=one.values,
            absent_reason=one.absent_reason,
        )
        for one in series
    ]


def summarise(series: UtilisationSeries, start_s: float, end_s: float) -> WindowSummary:
    """Mean, maximum and energy of the samples in [start_s, end_s]; missing samples are left out.

    At the window's edges energy is interpolated between the samples around them. What the samples do not span
    counts as no energy; nothing is extrapolated.
    """
    known = [(t, v) for t, v in zip(series.times_s, series.values, strict=True) if v is not None]
    times_s = np.array([time_s for time_s, _ in known])
    values = np.array([value for _, value in known])
    inside = values[(times_s >= start_s) & (times_s <= end_s)]
    has_level = series.unit != "joules" and inside.size > 0
    return WindowSummary(
        mean=float(inside.mean()) if has_level else None,
        maximum=float(inside.max()) if has_level else None,
        energy_joules=_energy_joules(series.unit, times_s, values, start_s, end_s),
        num_samples=int(inside.size),
        absent_reason=series.absent_reason,
    )


def _energy_joules(
    unit: str, times_s: np.ndarray, values: np.ndarray, start_s: float, end_s: float
) -> float | None:
    if unit not in {"joules", "watts"} or times_s.size < 2:
        return None
    start_s, end_s = max(start_s, float(times_s[0])), min(end_s, float(times_s[-1]))
    if start_s >= end_s:
        return None
    at_edges = np.interp([start_s, end_s], times_s, values)
    if unit == "joules":
        # A counter that falls was reset, by a reloaded driver: the growth is then unknown.
        return float(at_edges[1] - at_edges[0]) if np.all(np.diff(values) >= 0) else None
    is_between = (times_s > start_s) & (times_s < end_s)
    points_s = np.concatenate([[start_s], times_s[is_between], [end_s]])
    watts = np.concatenate([at_edges[:1], values[is_between], at_edges[1:]])
    return float(np.sum(np.diff(points_s) * (watts[1:] + watts[:-1]) / 2))
