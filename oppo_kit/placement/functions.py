"""Python rewards in a pool of threads: a slow one holds its own group, not the others.

Waits for: submissions. Unblocked by: ``submit``. With ``call_per`` response every response is a call of its own, with
group every group, so a function may run in several threads at once; with batch a submission is one call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from oppo_kit.placement.worker import CLOSE_S, begin, closed_error, outcome_of, settle
from oppo_kit.protocols import CallPer, Clock, Scorer
from oppo_kit.telemetry.clock import MonotonicClock
from oppo_kit.telemetry.spans import SpanLog
from oppo_kit.types import Rollout, RolloutKey, Score, Span

_Call = tuple[Sequence[Rollout], Sequence[Future[Score | None]]]


class FunctionPlacement:
    """A scorer without state in ``num_workers`` threads, which end with the interpreter if not before.

    Args:
        scorer: called by several threads at once.
        num_workers: calls at once; those of judges and sandboxes wait most of their time, so there may be many.
        clock: monotonic seconds.
    """

    follows_weights = False
    can_stream = False

    def __init__(self, scorer: Scorer, *, num_workers: int = 32, clock: Clock | None = None) -> None:
        self.name = scorer.name
        self.call_per: CallPer = getattr(scorer, "call_per", "response")
        self._scorer = scorer
        self._clock = clock or MonotonicClock()
        self._lock = threading.Lock()
        self._is_closed = False
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._spans = SpanLog()
        self._futures: set[Future[Score | None]] = set()
        # Not of an executor, whose threads would keep the interpreter until a call that hangs has ended.
        self._threads = [
            threading.Thread(target=self._serve, name=f"oppo-{scorer.name}-{index}", daemon=True)
            for index in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, rollouts: Sequence[Rollout]) -> list[Future[Score | None]]:
        """Queue ended rollouts."""
        futures: list[Future[Score | None]] = [Future() for _ in rollouts]
        with self._lock:
            if self._is_closed:
                raise closed_error(self.name)
            self._futures.update(futures)
        for indices in self._split(rollouts):
            self._calls.put(([rollouts[index] for index in indices], [futures[index] for index in indices]))
        return futures

    @property
    def is_busy(self) -> bool:
        """Never: most functions wait for a judge or a sandbox, and decoding at full speed does not hold them up."""
        return False

    def feed(self, rollouts: Sequence[Rollout]) -> None:
        """Functions see whole responses only."""

    def set_awaited(self, is_awaited: bool) -> None:
        """Functions use what threads they like."""

    def forget(self, keys: Sequence[RolloutKey] | None) -> None:
        """Nothing is kept."""

    def check(self) -> None:
        """Every failure is a future's exception."""

    def take_spans(self) -> list[Span]:
        """What was done since the last call."""
        return self._spans.take()

    def close(self) -> None:
        """Cancel what has not begun and wait some seconds for what runs; safe to call twice."""
        with self._lock:
            self._is_closed = True
            futures = list(self._futures)
        for future in futures:
            future.cancel()
        for _ in self._threads:
            self._calls.put(None)
        end_s = self._clock.now_s() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - self._clock.now_s()))

    def _split(self, rollouts: Sequence[Rollout]) -> list[list[int]]:
        """What each call of the scorer holds."""
        if self.call_per == "batch":
            return [list(range(len(rollouts)))]
        calls: dict[object, list[int]] = {}
        for index, rollout in enumerate(rollouts):
            calls.setdefault(index if self.call_per == "response" else rollout.key.draw_id, []).append(index)
        return list(calls.values())

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            self._work(*call)

    def _work(self, rollouts: Sequence[Rollout], futures: Sequence[Future[Score | None]]) -> None:
        if begin(futures):
            start_s = self._clock.now_s()
            outcome = outcome_of(self._scorer, rollouts)
            self._spans.add(Span("reward functions", f"score {self.name}", start_s, self._clock.now_s()))
            settle(futures, outcome)
        with self._lock:
            self._futures.difference_update(futures)
