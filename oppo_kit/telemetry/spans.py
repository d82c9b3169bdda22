"""The timeline of a step, as its parts write it. Knows no part."""

from __future__ import annotations

import threading

from oppo_kit.types import Span

ACTOR_LANE = "actor"
"""The lane of the engine's own thread; all others are of scorers."""


class SpanLog:
    """Spans that any thread adds and one reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []

    def add(self, *spans: Span) -> None:
        """Something was done."""
        with self._lock:
            self._spans += spans

    def take(self) -> list[Span]:
        """What was added since the last call."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans
