"""What the sampler reads: a named quantity that gives a number, or says why there is none.

Knows neither NVML nor psutil nor threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Absent:
    """No number this time.

    Attributes:
        reason: in plain words.
        is_final: whether asking again is pointless; heeded at the first sample only, since a quantity that
            was there once may come back.
    """

    reason: str
    is_final: bool = True


@dataclass(frozen=True, slots=True)
class Quantity:
    """One thing to sample.

    Attributes:
        name: ``source/what_unit``, for example ``gpu0/power_watts``.
        unit: in words, for example ``watts``; ``fraction`` is in 0..1.
        read: returns a number or why there is none; never raises for a quantity that this machine lacks.
    """

    name: str
    unit: str
    read: Callable[[], float | Absent]


# The first sample of a quantity that is a difference of two readings.
NEEDS_TWO_SAMPLES = Absent("needs two samples", is_final=False)


def always_absent(name: str, unit: str, reason: str) -> Quantity:
    """A quantity of which it is known beforehand that this machine does not offer it."""
    return Quantity(name, unit, lambda: Absent(reason))
