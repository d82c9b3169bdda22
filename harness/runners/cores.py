"""Which CPU cores the actor and the scorers have where the placement splits them."""

from __future__ import annotations

import os

from oppo_kit.errors import ConfigError


def actor_core() -> int:
    """The first core that this process may use."""
    return _two_cores()[0]


def scorer_core() -> int:
    """The second one; asked for before the actor is pinned, or by the core it is pinned to."""
    return _two_cores()[1]


def check_can_split() -> None:
    """Whether there are two cores to split.

    Raises:
        ConfigError: there are not, or this system cannot pin processes.
    """
    _two_cores()


def pin_to(core: int) -> None:
    """This thread, and those that it starts."""
    os.sched_setaffinity(0, {core})


def _two_cores() -> tuple[int, int]:
    # Not what this process is pinned to: the actor is, and asks for the other core.
    cores = list(range(os.cpu_count() or 1)) if hasattr(os, "sched_setaffinity") else []
    if len(cores) < 2:
        raise ConfigError(
            f"placement 'split' needs two cores that a process can be pinned to, and there are {len(cores)}; "
            "use placement 'shared'"
        )
    return cores[0], cores[1]
