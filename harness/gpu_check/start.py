"""``make gpu-check``: adds the carried wheels to a Python that has PyTorch, and starts the check in it.

Standard library only, since nothing else is sure to be there. The wheels go into a folder of their own in front of
Python's packages; those are left as they are. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
MANIFEST_NAME = "bundle.json"
COMMIT_VARIABLE = "OPPO_KIT_BUNDLE_COMMIT"
# dill, which ``datasets`` hashes with, takes modules for installed ones only below a folder of this name.
_SITE_NAME = "site-packages"
_NEEDED = {"torch": (2, 11), "transformers": (5, 17), "accelerate": (1, 10)}


class StartError(Exception):
    """The check cannot begin; says what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare, then become the check."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.gpu_check.start", description=__doc__, epilog="More options are the check's."
    )
    parser.add_argument("--bundle", type=Path, default=ROOT / "build" / "gpu-bundle", help="folder of wheels")
    parser.add_argument(
        "--site", type=Path, default=ROOT / "build" / "gpu-site", help="where they are installed"
    )
    options, rest = parser.parse_known_args(arguments)
    site = options.site.resolve() / _SITE_NAME
    try:
        manifest = read_manifest(options.bundle)
        check_python(manifest, sys.version_info[:2])
        check_packages()
        install(options.bundle, site)
        write_metadata(site)
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    paths = [str(ROOT), str(site), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    if manifest["commit"] is not None:
        environment[COMMIT_VARIABLE] = manifest["commit"]
    command = [sys.executable, "-m", "harness.gpu_check", *rest]
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)


def read_manifest(bundle: Path) -> dict:
    """What the bundle says about itself.

    Raises:
        StartError: there is none.
    """
    file = bundle / MANIFEST_NAME
    if not file.is_file():
        raise StartError(
            f"no wheels in {bundle}; collect them with `make gpu-bundle` on a machine with a network and carry the "
            "folder along, or run `python -m harness.gpu_check` where oppo-kit[baseline] is installed"
        )
    return json.loads(file.read_text())


def check_python(manifest: dict, version: tuple[int, ...]) -> None:
    """Compiled wheels fit one version of Python.

    Raises:
        StartError: not this one.
    """
    here = ".".join(map(str, version))
    if manifest["python"] != here:
        raise StartError(
            f"the wheels are for Python {manifest['python']}, and {sys.executable} is Python {here}; collect them anew "
            f"with `make gpu-bundle GPU_PYTHON={here}`, or name another interpreter with PYTHON="
        )


def check_packages() -> None:
    """What the bundle does not hold.

    Raises:
        StartError: it is missing or too old here.
    """
    for name, least in _NEEDED.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "missing"
        numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
        if numbers < least:
            raise StartError(
                f"{name} is {found} in {sys.executable}, and the check needs {'.'.join(map(str, least))} or later; "
                "name an interpreter that has it with PYTHON="
            )


def install(bundle: Path, site: Path) -> None:
    """Unpack the wheels, by pip.

    Raises:
        StartError: pip refuses them or is missing.
    """
    wheels = sorted(map(str, bundle.glob("*.whl")))
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(site), *wheels]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StartError(f"pip could not install the wheels of {bundle}:\n{done.stderr.strip()}")


def write_metadata(site: Path) -> None:
    """Name, version and entry points of this checkout, which is run as it stands: algorithms are found by them."""
    import tomllib  # not in the Pythons that check_python is there to refuse

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
