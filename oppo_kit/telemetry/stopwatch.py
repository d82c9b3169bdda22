"""Splits the wall time of a step into its stages. Knows no stage by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from oppo_kit.protocols import Clock
from oppo_kit.telemetry.spans import ACTOR_LANE, SpanLog
from oppo_kit.types import Span


class Stopwatch:
    """Seconds of one step by stage; where stages nest, the inner one counts.

    Args:
        clock: monotonic seconds.
        stages: names; ``stop_step`` returns one ``<name>_s`` for each.
    """

    def __init__(self, clock: Clock, *, stages: Sequence[str]) -> None:
        self._clock = clock
        self._start_s: float | None = None
        self._seconds = dict.fromkeys(stages, 0.0)
        self._spans = SpanLog()

    def now_s(self) -> float:
        """The clock's reading."""
        return self._clock.now_s()

    def start_step(self) -> None:
        """Begin a step, which has nothing of what was measured between two; no effect inside one."""
        if self._start_s is None:
            self._spans.take()
            self._seconds = dict.fromkeys(self._seconds, 0.0)
            self._start_s = self._clock.now_s()

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the time of the block, less that of stages measured inside it, to a stage."""
        start_s, before_s = self._clock.now_s(), sum(self._seconds.values())
        try:
            yield
        finally:
            stop_s = self._clock.now_s()
            inner_s = sum(self._seconds.values()) - before_s
            self._seconds[stage] += stop_s - start_s - inner_s
            self._spans.add(Span(ACTOR_LANE, stage, start_s, stop_s))

    def add_since(self, stage: str, start_s: float) -> None:
        """Add the time since then, in which nothing was measured, to a stage."""
        stop_s = self._clock.now_s()
        self._seconds[stage] += stop_s - start_s
        self._spans.add(Span(ACTOR_LANE, stage, start_s, stop_s))

    def reset(self) -> None:
        """Drop what was measured of a step that is given up."""
        self.stop_step()
        self.take_spans()

    def take_spans(self) -> list[Span]:
        """The blocks that were measured since the last call, by their end."""
        return self._spans.take()

    def stop_step(self) -> dict[str, float]:
        """``step_s``, one ``<stage>_s`` each, and ``engine_s``, the rest; starts afresh."""
        now_s = self._clock.now_s()
        step_s = 0.0 if self._start_s is None else now_s - self._start_s
        times = {f"{stage}_s": seconds for stage, seconds in self._seconds.items()}
        self._start_s = None
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return {"step_s": step_s, **times, "engine_s": step_s - sum(times.values())}
