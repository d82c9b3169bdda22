"""Runs a scorer in the engine's own thread, at the moment of the call: nothing overlaps, everything is in order."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from oppo_kit.placement.worker import as_failure, outcome_of, settle
from oppo_kit.protocols import CallPer, Clock, Scorer, StreamingScorer
from oppo_kit.telemetry.clock import MonotonicClock
from oppo_kit.telemetry.spans import SpanLog
from oppo_kit.types import Rollout, RolloutKey, Score, Span


class InlinePlacement:
    """A scorer whose futures are done when ``submit`` returns."""

    def __init__(self, scorer: Scorer, *, clock: Clock | None = None) -> None:
        self.name = scorer.name
        self.call_per: CallPer = getattr(scorer, "call_per", "response")
        self.follows_weights: bool = getattr(scorer, "follows_weights", False)
        self.can_stream = isinstance(scorer, StreamingScorer)
        self._scorer: Any = scorer
        self._clock = clock or MonotonicClock()
        self._spans = SpanLog()

    def submit(self, rollouts: Sequence[Rollout]) -> list[Future[Score | None]]:
        """Score now; whatever the scorer raises becomes the futures' exception."""
        futures: list[Future[Score | None]] = [Future() for _ in rollouts]
        start_s, before = self._clock.now_s(), self._num_tokens_read
        outcome = outcome_of(self._scorer, rollouts)
        if isinstance(outcome, Exception) and isinstance(outcome.__cause__, KeyboardInterrupt):
            raise outcome.__cause__  # of the user, in whose thread this runs
        self._record("score", start_s, before)
        settle(futures, outcome)
        return futures

    def feed(self, rollouts: Sequence[Rollout]) -> None:
        """Prefill now; an error is the caller's."""
        start_s, before = self._clock.now_s(), self._num_tokens_read
        try:
            self._scorer.feed(rollouts)
        except SystemExit as error:  # would end the training as if it were complete
            raise as_failure(self.name, error) from error
        self._record("feed", start_s, before)

    @property
    def is_busy(self) -> bool:
        """Never between two calls."""
        return False

    def set_awaited(self, is_awaited: bool) -> None:
        """Everything is done when a call returns."""

    def forget(self, keys: Sequence[RolloutKey] | None) -> None:
        """Drop what was fed of these, or of all."""
        if self.can_stream:
            self._scorer.forget(keys)

    def check(self) -> None:
        """Nothing fails unheard here."""

    def take_spans(self) -> list[Span]:
        """What was done since the last call."""
        return self._spans.take()

    def close(self) -> None:
        """Nothing is held."""

    @property
    def _num_tokens_read(self) -> int:
        return getattr(self._scorer, "num_tokens_read", 0)

    def _record(self, kind: str, start_s: float, tokens_before: int) -> None:
        num_tokens = self._num_tokens_read - tokens_before
        self._spans.add(
            Span("inline scorers", f"{kind} {self.name}", start_s, self._clock.now_s(), num_tokens)
        )
