"""Hand-computed shares from faked psutil counters."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from fakes import VirtualClock

from oppo_kit.telemetry import host
from oppo_kit.telemetry.quantity import Absent

CpuTimes = namedtuple("CpuTimes", "user system idle iowait guest")


def test_machine_utilisation_is_the_busy_share_of_the_time_between_two_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Busy 3 of 4 core-seconds; the guest's second is already in user. Then no tick at all, then idle.
    readings = iter([
        CpuTimes(100, 10, 50, 5, 7),
        CpuTimes(102, 11, 50.5, 5.5, 8),
        CpuTimes(102, 11, 50.5, 5.5, 8),
        CpuTimes(102, 11, 54.5, 5.5, 8),
    ])  # fmt: skip
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(readings))
    read = host.HostSource(VirtualClock()).quantities[0].read
    assert read() == Absent("needs two samples", is_final=False)
    assert read() == 0.75
    assert read() == Absent("less than a clock tick since the last sample")
    assert read() == 0.0


class FakeProcess:
    def __init__(self, cpu_s: float, rss_bytes: int, children: list[FakeProcess] | None = None) -> None:
        self.used_s, self.rss, self.offspring = cpu_s, rss_bytes, children or []
        self.has_ended = False

    def children(self, recursive: bool) -> list[FakeProcess]:
        assert recursive
        return list(self.offspring)

    def cpu_times(self) -> SimpleNamespace:
        if self.has_ended:
            raise psutil.NoSuchProcess(1)
        return SimpleNamespace(user=self.used_s - 0.25, system=0.25, children_user=99.0)

    def memory_info(self) -> SimpleNamespace:
        if self.has_ended:
            raise psutil.NoSuchProcess(1)
        return SimpleNamespace(rss=self.rss)


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeProcess, VirtualClock, dict[str, Callable[[], Any]]]:
    """A process with one child on four cores, a clock at 10 s, and the readers by name."""
    parent = FakeProcess(5.0, 1000, [FakeProcess(7.0, 300)])
    monkeypatch.setattr(psutil, "Process", lambda: parent)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    clock = VirtualClock()
    clock.time_s = 10.0
    source = host.HostSource(clock)
    return parent, clock, {quantity.name: quantity.read for quantity in source.quantities}


def test_process_time_is_a_share_of_all_cores_with_the_children(family) -> None:
    parent, clock, read = family
    assert read["process/cpu_frac"]() == Absent("needs two samples", is_final=False)
    parent.used_s, parent.offspring[0].used_s, clock.time_s = 6.0, 8.0, 12.0
    assert read["process/cpu_frac"]() == (1.0 + 1.0) / 2.0 / 4
    assert read["process/rss_bytes"]() == 1300
    assert read["process/cpu_frac"]() == Absent("no time has passed since the last sample")


def test_an_ended_child_is_passed_over(family) -> None:
    parent, clock, read = family
    read["process/cpu_frac"]()
    parent.offspring[0].has_ended = True
    parent.used_s, clock.time_s = 7.0, 11.0
    assert read["process/cpu_frac"]() == 0.5
    assert read["process/rss_bytes"]() == 1000


def test_a_new_child_is_found_at_the_next_search_and_its_past_is_not_counted(family) -> None:
    parent, clock, read = family
    read["process/cpu_frac"]()
    parent.offspring.append(FakeProcess(50.0, 20))
    for _ in range(9):
        clock.time_s += 1
        assert read["process/cpu_frac"]() == 0.0
    assert read["process/rss_bytes"]() == 1300
    clock.time_s += 1
    assert read["process/cpu_frac"]() == 0.0
    assert read["process/rss_bytes"]() == 1320
    parent.offspring[1].used_s, clock.time_s = 52.0, clock.time_s + 1
    assert read["process/cpu_frac"]() == 0.5
