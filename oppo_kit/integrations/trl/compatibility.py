"""Which TRL this works with, asked of TRL itself: its version, and the methods that are overridden or called.

A trainer that changed below us must not train silently by its own way, so what does not fit is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module

from packaging.version import InvalidVersion, Version

from oppo_kit.errors import ConfigError, MissingExtraError

FIRST, LAST = (1, 12), (1, 16)


def require_trl() -> None:
    """A supported TRL is installed.

    Raises:
        MissingExtraError: none is.
        ConfigError: another version is.
    """
    try:
        installed = str(import_module("trl").__version__)
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        raise MissingExtraError("trl", "trl") from error
    if not is_supported(installed):
        raise ConfigError(
            f"trl {installed} is installed; the overlapping trainers work with trl {_name(FIRST)} to {_name(LAST)}: "
            "pip install 'oppo-kit[trl]'"
        )


def is_supported(version: str) -> bool:
    """Whether a version of TRL is one that the trainers were tested with."""
    try:
        release = Version(version).release
    except InvalidVersion:
        return False
    return FIRST <= release[:2] <= LAST


def require_methods(owner: type, methods: Mapping[str, Sequence[str]]) -> None:
    """A class has these methods, whose parameters begin so.

    Args:
        owner: a trainer of TRL.
        methods: the names of the leading parameters behind ``self``, by method.

    Raises:
        ConfigError: naming the first that is gone, or whose parameters are others.
    """
    for name, expected in methods.items():
        method = getattr(owner, name, None)
        if method is None:
            raise _changed(owner, f"it has no method {name!r}")
        found = list(inspect.signature(method).parameters)[1:]
        if found[: len(expected)] != list(expected):
            raise _changed(owner, f"{name!r} takes {found}, not {list(expected)} first")


def require_word(owner: type, method: str, word: str) -> None:
    """A method mentions a key of its input, so that what is put there is read.

    Raises:
        ConfigError: it does not.
    """
    if word not in inspect.unwrap(getattr(owner, method)).__code__.co_consts:
        raise _changed(owner, f"{method!r} does not read {word!r}")


def require_attributes(trainer: object, names: Iterable[str]) -> None:
    """A built trainer has these attributes.

    Raises:
        ConfigError: naming those that it lacks.
    """
    missing = sorted(name for name in names if not hasattr(trainer, name))
    if missing:
        raise _changed(type(trainer), f"it has no attribute {', '.join(map(repr, missing))}")


def _changed(owner: type, what: str) -> ConfigError:
    return ConfigError(
        f"{owner.__module__}.{owner.__name__} is not the trainer that overlap was written for: {what}; install a "
        f"released trl {_name(FIRST)} to {_name(LAST)}, and override none of these methods"
    )


def _name(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
