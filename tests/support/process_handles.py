"""Scorers in a child process, for tests."""

from __future__ import annotations

from typing import Any

from oppo_kit.placement.process import ProcessPlacement, place_in_process
from oppo_kit.types import Rollout, Score

WAIT_S = 60.0
Handles = dict[str, ProcessPlacement]


def placed(*scorers: Any, **options: Any) -> Handles:
    """Several scorers in one child."""
    return place_in_process({scorer.name: scorer for scorer in scorers}, **options)


def results(handle: ProcessPlacement, *rollouts: Rollout) -> list[Score | None]:
    """Their scores, in order."""
    return [future.result(WAIT_S) for future in handle.submit(rollouts)]
