"""Selection by hand: order of preference, age cap, cohorts that would come due together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_kit.config import OverlapConfig
from oppo_kit.engine.schedules import OvercommitSchedule, SequentialSchedule, create_schedule
from oppo_kit.types import Group, Prompt, Rollout, RolloutKey


def make_group(
    draw_id: int, *, end_tick: int | None = None, ended_step: int = 5, version: int | None = 5
) -> Group:
    """Ended at ``end_tick`` in ``ended_step``, or in flight; its first token has ``version``."""
    versions = [] if version is None else [version]
    rollout = Rollout(
        RolloutKey(draw_id, 0),
        Prompt(draw_id, (1,), 50),
        token_ids=[1] * len(versions),
        behaviour_logprobs=[-1.0] * len(versions),
        versions=versions,
        finish_reason=None if end_tick is None else "stop",
        end_tick=end_tick,
    )
    return Group(
        rollout.prompt, [rollout], admitted_step=0, ended_step=None if end_tick is None else ended_step
    )


def draws(groups: list[Group] | None) -> list[int] | None:
    return None if groups is None else [group.draw_id for group in groups]


def test_the_first_b_that_end_are_chosen_and_come_back_by_draw_id() -> None:
    groups = [make_group(0, end_tick=9), make_group(1), make_group(2, end_tick=3), make_group(3, end_tick=4)]
    schedule = OvercommitSchedule(delta=2, max_age=2)
    assert draws(schedule.select(groups, 2, version=5, step=5)) == [2, 3]
    assert draws(schedule.select(groups, 3, version=5, step=5)) == [0, 2, 3]
    assert schedule.select(groups, 4, version=5, step=5) is None


def test_equal_end_ticks_are_ordered_by_draw_id() -> None:
    groups = [make_group(3, end_tick=4), make_group(1, end_tick=4), make_group(2, end_tick=4)]
    assert draws(OvercommitSchedule(delta=1, max_age=2).select(groups, 2, 5, 5)) == [1, 2]


def test_those_queued_before_go_before_those_that_ended_in_this_step() -> None:
    """slime#2238: surplus ended groups are trained next, not thrown away."""
    groups = [
        make_group(0, end_tick=80, ended_step=5),
        make_group(1, end_tick=90, ended_step=4),
        make_group(2, end_tick=70),
    ]
    assert draws(OvercommitSchedule(delta=2, max_age=3).select(groups, 1, 5, 5)) == [1]
    assert draws(OvercommitSchedule(delta=2, max_age=3).select(groups, 2, 5, 5)) == [1, 2]


def test_the_step_waits_for_a_group_at_its_age_cap_instead_of_dropping_it() -> None:
    """tinker-cookbook#822."""
    waiting = [make_group(0, version=3), make_group(1, end_tick=1), make_group(2, end_tick=2)]
    schedule = OvercommitSchedule(delta=2, max_age=2)
    assert schedule.select(waiting, 1, version=5, step=5) is None
    ended = [make_group(0, version=3, end_tick=60), *waiting[1:]]
    assert draws(schedule.select(ended, 1, version=5, step=5)) == [0]


def test_a_cohort_larger_than_b_is_begun_before_it_is_due() -> None:
    """B = 2, max_age = 2: four groups of version 4 at version 5 would all be due at version 6; two must go now."""
    cohort = [make_group(draw, version=4) for draw in range(2)]
    cohort += [make_group(2, version=4, end_tick=50), make_group(3, version=4)]
    fresh = [make_group(4, end_tick=1), make_group(5, end_tick=2)]
    schedule = OvercommitSchedule(delta=4, max_age=2)
    assert schedule.select([*cohort, *fresh], 2, version=5, step=5) is None
    cohort[0] = make_group(0, version=4, end_tick=70)
    assert draws(schedule.select([*cohort, *fresh], 2, version=5, step=5)) == [0, 2]


def test_a_group_without_a_token_has_no_age() -> None:
    groups = [make_group(0, version=None), make_group(1, end_tick=3)]
    assert draws(OvercommitSchedule(delta=1, max_age=0).select(groups, 1, version=9, step=9)) is None
    assert draws(OvercommitSchedule(delta=1, max_age=1).select(groups, 1, version=5, step=9)) == [1]


def test_the_sequential_schedule_waits_for_all() -> None:
    schedule = SequentialSchedule()
    groups = [make_group(1, end_tick=9), make_group(0)]
    assert schedule.select(groups, 2, 5, 5) is None
    groups[1] = make_group(0, end_tick=20)
    assert draws(schedule.select(groups, 2, 5, 5)) == [0, 1]


@given(st.integers(0, 30), st.integers(1, 10), st.integers(0, 10), st.integers(0, 40))
def test_admission_fills_up_to_b_plus_delta_and_never_beyond_the_draws_left(
    held, batch_size, delta, undrawn
) -> None:
    admitted = OvercommitSchedule(delta=delta, max_age=9).num_to_admit(held, batch_size, undrawn)
    assert 0 <= admitted <= undrawn
    assert admitted == 0 or held + admitted <= batch_size + delta
    assert admitted == undrawn or held + admitted >= batch_size + delta


def test_the_config_names_the_schedule() -> None:
    assert create_schedule(OverlapConfig(schedule="sequential")).name == "sequential"
    schedule = create_schedule(OverlapConfig(delta=3, max_age=4))
    assert (schedule.name, schedule.delta, schedule.max_age) == ("oppo", 3, 4)


def test_sequential_with_a_delta_contradicts_itself() -> None:
    with pytest.raises(
        ValueError, match="'sequential' holds exactly B groups, but delta is 2; use schedule 'oppo'"
    ):
        OverlapConfig(schedule="sequential", delta=2)
