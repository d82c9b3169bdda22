"""Finds algorithms by entry point; the built-in ones have no privilege over a third party's.

Only the named algorithm is loaded; listing names loads none. A name that two packages register belongs to neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from oppo_kit.algorithm import AlgorithmBase, AlgorithmConfig
from oppo_kit.config import parse_config
from oppo_kit.errors import ConfigError, OppoError, UnknownNameError

ALGORITHM_GROUP = "oppo_kit.algorithms"


def algorithm_names() -> list[str]:
    """Names of all installed algorithms, sorted; none of them is imported."""
    return sorted(_entry_points())


def load_algorithm_class(name: str) -> type[AlgorithmBase]:
    """The class behind a name.

    Raises:
        UnknownNameError: nobody registered it.
        ConfigError: two packages did, or what is registered cannot be imported or is no complete AlgorithmBase.
    """
    points = _entry_points()
    if name not in points:
        raise UnknownNameError("algorithm", name, points)
    point = _only(name, points[name])
    try:
        loaded = point.load()
    except OppoError:
        raise
    except Exception as error:
        raise ConfigError(
            f"algorithm {name!r} of {_origin(point)} cannot be loaded: {type(error).__name__}: {error}; "
            "correct or reinstall that package"
        ) from error
    if fault := _fault(name, loaded):
        raise ConfigError(f"algorithm {name!r} of {_origin(point)} {fault}; correct that package")
    return loaded


def create_algorithm(name: str, settings: Mapping[str, Any]) -> AlgorithmBase:
    """Load an algorithm and validate its settings.

    Raises:
        UnknownNameError: nobody registered it.
        ConfigError: a setting is unknown or out of range, or the class fails on its settings.
    """
    algorithm_class = load_algorithm_class(name)
    try:
        config = parse_config(algorithm_class.config_class, settings, source=f"algo_config of {name}")
        algorithm = algorithm_class(config)
    except OppoError:
        raise
    except Exception as error:
        raise ConfigError(
            f"algorithm {name!r} ({algorithm_class.__module__}.{algorithm_class.__qualname__}) failed on its settings "
            f"{dict(settings)}: {type(error).__name__}: {error}; correct the settings or that package"
        ) from error
    if getattr(algorithm, "config", None) is None:
        raise ConfigError(
            f"algorithm {name!r} ({algorithm_class.__module__}.{algorithm_class.__qualname__}) has no config; "
            "its __init__ must call super().__init__(config)"
        )
    return algorithm


def _entry_points() -> dict[str, list[EntryPoint]]:
    """By name; the same distribution found twice on the search path counts once."""
    points: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ALGORITHM_GROUP):
        points.setdefault(point.name, []).append(point)
    return points


def _only(name: str, points: Sequence[EntryPoint]) -> EntryPoint:
    if len(points) > 1:
        raise ConfigError(
            f"algorithm {name!r} is registered by {' and '.join(sorted(map(_origin, points)))}; "
            "uninstall one of them, or give its algorithm another name"
        )
    return points[0]


def _origin(point: EntryPoint) -> str:
    package = "an unnamed package" if point.dist is None else f"package {point.dist.name!r}"
    return f"{package} ({point.value})"


def _fault(name: str, loaded: Any) -> str | None:
    """Why what an entry point names is no algorithm; None if it is one."""
    if not (isinstance(loaded, type) and issubclass(loaded, AlgorithmBase)):
        return "is not a subclass of oppo_kit.AlgorithmBase"
    if missing := sorted(getattr(loaded, "__abstractmethods__", ())):
        return f"has no {' and no '.join(missing)}"
    if getattr(loaded, "name", None) != name:
        return f"calls itself {getattr(loaded, 'name', None)!r}, where its entry point says {name!r}"
    if not (isinstance(loaded.config_class, type) and issubclass(loaded.config_class, AlgorithmConfig)):
        return "has a config_class that is not a subclass of oppo_kit.AlgorithmConfig"
    return None
