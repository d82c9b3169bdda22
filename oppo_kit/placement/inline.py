"""Runs a scorer in the engine's own thread, at the moment of submission."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from oppo_kit.protocols import Scorer
from oppo_kit.types import Rollout, Score


class InlinePlacement:
    """A scorer whose future is done when ``submit`` returns."""

    def __init__(self, scorer: Scorer) -> None:
        self.name = scorer.name
        self._scorer = scorer

    def submit(self, rollouts: Sequence[Rollout]) -> Future[list[Score | None]]:
        """Score now; whatever the scorer raises becomes the future's exception."""
        future: Future[list[Score | None]] = Future()
        try:
            future.set_result(self._scorer.score(rollouts))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Nothing is held."""
