"""Finds algorithms by entry point; the built-in ones have no privilege over a third party's.

Only the named algorithm is loaded; listing names loads none.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from oppo_kit.algorithm import AlgorithmBase
from oppo_kit.config import parse_config
from oppo_kit.errors import ConfigError, UnknownNameError

ALGORITHM_GROUP = "oppo_kit.algorithms"


def algorithm_names() -> list[str]:
    """Names of all installed algorithms, sorted; none of them is imported."""
    return sorted(_entry_points())


def load_algorithm_class(name: str) -> type[AlgorithmBase]:
    """The class behind a name.

    Raises:
        UnknownNameError: nobody registered it.
        ConfigError: its package cannot be imported, or it is no AlgorithmBase.
    """
    points = _entry_points()
    if name not in points:
        raise UnknownNameError("algorithm", name, points)
    point = points[name]
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"algorithm {name!r} ({point.value}) cannot be loaded: {error}; reinstall its package"
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, AlgorithmBase)):
        raise ConfigError(f"algorithm {name!r} ({point.value}) is not a subclass of oppo_kit.AlgorithmBase")
    return loaded


def create_algorithm(name: str, settings: Mapping[str, Any]) -> AlgorithmBase:
    """Load an algorithm and validate its settings.

    Raises:
        UnknownNameError: nobody registered it.
        ConfigError: a setting is unknown or out of range.
    """
    algorithm_class = load_algorithm_class(name)
    config = parse_config(algorithm_class.config_class, settings, source=f"algo_config of {name}")
    return algorithm_class(config)


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ALGORITHM_GROUP)}
