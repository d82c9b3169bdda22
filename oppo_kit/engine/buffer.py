"""Holds every group between its draw and its training, and keeps the conservation counts.

Knows nothing of models, scores or which group is trained next: that is the schedule's.

    add ─► in flight ─(last response ends)─► queued ─► take_trained
                 └──────────────┴─► reject(reason)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from oppo_kit.errors import StateError
from oppo_kit.types import Group, Rollout, RolloutKey, TokenChunk


class Ended(NamedTuple):
    """What ended by some chunks: responses, and the groups whose last response is among them, by draw id."""

    rollouts: list[Rollout]
    groups: list[Group]


class OvercommitBuffer:
    """At most B + Δ groups in flight or queued. drawn = trained + in flight + queued + rejected, always."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._live: dict[RolloutKey, Rollout] = {}
        self.num_drawn = 0
        self.num_trained = 0
        self.rejected: Counter[str] = Counter()

    def __len__(self) -> int:
        """Groups in flight or queued."""
        return len(self._groups)

    @property
    def groups(self) -> list[Group]:
        """All groups held, by draw id."""
        return list(self._groups.values())

    @property
    def num_in_flight(self) -> int:
        """Groups with at least one live response."""
        return sum(not group.is_ended for group in self._groups.values())

    @property
    def num_queued(self) -> int:
        """Ended groups that wait for their training."""
        return len(self) - self.num_in_flight

    @property
    def live_rollouts(self) -> list[Rollout]:
        """Responses that are still being decoded."""
        return list(self._live.values())

    def add(self, group: Group) -> None:
        """Take a freshly drawn group; draw ids rise by one, without gaps."""
        if group.draw_id != self.num_drawn:
            raise StateError(
                f"draw {group.draw_id} was added after {self.num_drawn} draws; draw ids rise by one"
            )
        self.num_drawn += 1
        self._insert(group)

    def apply(self, chunks: Iterable[TokenChunk], *, base_tick: int, step: int) -> Ended:
        """Append chunks to their rollouts; returns what ended by it.

        Raises:
            StateError: a chunk of a rollout that is not live, or that overruns its limit.
        """
        ended = Ended([], [])
        for chunk in chunks:
            rollout = self._live.get(chunk.key)
            if rollout is None:
                raise StateError(f"the generator returned tokens for {chunk.key}, which is not in flight")
            if len(chunk.token_ids) > rollout.remaining_tokens:
                raise StateError(
                    f"the generator returned {len(chunk.token_ids)} tokens for {chunk.key}, "
                    f"whose limit leaves {rollout.remaining_tokens}"
                )
            rollout.append(chunk, base_tick=base_tick)
            if rollout.is_ended:
                del self._live[chunk.key]
                ended.rollouts.append(rollout)
                group = self._groups[chunk.key.draw_id]
                if group.is_ended:
                    group.ended_step = step
                    ended.groups.append(group)
        ended.groups.sort(key=lambda group: group.draw_id)
        return ended

    def holds(self, groups: Sequence[Group]) -> bool:
        """Whether all of these are in flight or queued."""
        return all(self._groups.get(group.draw_id) is group for group in groups)

    def take_trained(self, groups: Sequence[Group]) -> None:
        """Remove groups whose update is done."""
        for group in groups:
            self._remove(group)
        self.num_trained += len(groups)

    def reject(self, group: Group, reason: str) -> list[RolloutKey]:
        """Remove a group that will never be trained; returns its live rollouts, for the generator to evict."""
        live = [rollout.key for rollout in group.rollouts if rollout.key in self._live]
        self._remove(group)
        self.rejected[reason] += 1
        return live

    def restore(
        self, groups: Sequence[Group], *, num_drawn: int, num_trained: int, rejected: dict[str, int]
    ) -> None:
        """Replace everything by a saved state; its counts must conserve."""
        total = num_trained + len(groups) + sum(rejected.values())
        if num_drawn != total:
            raise StateError(
                f"saved counts do not conserve: {num_drawn} drawn, but {num_trained} trained + {len(groups)} held "
                f"+ {sum(rejected.values())} rejected = {total}; the state is damaged"
            )
        self._groups, self._live = {}, {}
        self.num_drawn, self.num_trained, self.rejected = num_drawn, num_trained, Counter(rejected)
        for group in sorted(groups, key=lambda group: group.draw_id):
            self._insert(group)

    def _insert(self, group: Group) -> None:
        self._groups[group.draw_id] = group
        self._live.update({rollout.key: rollout for rollout in group.rollouts if not rollout.is_ended})

    def _remove(self, group: Group) -> None:
        if self._groups.pop(group.draw_id, None) is None:
            raise StateError(f"draw {group.draw_id} is not held; it was trained or rejected before")
        for rollout in group.rollouts:
            self._live.pop(rollout.key, None)
