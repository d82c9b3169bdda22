"""Is what Python imports as ``algorithms`` and ``harness`` really ours?

PyPI has unrelated packages of both names. Where one of them shadows or overwrites ours, nothing fails at once
and everything fails oddly, so the command looks before it starts. Knows the packages by name and place only:
imports neither of them.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import sys
from importlib import metadata
from pathlib import Path

from oppo_kit.errors import ConfigError

DISTRIBUTION = "oppo-kit"
PACKAGES = ("algorithms", "harness")


def check_installation() -> None:
    """Refuse to go on where a foreign package stands in for one of ours.

    Raises:
        ConfigError: ``algorithms`` or ``harness`` is missing, lies elsewhere than ``oppo_kit``, or was
            overwritten by another distribution. Names the place and, where known, the distribution.
    """
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None:
            raise ConfigError(
                f"the package {package!r} of {DISTRIBUTION} is not installed; "
                f"expected it in {_home()}. {_REMEDY}"
            )
        folder = _folder_of(spec.origin, spec.submodule_search_locations)
        if folder != _home() / package:
            raise ConfigError(
                f"the package {package!r} comes from {folder}{_owners_in_words(package)}, "
                f"not from {DISTRIBUTION} ({_home() / package}). {_REMEDY}"
            )
        if _is_overwritten(package) and _foreign_owners(package):
            raise ConfigError(
                f"the package {package!r} in {folder} was overwritten{_owners_in_words(package)}. {_REMEDY}"
            )


def main() -> None:
    """The ``oppo-kit`` command: checks the installation, then hands over to the command line in ``harness``.

    It stands here because a shadowed ``harness`` could not say what is wrong. The command line is found by
    entry point, since nothing in ``oppo_kit`` imports the layers above it.
    """
    try:
        check_installation()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    (command,) = metadata.distribution(DISTRIBUTION).entry_points.select(group="oppo_kit.commands")
    command.load()()


_REMEDY = (
    f"Install {DISTRIBUTION} into a fresh virtual environment "
    f"(python3 -m venv .venv && .venv/bin/pip install {DISTRIBUTION}) and run it from there."
)


def _home() -> Path:
    """The folder in which all our packages lie side by side."""
    return Path(__file__).resolve().parents[1]


def _folder_of(origin: str | None, search_locations: list[str] | None) -> Path:
    """The package's folder; a plain module ``harness.py`` is its own place."""
    place = search_locations[0] if search_locations else origin or "an unknown place"
    return Path(place).resolve()


def _is_overwritten(package: str) -> bool:
    """Whether the package's ``__init__`` is another than the one that our installer wrote.

    Editable installations record no hash; there nothing can be overwritten by an installer either.
    """
    try:
        files = metadata.files(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # run from the sources, never installed
        return False
    for file in files:
        if file.as_posix() == f"{package}/__init__.py" and file.hash is not None:
            digest = hashlib.new(file.hash.mode, Path(file.locate()).read_bytes()).digest()
            return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value
    return False


def _foreign_owners(package: str) -> list[str]:
    """Other distributions that claim the package; slow, since it reads every distribution's list of files."""
    owners = set(metadata.packages_distributions().get(package, []))
    return sorted(owner for owner in owners if owner.lower().replace("_", "-") != DISTRIBUTION)


def _owners_in_words(package: str) -> str:
    owners = _foreign_owners(package)
    return f" (distribution {', '.join(repr(owner) for owner in owners)})" if owners else ""
