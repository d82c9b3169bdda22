"""Which CPU cores the actor and the scorers have where the placement splits them."""

from __future__ import annotations

import os
from typing import Literal

from oppo_kit.errors import ConfigError

Placement = Literal["shared", "split"]


def split_cores(placement: Placement) -> tuple[int, int] | None:
    """The actor's core and the scorers', of those that this process may use; None where both may use all.

    Raises:
        ConfigError: split, and there are not two that a process can be pinned to.
    """
    if placement == "shared":
        return None
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(usable) < 2:
        raise ConfigError(
            f"placement 'split' pins actor and scorers to a core each, and this machine offers {len(usable)} to pin "
            "to; 2 are needed: use placement 'shared'"
        )
    return usable[0], usable[1]
