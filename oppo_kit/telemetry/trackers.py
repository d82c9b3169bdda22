"""Experiment trackers (tensorboard, wandb, trackio, …) by accelerate's own code.

The accelerator needs ``project_dir`` for the trackers that write files, and no ``log_with``: accelerate
passes over a tracker whose package is missing, here that is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oppo_kit.errors import ConfigError, MissingExtraError, UnknownNameError

if TYPE_CHECKING:
    from accelerate import Accelerator

# What `pip install 'oppo-kit[trackers]'` brings; other packages are installed by their own names.
_IN_EXTRA = frozenset({"tensorboard"})


class Trackers:
    """The open trackers of one run; made by ``open_trackers``. All methods act on the main process only."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the numbers of one step to every tracker."""
        self._accelerator.log(dict(metrics), step=step)

    def close(self) -> None:
        """Flush and close; a second call does nothing. Leaves the accelerator usable."""
        trackers, self._accelerator.trackers = self._accelerator.trackers, []
        for tracker in trackers:
            tracker.finish()


def open_trackers(
    accelerator: Accelerator, names: Sequence[str], project: str, config: Mapping[str, Any]
) -> Trackers:
    """Start the named trackers.

    Args:
        accelerator: the learner's; gains the trackers.
        names: of accelerate's trackers; none is fine.
        project: name of the project, and of the folder below ``project_dir`` for trackers that write files.
        config: settings to store with the run; nested ones become ``a.b``, what is no primitive becomes text.

    Raises:
        UnknownNameError: accelerate has no such tracker.
        MissingExtraError: the package is missing and the extra ``trackers`` brings it.
        ConfigError: another package is missing, or a tracker writes files and there is no ``project_dir``.
    """
    from accelerate import tracking

    for name in names:
        _check(tracking, name, has_directory=accelerator.logging_dir is not None)
    accelerator.log_with = tracking.filter_trackers(list(names), accelerator.logging_dir)
    accelerator.init_trackers(project, config=_flatten(config))
    return Trackers(accelerator)


def _check(tracking: Any, name: str, *, has_directory: bool) -> None:
    if name not in tracking.LOGGER_TYPE_TO_CLASS:
        raise UnknownNameError("tracker", name, tracking.LOGGER_TYPE_TO_CLASS)
    if name not in {str(available) for available in tracking.get_available_trackers()}:
        if name in _IN_EXTRA:
            raise MissingExtraError(name, "trackers")
        package = name.replace("_", "-")
        raise ConfigError(
            f"tracker {name!r} needs a package that is not installed; run: pip install {package}"
        )
    if tracking.LOGGER_TYPE_TO_CLASS[name].requires_logging_directory and not has_directory:
        raise ConfigError(
            f"tracker {name!r} writes files, but the accelerator has no folder; give it a project_dir"
        )


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    flat: dict[str, bool | int | float | str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat
