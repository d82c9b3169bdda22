"""The wheels that the check for large GPUs carries along, and how it starts from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.gpu_check import bundle, start
from harness.gpu_check.start import StartError
from oppo_kit.errors import ConfigError, DataError

LOCK = """\
alpha==1.0 \\
    --hash=sha256:aa \\
    --hash=sha256:ab
beta==2.0 \\
    --hash=sha256:bb
gamma==3.0 \\
    --hash=sha256:cc
"""
RECORD = """\
big/__init__.py,sha256=a,1
big/tests/test_it.py,sha256=b,2
big/lib.so.1,sha256=c,3
big-1.0.dist-info/RECORD,,
"""


def make_wheel(folder: Path, name: str = "big-1.0-py3-none-any.whl") -> Path:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr("big/__init__.py", "NUMBER = 7\n")
        wheel.writestr("big/tests/test_it.py", "x" * 50_000)
        wheel.writestr("big/lib.so.1", b"\x7fELF")
        wheel.writestr("big-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: big\nVersion: 1.0\n")
        wheel.writestr("big-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("big-1.0.dist-info/RECORD", RECORD)
    return folder / name


def test_the_requirements_are_the_lock_s_own_lines() -> None:
    assert bundle.locked_requirements(LOCK, ["gamma", "alpha"]) == (
        "gamma==3.0 \\\n    --hash=sha256:cc\nalpha==1.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:ab\n"
    )
    with pytest.raises(DataError, match=r"requirements.lock has no delta, omega; run `make lock`"):
        bundle.locked_requirements(LOCK, ["omega", "alpha", "delta"])


def test_every_package_of_the_bundle_is_locked() -> None:
    text = bundle.locked_requirements((start.ROOT / "requirements.lock").read_text(), bundle.PACKAGES)
    pins = [line.split()[0] for line in text.splitlines() if "==" in line]
    assert [pin.partition("==")[0] for pin in pins] == list(bundle.PACKAGES)
    assert "trl==1.12.0" in pins


def test_a_cut_wheel_lacks_the_files_and_their_records_and_keeps_the_rest(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    num_bytes = wheel.stat().st_size
    bundle.cut_wheel(wheel, ("big/tests/*",))
    with zipfile.ZipFile(wheel) as cut:
        names = set(cut.namelist())
        assert cut.read("big-1.0.dist-info/RECORD").decode() == RECORD.replace(
            "big/tests/test_it.py,sha256=b,2\n", ""
        )
        assert cut.read("big/lib.so.1") == b"\x7fELF"
    assert "big/__init__.py" in names
    assert not [name for name in names if "tests" in name]
    assert wheel.stat().st_size < num_bytes
    assert list(tmp_path.iterdir()) == [wheel]


def test_the_cut_keeps_the_libraries_that_pyarrow_links_and_one_of_equal_files() -> None:
    kept = ["libarrow_python.so.2600", "libarrow_substrait.so.2600", "lib.cpython-312-x86_64-linux-gnu.so"]
    cut = [
        "libarrow_python.so",
        "libarrow_python.so.2600.1.0",
        "libarrow_flight.so.2600",
        "libarrow_s3.so.2600",
    ]
    patterns = bundle.UNUSED["pyarrow"]
    assert [name for name in kept + cut if bundle._matches(f"pyarrow/{name}", patterns)] == cut
    assert not bundle._matches("pyarrow-26.0.1.dist-info/licenses/LICENSE.txt", patterns)


def test_a_bundle_says_what_it_holds_and_replaces_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bundle"
    make_wheel(folder, "old-1.0-py3-none-any.whl")

    def download(to: Path, python: str, requirements: str) -> None:
        assert "trl==1.12.0" in requirements
        make_wheel(to)

    monkeypatch.setattr(bundle, "_download", download)
    monkeypatch.setattr(bundle, "UNUSED", {"big": ("big/tests/*",)})
    assert bundle.main(["--out", str(folder), "--python", "3.13"]) == 0
    manifest = start.read_manifest(folder)
    wheel = folder / "big-1.0-py3-none-any.whl"
    assert sorted(path.name for path in folder.iterdir()) == [wheel.name, "bundle.json"]
    assert manifest["python"] == "3.13"
    assert manifest["wheels"] == {wheel.name: wheel.stat().st_size}
    assert manifest["total_bytes"] == wheel.stat().st_size


def test_a_bundle_that_cannot_be_carried_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = r"the wheels take 60.0 MiB, and 55 are allowed; largest: b.whl 50.0 MiB, a.whl 10.0 MiB; add to UNUSED"
    with pytest.raises(ConfigError, match=words):
        bundle.check_size({"a.whl": 10 * 2**20, "b.whl": 50 * 2**20}, bundle.LIMIT_BYTES)
    assert bundle.check_size({"b.whl": 55 * 2**20}, bundle.LIMIT_BYTES) == 55 * 2**20
    monkeypatch.setattr(bundle, "_download", lambda to, *_: make_wheel(to))
    monkeypatch.setattr(bundle, "LIMIT_BYTES", 10)
    with pytest.raises(ConfigError, match="the wheels take 0.0 MiB"):
        bundle.make_bundle(tmp_path, "3.12", limit_bytes=10)
    assert not (tmp_path / "bundle.json").exists()


def test_pip_s_refusal_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        if "download" not in command:
            return real_run(command, **_)
        commands.append(command)
        return SimpleNamespace(returncode=1, stderr="No matching distribution\n")

    real_run = subprocess.run
    monkeypatch.setattr(subprocess, "run", run)
    assert bundle.main(["--out", str(tmp_path), "--python", "3.99"]) == 2
    error = capsys.readouterr().err
    assert "error: pip could not get the wheels for Python 3.99" in error
    assert "No matching distribution" in error
    (command,) = commands
    assert {"--require-hashes", "--no-deps", "--only-binary=:all:"} <= set(command)


def test_without_a_bundle_the_start_says_how_to_make_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start.main(["--bundle", str(tmp_path)]) == 2
    assert f"error: no wheels in {tmp_path}; collect them with `make gpu-bundle`" in capsys.readouterr().err


def test_a_bundle_for_another_python_is_refused() -> None:
    words = r"are for Python 3.12, and .* is Python 3.13; .*make gpu-bundle GPU_PYTHON=3.13"
    with pytest.raises(StartError, match=words):
        start.check_python({"python": "3.12"}, (3, 13))
    start.check_python({"python": "3.12"}, (3, 12))


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"torch": "2.10.1+cu130"}, "torch is 2.10.1.cu130 in .*, and the check needs 2.11 or later"),
        ({"transformers": "5.9.0"}, "transformers is 5.9.0 in .*, and the check needs 5.17 or later"),
        ({"accelerate": None}, "accelerate is missing in .*, and the check needs 1.10 or later; .*PYTHON="),
        ({}, None),
    ],
)
def test_what_the_bundle_does_not_hold_must_be_there(
    versions: dict[str, str | None], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"torch": "2.11.0+cu130", "transformers": "5.17.0", "accelerate": "1.15.0"} | versions

    def version(name: str) -> str:
        found = there[name]
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    if words is None:
        start.check_packages()
        return
    with pytest.raises(StartError, match=words):
        start.check_packages()


def test_the_start_installs_the_wheels_and_becomes_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the checkout's algorithms are found by the metadata that it writes."""
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    make_wheel(wheels)
    here = ".".join(map(str, sys.version_info[:2]))
    (wheels / "bundle.json").write_text(json.dumps({"python": here, "commit": "abc", "wheels": {}}))
    calls: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    start.main(["--bundle", str(wheels), "--site", str(site), "--size", "small", "--budget-s", "9"])
    ((program, command, environment),) = calls
    assert program == sys.executable
    assert command[1:] == ["-m", "harness.gpu_check", "--size", "small", "--budget-s", "9"]
    assert environment[start.COMMIT_VARIABLE] == "abc"
    paths = environment["PYTHONPATH"].split(os.pathsep)
    assert paths[:2] == [str(start.ROOT), str(site / "site-packages")]
    assert (site / "site-packages" / "big" / "__init__.py").read_text() == "NUMBER = 7\n"
    (ours,) = metadata.distributions(name="oppo-kit", path=[str(site / "site-packages")])
    points = ours.entry_points.select(group="oppo_kit.algorithms")
    assert ("ppo", "algorithms.ppo:PPO") in [(point.name, point.value) for point in points]


def test_wheels_that_pip_refuses_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken-1.0-py3-none-any.whl").write_text("no zip")
    with pytest.raises(StartError, match="pip could not install the wheels of"):
        start.install(tmp_path, tmp_path / "site")
