"""Runs a scorer in one worker thread, so that slow Python rewards overlap with decoding.

Waits for: submissions, first come first served. Unblocked by: ``submit``; ends with ``close``.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from oppo_kit.protocols import Scorer
from oppo_kit.types import Rollout, Score


class ThreadPlacement:
    """One thread, so the scorer is never used by two callers at once."""

    def __init__(self, scorer: Scorer) -> None:
        self.name = scorer.name
        self._scorer = scorer
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"oppo-{scorer.name}")

    def submit(self, rollouts: Sequence[Rollout]) -> Future[list[Score | None]]:
        """Queue the rollouts; the lists they hold are not changed after a response has ended."""
        return self._pool.submit(self._scorer.score, list(rollouts))

    def close(self) -> None:
        """Cancel what has not begun and wait for what runs."""
        self._pool.shutdown(wait=True, cancel_futures=True)
