"""What the buffer refuses; its accounting is proven by the laws."""

from __future__ import annotations

import pytest

from oppo_kit.engine.buffer import OvercommitBuffer
from oppo_kit.errors import StateError
from oppo_kit.types import Group, Prompt, Rollout, RolloutKey, TokenChunk


def make_group(draw_id: int, group_size: int = 2) -> Group:
    prompt = Prompt(draw_id, (1,), 5)
    return Group(
        prompt, [Rollout(RolloutKey(draw_id, i), prompt) for i in range(group_size)], admitted_step=0
    )


def test_draw_ids_rise_by_one() -> None:
    buffer = OvercommitBuffer()
    buffer.add(make_group(0))
    with pytest.raises(StateError, match="draw 2 was added after 1 draws; draw ids rise by one"):
        buffer.add(make_group(2))


def test_a_group_ends_with_its_last_response_and_at_its_tick() -> None:
    buffer = OvercommitBuffer()
    buffer.add(make_group(0))
    ended = buffer.apply([TokenChunk(RolloutKey(0, 0), [3], [-1.0], 0, 1, "stop")], base_tick=10, step=0)
    assert ([rollout.key for rollout in ended.rollouts], ended.groups) == ([RolloutKey(0, 0)], [])
    assert (buffer.num_in_flight, buffer.num_queued) == (1, 0)
    [_], [group] = buffer.apply(
        [TokenChunk(RolloutKey(0, 1), [3, 3], [-1.0] * 2, 0, 2, "stop")], base_tick=14, step=1
    )
    assert (group.end_tick, group.ended_step) == (16, 1)
    assert (buffer.num_in_flight, buffer.num_queued) == (0, 1)


def test_a_group_leaves_once() -> None:
    buffer = OvercommitBuffer()
    buffer.add(make_group(0))
    assert buffer.reject(buffer.groups[0], "why") == [RolloutKey(0, 0), RolloutKey(0, 1)]
    assert buffer.live_rollouts == []
    with pytest.raises(StateError, match="draw 0 is not held; it was trained or rejected before"):
        buffer.take_trained([make_group(0)])
