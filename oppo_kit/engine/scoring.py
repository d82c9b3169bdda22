"""Asks the scorers, waits for the scores of chosen groups, and says which groups cannot be trained.

Waits for: the futures of the placements. Unblocked by: a result, an exception or a death that the placement turns
into one. Knows nothing of how a scorer works or where it runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from oppo_kit.errors import OppoError, PartFailedError
from oppo_kit.protocols import ScorerHandle
from oppo_kit.types import Group, Rollout, Score

ABSTAINED = "abstained"
NON_FINITE_SCORE = "non_finite_score"
FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class _Submission:
    """Where the scores of one group's rollouts will be: rows ``rows`` of a future over ``num_rollouts``."""

    future: Future[list[Score | None]]
    num_rollouts: int
    rows: slice


class ScoringDesk:
    """One per engine. Every ended rollout is submitted once to every scorer, however often it is considered."""

    def __init__(self, handles: Mapping[str, ScorerHandle]) -> None:
        self._handles = dict(handles)
        self._pending: dict[tuple[int, str], _Submission] = {}

    def submit(self, groups: Sequence[Group]) -> None:
        """Start scoring those that are neither scored nor submitted; one call per scorer."""
        for name, handle in self._handles.items():
            todo = [g for g in groups if (g.draw_id, name) not in self._pending and not _has_score(g, name)]
            if not todo:
                continue
            rollouts = [rollout for group in todo for rollout in group.rollouts]
            future = handle.submit(rollouts)
            start = 0
            for group in todo:
                rows = slice(start, start + len(group.rollouts))
                self._pending[group.draw_id, name] = _Submission(future, len(rollouts), rows)
                start = rows.stop

    def settle(self, groups: Sequence[Group]) -> dict[int, str]:
        """Wait for all scores of these groups and store them; returns the rejected draws with their reason.

        Raises:
            PartFailedError: a scorer raised, died or returned something that does not fit its rollouts.
        """
        self.submit(groups)
        rejections: dict[int, str] = {}
        for group in groups:
            for name in self._handles:
                submission = self._pending.pop((group.draw_id, name), None)
                if submission is None:
                    continue
                reason = self._store(name, group, submission)
                if reason:
                    rejections.setdefault(group.draw_id, reason)
        return rejections

    def forget(self, group: Group) -> None:
        """Drop what is pending for a rejected group."""
        for name in self._handles:
            self._pending.pop((group.draw_id, name), None)

    def close(self) -> None:
        """Close every placement."""
        for handle in self._handles.values():
            handle.close()

    def _store(self, name: str, group: Group, submission: _Submission) -> str | None:
        try:
            scores = submission.future.result()
        except OppoError as error:
            error.add_note(f"raised by scorer {name!r} while draw {group.draw_id} waited for its score")
            raise
        except Exception as error:
            raise PartFailedError(
                f"scorer {name!r} failed while draw {group.draw_id} waited for its score: "
                f"{type(error).__name__}: {error}; the cause stands above"
            ) from error
        if len(scores) != submission.num_rollouts:
            raise PartFailedError(
                f"scorer {name!r} returned {len(scores)} scores for {submission.num_rollouts} rollouts; "
                "one each is needed"
            )
        reason = None
        for rollout, score in zip(group.rollouts, scores[submission.rows], strict=True):
            if score is None:
                reason = reason or f"{name}_{ABSTAINED}"
                continue
            rollout.scores[name] = _checked(name, rollout, score)
            if not _is_finite(score):
                reason = reason or NON_FINITE_SCORE
        return reason


def _has_score(group: Group, name: str) -> bool:
    return all(name in rollout.scores for rollout in group.rollouts)


def _checked(name: str, rollout: Rollout, score: Score) -> Score:
    if isinstance(score, list):
        if len(score) != len(rollout.token_ids):
            raise PartFailedError(
                f"scorer {name!r} returned {len(score)} numbers for draw {rollout.key.draw_id}, "
                f"whose response has {len(rollout.token_ids)} tokens"
            )
        return score
    return float(score)


def _is_finite(score: Score) -> bool:
    """Finite also as float32, which is what a batch is made of."""
    numbers = score if isinstance(score, list) else [score]
    return all(math.isfinite(number) and abs(number) <= FLOAT32_MAX for number in numbers)
