"""The sampler: what it records and when it stops; its sources have tests of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psutil
import pytest
from fakes import VirtualClock

from oppo_kit.errors import ConfigError
from oppo_kit.telemetry import utilisation
from oppo_kit.telemetry.quantity import Absent, Quantity
from oppo_kit.telemetry.utilisation import Series, UtilisationSampler


class FakeSource:
    """Stands for NVML: whatever quantities a test wants."""

    def __init__(self, *quantities: Quantity) -> None:
        self.quantities = list(quantities)
        self.num_closed = 0
        self.closed_by = ""

    def close(self) -> None:
        self.num_closed += 1
        self.closed_by = threading.current_thread().name


@pytest.fixture
def use_source(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeSource]:
    def use(read: Callable[[], float | Absent]) -> FakeSource:
        source = FakeSource(Quantity("fake/level", "fraction", read))
        monkeypatch.setattr(utilisation, "NvmlSource", lambda: source)
        return source

    return use


def named(sampler: UtilisationSampler, name: str = "fake/level") -> Series:
    return next(series for series in sampler.series() if series.name == name)


def test_times_count_from_the_origin_that_was_given(use_source) -> None:
    use_source(lambda: 1.0)
    clock = VirtualClock()
    clock.time_s = 103.0
    sampler = UtilisationSampler(clock=clock, origin_s=100.0)
    sampler.sample_once()
    clock.time_s = 104.5
    sampler.sample_once()
    assert named(sampler).times_s == [3.0, 4.5]


def test_times_count_from_the_first_sample_without_an_origin(use_source) -> None:
    use_source(lambda: 1.0)
    clock = VirtualClock()
    clock.time_s = 103.0
    sampler = UtilisationSampler(clock=clock)
    sampler.sample_once()
    clock.time_s = 104.5
    sampler.sample_once()
    assert named(sampler).times_s == [0.0, 1.5]


def test_an_absent_quantity_is_read_exactly_once(use_source) -> None:
    reads: list[None] = []
    use_source(lambda: reads.append(None) or Absent("not here"))
    sampler = UtilisationSampler(clock=VirtualClock())
    for _ in range(3):
        sampler.sample_once()
    assert len(reads) == 1
    assert named(sampler) == Series("fake/level", "fraction", absent_reason="not here")


def test_a_refusal_of_the_operating_system_is_an_absence_too(use_source) -> None:
    def refuse() -> float:
        raise psutil.AccessDenied(1)

    use_source(refuse)
    sampler = UtilisationSampler(clock=VirtualClock())
    sampler.sample_once()
    assert "the operating system refuses it" in str(named(sampler).absent_reason)


def test_what_series_returns_is_a_copy_that_stays_as_it_was(use_source) -> None:
    use_source(lambda: 1.0)
    sampler = UtilisationSampler(clock=VirtualClock())
    sampler.sample_once()
    before = named(sampler)
    sampler.sample_once()
    assert (before.values, named(sampler).values) == ([1.0], [1.0, 1.0])


def test_the_thread_samples_until_it_is_stopped_and_then_once_more(use_source) -> None:
    third_sample = threading.Event()
    num_reads = 0

    def read() -> float:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 3:
            third_sample.set()
        return num_reads / 10

    source = use_source(read)
    sampler = UtilisationSampler(interval_s=0.001)
    with sampler:
        assert third_sample.wait(30)
        thread = next(t for t in threading.enumerate() if t.name == "utilisation-sampler")
        assert thread.daemon
    assert not thread.is_alive()
    series = named(sampler)
    assert series.values == [n / 10 for n in range(1, num_reads + 1)]
    assert num_reads >= 4
    assert series.times_s == sorted(series.times_s)
    assert (source.num_closed, source.closed_by) == (1, "utilisation-sampler")


def test_stop_does_not_wait_for_the_interval(use_source) -> None:
    sampled = threading.Event()
    use_source(lambda: sampled.set() or 1.0)
    sampler = UtilisationSampler(interval_s=3600)
    sampler.start()
    assert sampled.wait(30)
    sampler.stop()
    assert named(sampler).values == [1.0, 1.0]


def test_a_driver_that_hangs_holds_up_neither_stop_nor_series(
    use_source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utilisation, "_JOIN_TIMEOUT_S", 0.01)
    reached, release = threading.Event(), threading.Event()

    def hang() -> float:
        reached.set()
        release.wait(30)
        return 1.0

    source = use_source(hang)
    sampler = UtilisationSampler(interval_s=3600)
    sampler.start()
    assert reached.wait(30)
    sampler.stop()
    assert named(sampler).absent_reason == "no sample was taken"
    assert source.num_closed == 0  # NVML is still in use by the thread
    release.set()


def test_stopping_a_sampler_that_never_started_does_nothing() -> None:
    sampler = UtilisationSampler()
    sampler.stop()
    assert sampler.series() == []


@pytest.mark.parametrize("interval_s", [0.0, -1.0, float("nan")])
def test_an_interval_that_is_not_positive_is_refused(interval_s: float) -> None:
    with pytest.raises(ConfigError, match=r"interval_s = .* must be positive, for example 0\.2"):
        UtilisationSampler(interval_s=interval_s)


def test_this_machine_gives_plausible_figures_for_itself() -> None:
    sampler = UtilisationSampler()
    sampler.sample_once()
    sampler.sample_once()
    sampler.stop()
    series = {one.name: one for one in sampler.series()}
    rss_bytes, available_bytes = (
        series[name].values[-1] for name in ("process/rss_bytes", "memory/available_bytes")
    )
    assert rss_bytes is not None
    assert available_bytes is not None
    assert 10 * 2**20 < rss_bytes < psutil.virtual_memory().total
    assert 0 < available_bytes < psutil.virtual_memory().total
    assert series["process/cpu_frac"].values[0] is None
    assert (series["process/cpu_frac"].values[1] or 0.0) >= 0.0
