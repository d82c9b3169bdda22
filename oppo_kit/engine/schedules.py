"""How many groups are in the air and which are trained next. Selection never looks at scores.

Order of preference: groups that are due, then those queued before this step, then those that ended in it, each by
(end tick, draw id). The chosen B come back sorted by draw id, so that row order does not depend on the schedule.

Age bound. A group whose first token has version f must be trained by version f + max_age. Looking only at groups
that are at the bound is not enough: with Δ > B more than B of one cohort could reach it together. So for every
slack k the groups due within k more steps may be at most B × k after this step; what exceeds that is due now.
Since held ≤ B + Δ ≤ B × (max_age + 1), the excess never exceeds B, and the bound always holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from oppo_kit.config import OverlapConfig
from oppo_kit.protocols import Schedule
from oppo_kit.types import Group


class SequentialSchedule:
    """B groups at a time, all of them decoded to their end before any is trained."""

    name = "sequential"
    delta = 0
    max_age = 0

    def num_to_admit(self, num_held: int, batch_size: int, num_undrawn: int) -> int:
        """Fill up to B."""
        return max(0, min(batch_size - num_held, num_undrawn))

    def select(self, groups: Sequence[Group], batch_size: int, version: int, step: int) -> list[Group] | None:  # noqa: ARG002
        """All B once the last one has ended."""
        if len(groups) < batch_size or not all(group.is_ended for group in groups):
            return None
        return sorted(groups, key=lambda group: group.draw_id)[:batch_size]


class OvercommitSchedule:
    """B + Δ groups in the air; the first B that end are trained, the rest go on (the paper's inter-step overlap)."""

    name = "oppo"

    def __init__(self, *, delta: int, max_age: int) -> None:
        self.delta = delta
        self.max_age = max_age

    def num_to_admit(self, num_held: int, batch_size: int, num_undrawn: int) -> int:
        """Fill up to B + Δ, as far as draws are left: the tail drains by itself."""
        return max(0, min(batch_size + self.delta - num_held, num_undrawn))

    def select(self, groups: Sequence[Group], batch_size: int, version: int, step: int) -> list[Group] | None:
        """The first B ended groups that leave no future step with more than B due, or None."""
        queue = sorted(
            (group for group in groups if group.is_ended),
            key=lambda group: (group.ended_step == step, group.end_tick, group.draw_id),
        )
        if len(queue) < batch_size:
            return None
        chosen: list[Group] = []
        for slack in range(self.max_age + 1):
            cohort = {group.draw_id for group in groups if self._slack(group, version) <= slack}
            num_due = len(cohort) - batch_size * slack - sum(group.draw_id in cohort for group in chosen)
            if num_due <= 0:
                continue
            taken = {group.draw_id for group in chosen}
            candidates = [g for g in queue if g.draw_id in cohort and g.draw_id not in taken]
            if len(candidates) < num_due:
                return None
            chosen += candidates[:num_due]
        taken = {group.draw_id for group in chosen}
        chosen += [group for group in queue if group.draw_id not in taken][: batch_size - len(chosen)]
        return sorted(chosen, key=lambda group: group.draw_id)

    def _slack(self, group: Group, version: int) -> int:
        """Updates that may still pass before the group must be trained."""
        return self.max_age - group.age(version)


def create_schedule(config: OverlapConfig) -> Schedule:
    """The schedule that a config names."""
    if config.schedule == "sequential":
        return SequentialSchedule()
    return OvercommitSchedule(delta=config.delta, max_age=config.max_age)
