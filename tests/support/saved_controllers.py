"""Two controllers that see the same: one lives on, the other is saved and loaded on the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def whole_and_resumed(
    create: Callable[[], Any], outcomes: Sequence[tuple[Any, ...]], cut: int
) -> Iterator[tuple[Any, Any]]:
    """Both after each outcome; the state goes through JSON before outcome ``cut``."""
    whole, resumed = create(), create()
    for step, outcome in enumerate(outcomes):
        if step == cut:
            state = json.loads(json.dumps(resumed.state_dict(), allow_nan=False))
            resumed = create()
            resumed.load_state_dict(state)
        for controller in (whole, resumed):
            controller.observe(*outcome)
        yield whole, resumed
