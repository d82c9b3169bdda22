"""The wheel holds what it must, and a foreign ``algorithms`` or ``harness`` is refused in words."""

import base64
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

import algorithms
import harness
import oppo_kit
from oppo_kit.errors import ConfigError
from oppo_kit.installation import DISTRIBUTION, check_installation

ROOT = Path(__file__).parents[2]
PACKAGES = ("oppo_kit", "algorithms", "harness")
CHECK = "from oppo_kit.installation import check_installation; check_installation()"
COMMAND = "from oppo_kit.installation import main; main()"


def run_python(code: str, *arguments: str, path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter in which ``path`` is searched before everything installed."""
    search = os.pathsep.join([str(path), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": search, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def claim(folder: Path, package: str, distribution: str) -> None:
    """Write the metadata of a distribution that says it owns ``package``."""
    info = folder / f"{distribution}-0.1.4.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1.4\n")
    (info / "RECORD").write_text(f"{package}/__init__.py,,\n{info.name}/METADATA,,\n{info.name}/RECORD,,\n")
    (info / "top_level.txt").write_text(f"{package}\n")


def write_foreign(folder: Path, package: str) -> None:
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text('"""Sorting and searching."""\n')


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the working tree, built without network."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, copy)
    for package in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel"],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert built.returncode == 0, built.stderr
    (path,) = (copy / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def installed_once(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
    ]
    done = subprocess.run(
        [*pip, str(wheel)], capture_output=True, text=True, check=False, timeout=120, cwd=target
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def installed(installed_once: Path, tmp_path: Path) -> Path:
    """A folder with the wheel installed, the test's own to spoil."""
    return shutil.copytree(installed_once, tmp_path / "site")


# --- which packages are imported


def test_the_imported_packages_lie_side_by_side_in_this_repository_or_installation() -> None:
    homes = {Path(str(package.__file__)).resolve().parents[1] for package in (oppo_kit, algorithms, harness)}
    assert homes == {Path(oppo_kit.__file__).resolve().parents[1]}


def test_this_installation_is_accepted() -> None:
    check_installation()


@pytest.mark.parametrize("package", ["algorithms", "harness"])
def test_a_foreign_package_before_ours_is_refused_and_named(package: str, tmp_path: Path) -> None:
    write_foreign(tmp_path, package)
    claim(tmp_path, package, f"{package}-of-somebody")
    done = run_python(CHECK, path=tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert f"ConfigError: the package '{package}' comes from {tmp_path.resolve() / package}" in done.stderr
    assert f"(distribution '{package}-of-somebody')" in done.stderr
    assert "fresh virtual environment" in done.stderr


def test_a_foreign_module_that_no_distribution_owns_is_refused_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "harness.py").write_text("")
    done = run_python(CHECK, path=tmp_path, cwd=tmp_path)
    assert f"the package 'harness' comes from {tmp_path.resolve() / 'harness.py'}" in done.stderr


def test_a_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"'algorithms' of oppo-kit is not installed; expected it in .*fresh"
    ):
        check_installation()


def test_a_package_overwritten_by_another_distribution_is_refused(installed: Path, tmp_path: Path) -> None:
    (installed / "algorithms" / "__init__.py").write_text('"""Sorting and searching."""\n')
    claim(installed, "algorithms", "algorithms")
    done = run_python(CHECK, path=installed, cwd=tmp_path)
    assert done.returncode == 1
    assert "was overwritten (distribution 'algorithms'). Install oppo-kit into a fresh" in done.stderr


def test_a_file_edited_by_hand_is_no_foreign_package(installed: Path, tmp_path: Path) -> None:
    (installed / "algorithms" / "__init__.py").write_text('"""Edited."""\n')
    done = run_python(CHECK, path=installed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_installed_wheel_is_accepted_and_imported_from_its_folder(
    installed: Path, tmp_path: Path
) -> None:
    code = f"{CHECK}; import oppo_kit, algorithms, harness; print(algorithms.__file__)"
    done = run_python(code, path=installed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == installed / "algorithms" / "__init__.py"


def test_sources_that_were_never_installed_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", not_found)
    check_installation()


# --- the command


def test_the_command_says_in_one_line_that_harness_is_shadowed(tmp_path: Path) -> None:
    write_foreign(tmp_path, "harness")
    done = run_python(COMMAND, "--help", path=tmp_path, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the package 'harness' comes from ")
    assert done.stderr.count("\n") == 1


def test_the_command_of_the_installed_wheel_shows_its_help(installed: Path, tmp_path: Path) -> None:
    done = run_python(COMMAND, "--help", path=installed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bench" in done.stdout


# --- the wheel


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_holds_each_package_and_says_it_is_typed(package: str, wheel_names: set[str]) -> None:
    assert {f"{package}/__init__.py", f"{package}/py.typed"} <= wheel_names


def test_the_wheel_holds_every_file_of_the_packages_and_no_other(wheel_names: set[str]) -> None:
    def is_ours(path: Path) -> bool:
        return path.is_file() and "__pycache__" not in path.parts and path.suffix not in {".pyc", ".so"}

    sources = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if is_ours(path)
    }
    assert {name for name in wheel_names if ".dist-info/" not in name} == sources


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_the_wheel_holds_the_embedded_models(suffix: str, wheel_names: set[str]) -> None:
    assert [name for name in wheel_names if name.startswith("harness/assets/tiny/") and name.endswith(suffix)]


def wheel_text(wheel: Path, ending: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(ending))
        return archive.read(name).decode()


def test_an_older_python_is_refused_by_the_metadata(wheel: Path) -> None:
    headers = Parser().parsestr(wheel_text(wheel, ".dist-info/METADATA"))
    assert headers["Name"] == DISTRIBUTION
    assert headers["Requires-Python"] == ">=3.11"
    assert headers["License-Expression"] == "Apache-2.0"


@pytest.mark.parametrize(
    "line",
    [
        "[console_scripts]\noppo-kit = oppo_kit.installation:main\n",
        "[oppo_kit.commands]\noppo-kit = harness.cli:main\n",
        "[oppo_kit.algorithms]\n",
        "ppo = algorithms.ppo:PPO\n",
    ],
)
def test_the_wheel_registers_its_entry_points(line: str, wheel: Path) -> None:
    assert line in wheel_text(wheel, ".dist-info/entry_points.txt")


def test_the_wheels_record_names_the_hash_that_the_check_compares(wheel: Path) -> None:
    digest = hashlib.sha256((ROOT / "algorithms" / "__init__.py").read_bytes()).digest()
    encoded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    assert f"algorithms/__init__.py,sha256={encoded}," in wheel_text(wheel, ".dist-info/RECORD")
