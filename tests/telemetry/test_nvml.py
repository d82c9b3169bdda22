"""What the sampler makes of NVML: a real shared library, compiled here, stands in its place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from fakes import VirtualClock

from oppo_kit.telemetry.utilisation import Series, UtilisationSampler

SUPPORT = Path(__file__).parents[1] / "support"
GPU_FIELDS = ["utilisation_frac", "memory_bytes", "power_watts", "energy_joules", "sm_activity_frac"]


class Stub:
    """A worker process whose NVML is the compiled stub."""

    def __init__(self, folder: Path, *flags: str) -> None:
        library = folder / "libnvidia-ml.so.1"
        source = str(SUPPORT / "nvml_stub.c")
        subprocess.run(
            [
                "gcc",
                "-Wall",
                "-Werror",
                "-shared",
                "-fPIC",
                *flags,
                f"-Wl,-soname,{library.name}",
                "-o",
                library,
                source,
            ],
            check=True,
        )
        self.worker = subprocess.Popen(
            [sys.executable, SUPPORT / "nvml_worker.py"],
            env=os.environ | {"LD_LIBRARY_PATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "stderr").open("w"),
            text=True,
        )
        self.stderr = folder / "stderr"

    def sample(self, num_samples: int = 1, **environment: str) -> dict[str, Series]:
        assert self.worker.stdin is not None
        assert self.worker.stdout is not None
        stub = {f"NVML_STUB_{name}": value for name, value in environment.items()}
        self.worker.stdin.write(json.dumps({"environment": stub, "num_samples": num_samples}) + "\n")
        self.worker.stdin.flush()
        line = self.worker.stdout.readline()
        assert line, self.stderr.read_text()
        return {series["name"]: Series(**series) for series in json.loads(line)}

    def close(self) -> None:
        self.worker.communicate(timeout=30)


def require_compiler() -> None:
    if shutil.which("gcc") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("gcc is missing, so NVML stays untested; install gcc on the CI machine")
        pytest.skip("gcc is missing; install it to test NVML against a stub library")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    require_compiler()
    stub = Stub(tmp_path_factory.mktemp("driver"))
    yield stub
    stub.close()


@pytest.fixture(scope="module")
def old_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    require_compiler()
    stub = Stub(tmp_path_factory.mktemp("old_driver"), "-DOLD_DRIVER")
    yield stub
    stub.close()


def absent_reasons(series: dict[str, Series]) -> dict[str, str | None]:
    return {name: one.absent_reason for name, one in series.items() if name.startswith("gpu")}


def assert_host_is_sampled(series: dict[str, Series]) -> None:
    assert series["process/rss_bytes"].values[0]
    assert series["memory/available_bytes"].values[0]


def sample_here(num_samples: int) -> dict[str, Series]:
    clock = VirtualClock()
    sampler = UtilisationSampler(clock=clock)
    for _ in range(num_samples):
        sampler.sample_once()
        clock.time_s += 1
    sampler.stop()
    return {series.name: series for series in sampler.series()}


def test_a_scripted_utilisation_is_read_as_exactly_these_fractions(driver: Stub) -> None:
    series = driver.sample(4, UTIL="10,95,0")["gpu0/utilisation_frac"]
    assert series.values == [0.10, 0.95, 0.0, 0.10]
    assert (series.unit, series.absent_reason) == ("fraction", None)


def test_watts_joules_and_bytes_come_out_of_milliwatts_and_millijoules(driver: Stub) -> None:
    series = driver.sample(3)
    assert series["gpu0/power_watts"].values == [250.0, 250.0, 250.0]
    assert series["gpu0/energy_joules"].values == [1000.0, 1050.0, 1100.0]
    assert series["gpu0/memory_bytes"].values == [3 * 2**30] * 3
    assert [series[f"gpu0/{name}"].unit for name in GPU_FIELDS] == [
        "fraction",
        "bytes",
        "watts",
        "joules",
        "fraction",
    ]


def test_sm_activity_is_a_difference_so_its_first_sample_is_missing(driver: Stub) -> None:
    series = driver.sample(4, SM="25,50,75")["gpu0/sm_activity_frac"]
    assert series.values == [None, 0.25, 0.5, 0.75]
    assert series.absent_reason is None


def test_sm_activity_with_one_sample_only_is_absent_and_says_so(driver: Stub) -> None:
    series = driver.sample(1)["gpu0/sm_activity_frac"]
    assert (series.values, series.times_s, series.absent_reason) == ([], [], "needs two samples")


def test_a_chip_without_gpm_has_no_sm_activity_but_all_the_rest(driver: Stub) -> None:
    series = driver.sample(2, NO_GPM="1")
    assert (
        series["gpu0/sm_activity_frac"].absent_reason
        == "this GPU has no GPM counters; Hopper and later have them"
    )
    assert series["gpu0/utilisation_frac"].values == [0.5, 0.5]


def test_a_metric_that_is_not_a_number_is_a_missing_sample(driver: Stub) -> None:
    assert driver.sample(4, SM="25,nan,75")["gpu0/sm_activity_frac"].values == [None, 0.25, None, 0.75]


def test_a_metric_with_an_error_code_of_its_own_is_a_missing_sample(driver: Stub) -> None:
    assert driver.sample(3, SM="25,50", FAIL_METRIC="3@0")["gpu0/sm_activity_frac"].values == [
        None,
        None,
        0.5,
    ]


def test_a_failed_gpm_sample_leaves_the_next_one_whole(driver: Stub) -> None:
    series = driver.sample(4, SM="25,50", FAIL_GPM="999@1")["gpu0/sm_activity_frac"]
    assert series.values == [None, None, 0.25, 0.5]


def test_gpm_samples_are_given_back(driver: Stub) -> None:
    driver.sample(3)
    driver.sample(1)
    assert "leaked" not in driver.stderr.read_text()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("9", "the NVIDIA driver is not loaded"),
        ("4", "this user may not read it; ask the machine's administrator"),
        ("18", "NVIDIA driver and library differ in version; reboot"),
        ("999", "NVML says: Unknown Error"),
    ],
)
def test_a_failure_at_init_makes_every_gpu_field_absent_with_its_reason(
    driver: Stub, code: str, reason: str
) -> None:
    series = driver.sample(2, FAIL_INIT=code)
    assert absent_reasons(series) == {f"gpu/{name}": reason for name in GPU_FIELDS}
    assert all(series[f"gpu/{name}"].values == [] for name in GPU_FIELDS)
    assert_host_is_sampled(series)


def test_a_driver_without_a_gpu_says_so(driver: Stub) -> None:
    reasons = absent_reasons(driver.sample(COUNT="0"))
    assert reasons == {f"gpu/{name}": "the NVIDIA driver shows no GPU to this process" for name in GPU_FIELDS}


def test_an_old_driver_lacks_only_what_it_never_had(old_driver: Stub) -> None:
    series = old_driver.sample(2, UTIL="10,95")
    too_old = "the NVIDIA driver is too old to offer it; update the driver"
    assert absent_reasons(series) == {
        "gpu0/utilisation_frac": None,
        "gpu0/memory_bytes": None,
        "gpu0/power_watts": None,
        "gpu0/energy_joules": too_old,
        "gpu0/sm_activity_frac": too_old,
    }
    assert series["gpu0/utilisation_frac"].values == [0.10, 0.95]


def test_in_mig_mode_what_is_refused_is_absent_and_the_rest_is_sampled(driver: Stub) -> None:
    series = driver.sample(2, FAIL_UTIL="3", FAIL_GPM="3", FAIL_POWER="4")
    mig = "this GPU, or its mode (for example MIG), does not offer it"
    assert absent_reasons(series) == {
        "gpu0/utilisation_frac": mig,
        "gpu0/memory_bytes": None,
        "gpu0/power_watts": "this user may not read it; ask the machine's administrator",
        "gpu0/energy_joules": None,
        "gpu0/sm_activity_frac": mig,
    }
    assert series["gpu0/utilisation_frac"].values == []


def test_a_field_that_fails_at_the_first_sample_is_not_asked_again(driver: Stub) -> None:
    series = driver.sample(3, FAIL_POWER="3@0")["gpu0/power_watts"]
    assert (series.values, series.times_s) == ([], [])
    assert series.absent_reason is not None


def test_a_field_that_fails_once_later_has_a_hole_there_and_goes_on(driver: Stub) -> None:
    series = driver.sample(4, UTIL="10,20,30,40", FAIL_UTIL="15@2")["gpu0/utilisation_frac"]
    assert series.values == [0.10, 0.20, None, 0.40]
    assert series.absent_reason is None


def test_a_gpu_whose_index_is_refused_is_absent_beside_one_that_works(driver: Stub) -> None:
    series = driver.sample(2, COUNT="2", HANDLES="1")
    assert series["gpu0/power_watts"].values == [250.0, 250.0]
    assert {absent_reasons(series)[f"gpu1/{name}"] for name in GPU_FIELDS} == {"NVML says: Invalid Argument"}


def test_two_gpus_are_sampled_each_under_its_own_name(driver: Stub) -> None:
    series = driver.sample(2, COUNT="2", UTIL="10,20,30,40")
    assert series["gpu0/utilisation_frac"].values == [0.10, 0.30]
    assert series["gpu1/utilisation_frac"].values == [0.20, 0.40]


def test_without_a_driver_library_the_gpu_fields_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", refuse)
    reason = "no NVIDIA driver library (libnvidia-ml.so.1) on this machine"
    series = sample_here(2)
    assert absent_reasons(series) == {f"gpu/{name}": reason for name in GPU_FIELDS}
    assert_host_is_sampled(series)


def test_without_nvidia_ml_py_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reasons = set(absent_reasons(sample_here(1)).values())
    assert reasons == {"nvidia-ml-py is not installed; install it with: pip install nvidia-ml-py"}
