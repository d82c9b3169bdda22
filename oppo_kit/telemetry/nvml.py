"""What NVIDIA's management library says about every GPU of the machine, through ``nvidia-ml-py``.

``utilisation_frac`` is the share of time in which *any* kernel was resident: one thread that waits counts as
fully as a GPU full of work. So it bounds idleness and says nothing about efficiency; read it next to tokens
per second and, where the chip has GPM counters (Hopper and later), ``sm_activity_frac``, the mean share of
multiprocessors with work.

GPUs are NVML's: all that the driver shows, numbered as ``nvidia-smi`` does; ``CUDA_VISIBLE_DEVICES`` changes
neither. What is missing (library, driver, permission, a function of an old driver, a counter in MIG mode) is
reported field by field, in words. Without NVML the fields stand under ``gpu/`` and all of them are absent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from oppo_kit.telemetry.quantity import NEEDS_TWO_SAMPLES, Absent, Quantity, always_absent

_UNITS = {
    "utilisation_frac": "fraction",
    "memory_bytes": "bytes",
    "power_watts": "watts",
    "energy_joules": "joules",
    "sm_activity_frac": "fraction",
}


class NvmlSource:
    """Opens NVML and lists its quantities; to be used by one thread.

    Attributes:
        quantities: five a GPU; energy is the counter since the driver was loaded, memory is everything in use
            on the device, by whatever process.
    """

    def __init__(self) -> None:
        self.quantities: list[Quantity] = []
        self._pynvml: Any = None
        self._gpm_readers: list[_SmActivity] = []
        try:
            import pynvml
        except ImportError:
            self._all_absent(
                "gpu", "nvidia-ml-py is not installed; install it with: pip install nvidia-ml-py"
            )
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self._all_absent("gpu", explain(pynvml, error))
            return
        self._pynvml = pynvml
        try:
            num_gpus = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            self._all_absent("gpu", explain(pynvml, error))
            return
        if num_gpus == 0:
            self._all_absent("gpu", "the NVIDIA driver shows no GPU to this process")
        for index in range(num_gpus):
            self._add_gpu(index)

    def close(self) -> None:
        """Give NVML back; the quantities must not be read afterwards."""
        if self._pynvml is None:
            return
        for reader in self._gpm_readers:
            reader.close()
        # Nothing is left to be read, and a failed farewell must not fail a run.
        with contextlib.suppress(self._pynvml.NVMLError):
            self._pynvml.nvmlShutdown()
        self._pynvml = None

    def _all_absent(self, prefix: str, reason: str) -> None:
        self.quantities += [always_absent(f"{prefix}/{name}", unit, reason) for name, unit in _UNITS.items()]

    def _add_gpu(self, index: int) -> None:
        nvml = self._pynvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            self._all_absent(f"gpu{index}", explain(nvml, error))
            return
        sm_activity = _SmActivity(nvml, handle)
        self._gpm_readers.append(sm_activity)
        readers: dict[str, Callable[[], float | Absent]] = {
            "utilisation_frac": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            # NVML counts in milliwatts and millijoules.
            "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "energy_joules": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
            "sm_activity_frac": sm_activity.read,
        }
        for name, read in readers.items():
            self.quantities.append(Quantity(f"gpu{index}/{name}", _UNITS[name], _guarded(nvml, read)))


class _SmActivity:
    """Mean share of busy multiprocessors between two looks at the GPM counters."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._previous: Any = None
        self._spare: Any = None

    def read(self) -> float | Absent:
        nvml = self._nvml
        if self._spare is None:
            if not nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                return Absent("this GPU has no GPM counters; Hopper and later have them")
            self._spare = nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(self._handle, self._spare)
        if self._previous is None:
            self._previous, self._spare = self._spare, None
            return NEEDS_TWO_SAMPLES
        self._previous, self._spare = self._spare, self._previous
        return self._between(self._spare, self._previous)

    def _between(self, earlier: Any, later: Any) -> float:
        nvml = self._nvml
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = 1
        request.sample1, request.sample2 = earlier, later
        request.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        nvml.nvmlGpmMetricsGet(request)
        if request.metrics[0].nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(request.metrics[0].nvmlReturn)
        return request.metrics[0].value / 100

    def close(self) -> None:
        for sample in (self._previous, self._spare):
            if sample is not None:
                with contextlib.suppress(self._nvml.NVMLError):
                    self._nvml.nvmlGpmSampleFree(sample)
        self._previous = self._spare = None


def gpu_names() -> list[str]:
    """Marketing names of the GPUs that NVML shows; empty without NVML, "unnamed" where only the name is missing."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    names = []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                names.append(str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))))
            except pynvml.NVMLError:
                names.append("unnamed")
    except pynvml.NVMLError:
        return names
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return names


def _guarded(nvml: Any, read: Callable[[], float | Absent]) -> Callable[[], float | Absent]:
    def read_or_explain() -> float | Absent:
        try:
            return read()
        except nvml.NVMLError as error:
            return Absent(explain(nvml, error))

    return read_or_explain


def explain(nvml: Any, error: Any) -> str:
    """An NVML error in words that say what to do, where something can be done."""
    words = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver library (libnvidia-ml.so.1) on this machine",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "NVIDIA driver and library differ in version; reboot",
        nvml.NVML_ERROR_NO_PERMISSION: "this user may not read it; ask the machine's administrator",
        nvml.NVML_ERROR_NOT_SUPPORTED: "this GPU, or its mode (for example MIG), does not offer it",
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND: "the NVIDIA driver is too old to offer it; update the driver",
    }
    return words.get(error.value, f"NVML says: {error}")
