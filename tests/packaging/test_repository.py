"""What lies in the repository: no local paths, no quick results, and a lock that fits ``pyproject.toml``."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ("requirements.lock", "requirements-compiled.lock")
# Joined, so that this file does not find itself.
LOCAL_FOLDERS = tuple("/" + name for name in ("work", "root", "home", "Users"))
LOCAL_PATH = re.compile(rf"(?<![\w./:*<>}}-])(?:{'|'.join(LOCAL_FOLDERS)})/\w[\w.-]*")
EXTRAS_IN_THE_LOCK = ("baseline", "tasks", "trackers", "dev")
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def files_in_git() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def local_paths_in(text: str) -> list[str]:
    return LOCAL_PATH.findall(text)


def locked_versions() -> dict[str, str]:
    text = "".join((ROOT / name).read_text() for name in LOCKS)
    return {
        canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.M)
    }


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# --- what lies in git


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    found = {}
    for path in files_in_git():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # weights and pictures
            continue
        if paths := local_paths_in(text):
            found[path.relative_to(ROOT).as_posix()] = paths[:3]
    assert found == {}


@pytest.mark.parametrize("folder", LOCAL_FOLDERS)
def test_local_paths_are_found_and_web_addresses_are_not(folder: str) -> None:
    assert local_paths_in(f'open("{folder}/somebody/file")') == [f"{folder}/somebody"]
    assert local_paths_in(f"cd {folder}/somebody") == [f"{folder}/somebody"]
    assert local_paths_in(f"https://example.org{folder}/somebody") == []


def test_no_test_folder_is_a_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_no_committed_result_comes_from_a_quick_run() -> None:
    quick = [
        path.as_posix()
        for path in (ROOT / "results").rglob("result.json")
        if json.loads(path.read_text())["is_quick"] is not False
    ]
    assert quick == []


def test_the_script_of_ci_can_be_run() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


# --- the lock


@pytest.mark.parametrize("name", LOCKS)
def test_every_line_of_the_lock_is_a_pinned_name_or_a_hash(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    strange = [
        line
        for line in lines
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*==[\w.]+ \\|    --hash=sha256:[0-9a-f]{64}(?: \\)?", line)
    ]
    assert lines
    assert strange == []


def test_the_lock_leaves_torch_and_its_cuda_parts_to_the_installation_of_torch() -> None:
    names = locked_versions()
    assert [name for name in names if name in {"torch", "triton"} or name.startswith("cuda-")] == []
    assert [name for name in names if name.startswith("nvidia-")] == ["nvidia-ml-py"]


def test_the_lock_has_the_versions_of_the_constraints() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    wanted = dict(line.split("==") for line in lines)
    assert wanted.pop("torch") == "2.13.0"
    assert len(wanted) == 5
    locked = locked_versions()
    assert {name: locked[name] for name in wanted} == wanted


def test_the_lock_meets_every_requirement_of_the_project() -> None:
    extras = project()["optional-dependencies"]
    lines = [*project()["dependencies"], *(line for extra in EXTRAS_IN_THE_LOCK for line in extras[extra])]
    locked = locked_versions()
    unmet = [
        line
        for line in lines
        if (wanted := Requirement(line)).name != "torch"
        and not wanted.specifier.contains(locked.get(canonicalize_name(wanted.name), "0"), prereleases=True)
    ]
    assert unmet == [], "run `make lock`"


# --- make on a machine that cannot


def make_venv(folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    for name in ("Makefile", "constraints.txt", "pyproject.toml", *LOCKS):
        shutil.copy(ROOT / name, folder)
    return subprocess.run(
        ["make", "venv", f"PYTHON={python}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def write_python(folder: Path, *, version: str, script: str) -> str:
    """A stand-in for an interpreter; ``script`` answers ``python -c CODE``."""
    path = folder / "python-stand-in"
    path.write_text(f'#!/bin/sh\nif [ "$1" = -V ]; then echo "Python {version}"; exit 0; fi\n{script}\n')
    path.chmod(0o755)
    return str(path)


@needs_make
def test_make_says_which_python_is_too_old_and_how_to_name_another(tmp_path: Path) -> None:
    python = write_python(tmp_path, version="3.9.2", script="exit 1")
    done = make_venv(tmp_path, python)
    assert done.returncode != 0
    assert f"needs Python 3.11 or newer; '{python}' is Python 3.9.2 ({python})" in done.stderr
    assert "make venv PYTHON=python3.11" in done.stderr
    assert not (tmp_path / ".venv").exists()


@needs_make
def test_make_says_that_there_is_no_such_python(tmp_path: Path) -> None:
    done = make_venv(tmp_path, "python-of-nobody")
    assert done.returncode != 0
    assert "no 'python-of-nobody' on this machine" in done.stderr


@needs_make
def test_make_says_that_the_module_venv_is_missing(tmp_path: Path) -> None:
    python = write_python(tmp_path, version="3.11.2", script='case "$2" in *ensurepip*) exit 1;; esac')
    done = make_venv(tmp_path, python)
    assert done.returncode != 0
    assert "its modules venv and ensurepip are missing" in done.stderr
    assert "python3-venv" in done.stderr


# --- vLLM in CI


def decision_of_ci() -> str:
    """The part of ``.ci/run`` that decides whether ``make test-vllm`` runs."""
    text = (ROOT / ".ci" / "run").read_text()
    found = re.search(r"^vllm_files=\(\n.*?^has_vllm_changed\(\) \{\n.*?^\}\n", text, re.M | re.S)
    assert found
    return found.group()


def test_ci_names_only_files_that_exist() -> None:
    listed = re.search(r"vllm_files=\(\n(.*?)\n\)", decision_of_ci(), re.S)
    assert listed
    names = listed.group(1).split()
    assert len(names) > 8
    assert [name for name in names if not (ROOT / name).exists()] == []


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_ci_tests_vllm_where_a_branch_or_the_last_commit_changed_it_or_nobody_can_tell(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "first"
    folder.mkdir()

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)

    def commit(name: str, text: str) -> bool:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        git("add", ".")
        git("commit", "-m", name)
        script = f"set -euo pipefail\n{decision_of_ci()}\nif has_vllm_changed; then exit 7; fi"
        done = subprocess.run(["bash", "-c", script], cwd=folder, check=False)
        assert done.returncode in (0, 7)
        return done.returncode == 7

    git("init")
    assert commit("README.md", "one"), "there is nothing to compare with"
    assert not commit("README.md", "two")
    assert commit("oppo_kit/backends/vllm_engine.py", "one")
    assert not commit("README.md", "three")
    assert commit("tests/contract/test_anything.py", "one")
    git("clone", str(folder), str(tmp_path / "clone"))
    folder = tmp_path / "clone"
    assert not commit("README.md", "four"), "a branch of its own, compared with the one that it left"
    assert commit("constraints-vllm.txt", "one")
    assert commit("README.md", "five"), "the branch still changes it"
