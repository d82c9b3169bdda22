"""``make gpu-bundle``: collects the wheels that the check needs beside PyTorch, transformers and accelerate.

Versions and hashes are those of ``requirements.lock``. Wheels with compiled parts fit one version of Python on x86-64
Linux. What no import of the check touches is cut out of the two largest ones, so that the folder can be carried along
where little can be.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from harness.environment import describe_environment
from harness.folders import make_folder, write_atomically
from harness.gpu_check.start import MANIFEST_NAME, ROOT
from oppo_kit.errors import ConfigError, DataError, OppoError

LIMIT_BYTES = 55 * 2**20
DEFAULT_PYTHON = "3.12"

# What oppo_kit, the harness and TRL's PPOTrainer import beyond what PyTorch, transformers and accelerate bring.
PACKAGES = (
    "annotated-types",
    "datasets",
    "dill",
    "multiprocess",
    "nvidia-ml-py",
    "pandas",
    "peft",
    "psutil",
    "pyarrow",
    "pydantic",
    "pydantic-core",
    "python-dateutil",
    "trl",
    "typing-extensions",
    "typing-inspection",
    "xxhash",
)

# Nothing of this is imported by ``datasets`` when a data set is made of a dictionary. Licences stay.
UNUSED = {
    "pyarrow": (
        "pyarrow/tests/*",
        "pyarrow/include/*",
        "pyarrow/includes/*",
        "pyarrow/src/*",
        "pyarrow/*.pyx",
        "pyarrow/*.pxi",
        "pyarrow/*.pxd",
        "pyarrow/*flight*",
        "pyarrow/*s3*",
        "pyarrow/_pyarrow_cpp_tests*",
        # The same file under three names; the loader asks for the middle one.
        "pyarrow/libarrow_python*.so",
        "pyarrow/libarrow_python*.so.*.*.*",
    ),
    "pandas": ("pandas/tests/*",),
}

# pip takes a platform literally, so every age of the C library that a wheel may be built for is named.
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect, cut and count."""
    parser = argparse.ArgumentParser(prog="python -m harness.gpu_check.bundle", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-bundle"), help="folder for the wheels")
    parser.add_argument(
        "--python", default=DEFAULT_PYTHON, help=f"version on the GPU's machine ({DEFAULT_PYTHON})"
    )
    options = parser.parse_args(arguments)
    try:
        total = make_bundle(options.out, options.python)
    except OppoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{total / 2**20:.1f} MiB of wheels for Python {options.python} in {options.out}; carry it along")
    return 0


def make_bundle(folder: Path, python: str, *, limit_bytes: int = LIMIT_BYTES) -> int:
    """Fill the folder; returns its bytes.

    Raises:
        ConfigError: wheels cannot be had, or are too large.
        DataError: the lock lacks a package.
    """
    make_folder(folder)
    for old in [*folder.glob("*.whl"), folder / MANIFEST_NAME]:
        old.unlink(missing_ok=True)
    _download(folder, python, locked_requirements((ROOT / "requirements.lock").read_text(), PACKAGES))
    for name, patterns in UNUSED.items():
        for wheel in folder.glob(f"{name}-*.whl"):
            cut_wheel(wheel, patterns)
    sizes = {wheel.name: wheel.stat().st_size for wheel in sorted(folder.glob("*.whl"))}
    total = check_size(sizes, limit_bytes)
    environment = describe_environment()
    manifest = {
        "python": python,
        "commit": environment.commit,
        "is_dirty": environment.is_dirty,
        "total_bytes": total,
        "wheels": sizes,
    }
    write_atomically(folder / MANIFEST_NAME, json.dumps(manifest, indent=1))
    return total


def locked_requirements(lock: str, names: Sequence[str]) -> str:
    """The blocks of a lock file that pin these packages, hashes included.

    Raises:
        DataError: it has none for one of them.
    """
    blocks: dict[str, list[str]] = {}
    block: list[str] = []
    for line in lock.splitlines():
        if line[:1].isalnum():
            block = blocks.setdefault(line.partition("==")[0], [])
        block.append(line)
    missing = sorted(set(names) - set(blocks))
    if missing:
        raise DataError(f"requirements.lock has no {', '.join(missing)}; run `make lock`")
    return "\n".join(line for name in names for line in blocks[name]) + "\n"


def cut_wheel(wheel: Path, patterns: Sequence[str]) -> None:
    """Rewrite a wheel without the matching files, and its list of files accordingly."""
    cut = wheel.with_suffix(".cut")
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(cut, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as to,
    ):
        for item in source.infolist():
            if _matches(item.filename, patterns):
                continue
            content = source.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                content = _kept_records(content.decode(), patterns).encode()
            to.writestr(item, content, zipfile.ZIP_DEFLATED, 9)
    cut.replace(wheel)


def check_size(sizes: dict[str, int], limit_bytes: int) -> int:
    """The bytes of all wheels.

    Raises:
        ConfigError: more than can be carried.
    """
    total = sum(sizes.values())
    if total > limit_bytes:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        listed = ", ".join(f"{name} {sizes[name] / 2**20:.1f} MiB" for name in largest)
        raise ConfigError(
            f"the wheels take {total / 2**20:.1f} MiB, and {limit_bytes / 2**20:.0f} are allowed; largest: {listed}; "
            "add to UNUSED in harness/gpu_check/bundle.py what is not imported"
        )
    return total


def _download(folder: Path, python: str, requirements: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(requirements)
        file.flush()
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        command += ["--no-deps", "--require-hashes", "--only-binary=:all:", "--implementation", "cp"]
        command += ["--python-version", python, "--dest", str(folder), "--requirement", file.name]
        for platform in _PLATFORMS:
            command += ["--platform", platform]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(
            f"pip could not get the wheels for Python {python} on x86-64 Linux; is the version right, and is there a "
            f"network? It said:\n{done.stderr.strip()}"
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _kept_records(records: str, patterns: Sequence[str]) -> str:
    kept = io.StringIO()
    rows = csv.reader(io.StringIO(records))
    csv.writer(kept, lineterminator="\n").writerows(
        row for row in rows if row and not _matches(row[0], patterns)
    )
    return kept.getvalue()


if __name__ == "__main__":
    sys.exit(main())
