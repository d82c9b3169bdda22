"""Samples what GPUs, CPUs and this process are busy with, beside a run that never notices.

::

    run ── start() ─────────────────────────────── stop() ──► series()
             │ starts                                │ wakes, then joins
             ▼                                       ▼
    thread: open sources ─ sample ─ wait interval_s ─ … ─ last sample ─ close sources

The thread waits only for its interval or for ``stop``; nobody waits for it but ``stop``, and that for a few
seconds at most. It owns the sources, so a driver that hangs holds up neither the run nor ``series``.

What the GPU figures mean, and what they do not, stands in ``oppo_kit.telemetry.nvml``.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from oppo_kit.errors import ConfigError
from oppo_kit.telemetry.clock import MonotonicClock
from oppo_kit.telemetry.host import HostSource
from oppo_kit.telemetry.nvml import NvmlSource
from oppo_kit.telemetry.quantity import Absent, Quantity

if TYPE_CHECKING:
    from oppo_kit.protocols import Clock

# A sample takes milliseconds; what takes longer is a driver that hangs, and a run must not wait for that.
_JOIN_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Series:
    """One sampled quantity.

    Attributes:
        name: for example ``gpu0/utilisation_frac``, ``cpu/utilisation_frac``, ``process/rss_bytes``.
        unit: in words; ``fraction`` is in 0..1.
        times_s: seconds since ``origin_s``, ascending.
        values: as many; None where a single sample failed.
        absent_reason: why there is no value at all, in plain words; the lists are then empty.
    """

    name: str
    unit: str
    times_s: list[float] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)
    absent_reason: str | None = None


class UtilisationSampler:
    """A daemon thread that samples every quantity of NVML and psutil; also a context manager.

    A quantity that is absent at the first sample is not asked again. One that fails later records None. A
    quantity that is a difference of two readings has None at the first sample.

    Args:
        interval_s: pause between two samples; a difference is a mean over about that time.
        clock: gives the samples' times; it does not drive the thread.
        origin_s: reading of ``clock`` that is 0 in the series; None: the moment of ``start``, else of the
            first sample.

    Raises:
        ConfigError: the interval is not positive.
    """

    def __init__(
        self, *, interval_s: float = 0.2, clock: Clock | None = None, origin_s: float | None = None
    ) -> None:
        if not interval_s > 0:
            raise ConfigError(
                f"interval_s = {interval_s} must be positive, for example 0.2; raise it to sample less often"
            )
        self._interval_s = interval_s
        self._clock: Clock = clock or MonotonicClock()
        self._origin_s = origin_s
        self._nvml: NvmlSource | None = None
        self._live: list[tuple[Quantity, Series]] = []
        self._series: list[Series] = []
        self._last_reasons: dict[str, str] = {}
        self._lock = threading.Lock()  # guards the series, never held while a source is read
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="utilisation-sampler", daemon=True)

    def start(self) -> None:
        """Begin to sample. A sampler runs once: a second start is refused by ``threading``."""
        if self._origin_s is None:
            self._origin_s = self._clock.now_s()
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end the thread; does nothing when it has ended or never began."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_TIMEOUT_S)
        else:
            self._close()

    def __enter__(self) -> UtilisationSampler:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def sample_once(self) -> None:
        """Read every live quantity once; for the thread, and for a caller that has started none."""
        if self._nvml is None:
            self._open()
        now_s = self._clock.now_s()
        if self._origin_s is None:
            self._origin_s = now_s
        readings = [_read(quantity) for quantity, _ in self._live]
        with self._lock:
            self._record(now_s - self._origin_s, readings)

    def series(self) -> list[Series]:
        """Copies of everything sampled so far, and why the rest is absent; at any time, from any thread."""
        with self._lock:
            return [self._finished(series) for series in self._series]

    def _run(self) -> None:
        try:
            self.sample_once()
            while not self._stop.wait(self._interval_s):
                self.sample_once()
            self.sample_once()
        finally:
            self._close()

    def _open(self) -> None:
        self._nvml = NvmlSource()
        quantities = [*HostSource(self._clock).quantities, *self._nvml.quantities]
        with self._lock:
            self._series = [Series(quantity.name, quantity.unit) for quantity in quantities]
            self._live = list(zip(quantities, self._series, strict=True))

    def _close(self) -> None:
        if self._nvml is not None:
            self._nvml.close()

    def _record(self, time_s: float, readings: list[float | Absent]) -> None:
        still_live = []
        for (quantity, series), reading in zip(self._live, readings, strict=True):
            if isinstance(reading, Absent):
                self._last_reasons[series.name] = reading.reason
                if reading.is_final and not series.times_s:
                    series.absent_reason = reading.reason
                    continue
            series.times_s.append(time_s)
            series.values.append(None if isinstance(reading, Absent) else reading)
            still_live.append((quantity, series))
        self._live = still_live

    def _finished(self, series: Series) -> Series:
        reason = series.absent_reason
        if reason is None and all(value is None for value in series.values):
            reason = self._last_reasons.get(series.name, "no sample was taken")
        if reason is not None:
            return Series(series.name, series.unit, absent_reason=reason)
        return Series(series.name, series.unit, list(series.times_s), list(series.values))


def _read(quantity: Quantity) -> float | Absent:
    try:
        value = quantity.read()
    except (psutil.Error, OSError) as error:
        return Absent(f"the operating system refuses it: {error}")
    if isinstance(value, Absent):
        return value
    return float(value) if math.isfinite(value) else Absent(f"the driver reported {value}")
