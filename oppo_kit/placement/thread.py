"""Scorers in a thread beside the engine's. Whatever needs the interpreter in both at once shares it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import torch

from oppo_kit.placement.worker import ScoringWorker
from oppo_kit.protocols import CallPer, Clock, Scorer, StreamingScorer
from oppo_kit.types import Rollout, RolloutKey, Score, Span


class ThreadPlacement:
    """One scorer of a worker, under the worker's name for it; a worker of its own unless one is given."""

    def __init__(
        self, scorer: Scorer, worker: ScoringWorker | None = None, *, name: str | None = None
    ) -> None:
        self.name = name or scorer.name
        self.call_per: CallPer = getattr(scorer, "call_per", "response")
        self.follows_weights: bool = getattr(scorer, "follows_weights", False)
        self.can_stream = isinstance(scorer, StreamingScorer)
        self._worker = worker or ScoringWorker({scorer.name: scorer}, lane=f"{scorer.name} thread")

    @property
    def is_busy(self) -> bool:
        """Whether the thread works for any scorer."""
        return self._worker.is_busy

    def submit(self, rollouts: Sequence[Rollout]) -> list[Future[Score | None]]:
        """Queue ended rollouts."""
        return self._worker.submit(self.name, rollouts)

    def feed(self, rollouts: Sequence[Rollout]) -> None:
        """Queue snapshots of unfinished rollouts."""
        self._worker.feed(self.name, [rollout.snapshot() for rollout in rollouts])

    def set_awaited(self, is_awaited: bool) -> None:
        """Use the cores that the actor leaves."""
        self._worker.set_awaited(is_awaited)

    def forget(self, keys: Sequence[RolloutKey] | None) -> None:
        """Drop what was fed of these, or of all; waits for what runs."""
        self._worker.forget(self.name, keys)

    def check(self) -> None:
        """Raise what a feed raised."""
        self._worker.check()

    def take_spans(self) -> list[Span]:
        """What the worker did since anybody asked."""
        return self._worker.take_spans()

    def close(self) -> None:
        """Cancel what has not begun and wait some seconds for what runs."""
        self._worker.close()


def place_in_thread(
    scorers: Mapping[str, Scorer], *, num_threads: int | None = None, clock: Clock | None = None
) -> dict[str, ThreadPlacement]:
    """All of them in one thread: they would wait for each other's cores otherwise.

    With ``num_threads`` CPU threads; with as many as the caller has where somebody waits for the scores.
    """
    num_threads_awaited = None if num_threads is None else torch.get_num_threads()
    worker = ScoringWorker(
        scorers,
        lane="scorers",
        num_threads=num_threads,
        num_threads_awaited=num_threads_awaited,
        clock=clock,
    )
    return {name: ThreadPlacement(scorer, worker, name=name) for name, scorer in scorers.items()}
