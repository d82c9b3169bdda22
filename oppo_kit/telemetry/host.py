"""What the operating system says about the machine and about this process with its children, by psutil.

In a container the machine is the host: ``cpu/`` and ``memory/`` see the neighbours, ``process/`` does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import psutil

from oppo_kit.telemetry.quantity import NEEDS_TWO_SAMPLES, Absent, Quantity

if TYPE_CHECKING:
    from oppo_kit.protocols import Clock

# Finding the children reads every process of the machine: 2 ms with 83 processes, all the rest takes 0.3 ms.
_SAMPLES_PER_CHILD_SEARCH = 10


class HostSource:
    """Lists the quantities of machine and process; to be used by one thread.

    Attributes:
        quantities: shares are of all logical cores, so ``process/cpu_frac`` compares with
            ``cpu/utilisation_frac``. Resident memory is summed over the processes, so pages they share count
            several times. A child counts from the first search that sees it; one that ends takes along what
            it used since the last sample.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._family = _Family()
        self._machine: _MachineTimes | None = None
        self._family_cpu_s: dict[psutil.Process, float] = {}
        self._family_read_at_s: float | None = None
        self._num_cores = psutil.cpu_count() or 1
        self.quantities = [
            Quantity("cpu/utilisation_frac", "fraction", self._read_machine_cpu),
            Quantity("memory/available_bytes", "bytes", lambda: psutil.virtual_memory().available),
            Quantity("process/cpu_frac", "fraction", self._read_family_cpu),
            Quantity("process/rss_bytes", "bytes", self._family.rss_bytes),
        ]

    def _read_machine_cpu(self) -> float | Absent:
        """Busy is all but idle and waiting for disks; stolen time of a virtual machine counts as busy."""
        previous, self._machine = self._machine, _machine_times()
        if previous is None:
            return NEEDS_TWO_SAMPLES
        total_s = self._machine.total_s - previous.total_s
        if total_s <= 0:
            return Absent("less than a clock tick since the last sample")
        idle_s = self._machine.idle_s - previous.idle_s
        return min(max(1 - idle_s / total_s, 0.0), 1.0)

    def _read_family_cpu(self) -> float | Absent:
        self._family.refresh()
        previous, self._family_cpu_s = self._family_cpu_s, self._family.cpu_s()
        now_s = self._clock.now_s()
        previous_at_s, self._family_read_at_s = self._family_read_at_s, now_s
        if previous_at_s is None:
            return NEEDS_TWO_SAMPLES
        if now_s <= previous_at_s:
            return Absent("no time has passed since the last sample")
        used_s = sum(cpu_s - previous.get(process, cpu_s) for process, cpu_s in self._family_cpu_s.items())
        return used_s / (now_s - previous_at_s) / self._num_cores


class _MachineTimes(NamedTuple):
    total_s: float
    idle_s: float


def _machine_times() -> _MachineTimes:
    times = psutil.cpu_times()._asdict()
    # Linux counts a guest's time as user time too.
    total_s = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
    return _MachineTimes(total_s, times["idle"] + times.get("iowait", 0.0))


class _Family:
    """This process and its children, of whatever generation."""

    def __init__(self) -> None:
        self._this = psutil.Process()
        self._children: list[psutil.Process] = []
        self._num_refreshes = 0

    def refresh(self) -> None:
        if self._num_refreshes % _SAMPLES_PER_CHILD_SEARCH == 0:
            self._children = self._this.children(recursive=True)
        self._num_refreshes += 1

    def cpu_s(self) -> dict[psutil.Process, float]:
        used_s = {}
        for process in (self._this, *self._children):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue  # ended, or not ours to look at
            used_s[process] = times.user + times.system
        return used_s

    def rss_bytes(self) -> float:
        total = self._this.memory_info().rss
        for child in self._children:
            try:
                total += child.memory_info().rss
            except psutil.Error:
                continue
        return total
