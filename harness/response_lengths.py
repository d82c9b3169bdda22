"""Lengths of the responses of a result: what was drawn, what was trained before the drain, and their distribution.

Knows the results file only. What overcommit postpones is missing between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy

from harness.schema import Runner
from harness.statistics import num_drain_steps


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """A distribution of response lengths, in tokens."""

    num_responses: int
    mean: float
    p50: float
    p90: float
    max: int


def drawn_lengths(runner: Runner) -> list[int]:
    """Lengths of all responses, drain included: in a drained run, all that was drawn and not rejected."""
    return [length for run in runner.runs for step in run.steps for length in step.trained_lengths]


def lengths_before_drain(runner: Runner) -> list[int]:
    """Lengths of what was trained before the drain; against ``drawn_lengths``, the postponed are missing."""
    kept = [step for run in runner.runs for step in run.steps[: len(run.steps) - num_drain_steps(run)]]
    return [length for step in kept for length in step.trained_lengths]


def summarise_lengths(lengths: Sequence[int]) -> LengthSummary | None:
    """Mean, median, 90th percentile (linear between ranks) and maximum; None without responses."""
    if not lengths:
        return None
    p50, p90 = (float(value) for value in numpy.percentile(lengths, [50, 90]))
    return LengthSummary(num_responses=len(lengths), mean=fmean(lengths), p50=p50, p90=p90, max=max(lengths))
