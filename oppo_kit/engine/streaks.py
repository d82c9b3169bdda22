"""What may go wrong once or twice, but must not go on: an accident is told in the report, a habit ends the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from oppo_kit.errors import NonFiniteError, PartFailedError
from oppo_kit.types import Group

# Fewer in a row can be bad luck with a reward that often abstains.
MIN_REJECTED_IN_A_ROW = 32
# One batch can be an accident; a run whose every batch is skipped must not end as a success.
MAX_SKIPPED_IN_A_ROW = 3


class RejectedGroups:
    """Groups that scoring rejected in a row, while one batch is collected."""

    def __init__(self, batch_size: int) -> None:
        self._limit = max(4 * batch_size, MIN_REJECTED_IN_A_ROW)
        self._settled: set[int] = set()
        self._num = 0

    def count(self, groups: Iterable[Group], rejections: Mapping[int, str]) -> None:
        """Count a round of scoring.

        Raises:
            PartFailedError: too many in a row.
        """
        # Groups that an earlier round accepted say nothing about what the scorers do now.
        fresh = {group.draw_id for group in groups} - self._settled
        self._settled |= fresh
        self._num = 0 if fresh - set(rejections) else self._num + len(rejections)
        if self._num >= self._limit:
            reasons = ", ".join(sorted(set(rejections.values())))
            raise PartFailedError(
                f"the last {self._num} groups were all rejected ({reasons}); "
                "the reward must return a finite number for some responses; check it on one by hand"
            )


class SkippedBatches:
    """Batches in a row whose loss was not finite."""

    def __init__(self) -> None:
        self._num = 0

    def reset(self) -> None:
        """One was trained."""
        self._num = 0

    def count(self, error: NonFiniteError) -> None:
        """Count one more.

        Raises:
            NonFiniteError: too many in a row.
        """
        self._num += 1
        if self._num >= MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteError(
                f"the loss was not finite in {self._num} steps in a row, so nothing is learned; "
                "lower the learning rate, and check the reward's scale and the critic"
            ) from error
