"""Groups of several responses: whole in every schedule, kept when some members have no score, and trained by others."""

from __future__ import annotations

import math

import pytest
from fakes import build_fake_engine, stable_hash

from oppo_kit.config import OverlapConfig
from oppo_kit.errors import PartFailedError, StateError

SCHEDULES = [
    {"schedule": "sequential"},
    {"delta": 0},
    {"delta": 2},
    {"delta": 6, "max_age": 3, "decode_tokens": 1},
    {"delta": 3, "score_at": "chunk", "chunk_tokens": 2},
]


def build(overlap: dict, **changes):
    settings = {
        "length_of": lambda draw, sample: 2 + stable_hash(draw, sample) % 20,
        "batch_size": 3,
        "num_steps": 7,
        "group_size": 5,
        **changes,
    }
    return build_fake_engine(overlap=OverlapConfig(**overlap), **settings)


@pytest.mark.parametrize("overlap", SCHEDULES)
def test_every_schedule_trains_whole_groups_in_member_order(overlap) -> None:
    """Neither B = 3 nor Δ is a multiple of G = 5, nor the other way round."""
    engine = build(overlap)
    list(engine.run())
    rows = [[rollout.key for group in b.groups for rollout in group.rollouts] for b in engine.learner.batches]
    assert all(len(batch) == 15 for batch in rows)
    for batch in rows:
        for start in range(0, 15, 5):
            [draw_id] = {key.draw_id for key in batch[start : start + 5]}
            assert [key.sample_index for key in batch[start : start + 5]] == [0, 1, 2, 3, 4], draw_id
    assert sorted(key.draw_id for batch in rows for key in batch[::5]) == list(range(21))


@pytest.mark.parametrize("overlap", SCHEDULES)
def test_one_very_slow_member_delays_its_group_up_to_the_age_bound_and_loses_nothing(overlap) -> None:
    engine = build(
        overlap, length_of=lambda draw, sample: 5_000 if (draw, sample) == (1, 4) else 3, limit=400
    )
    reports = list(engine.run())
    trained = [[group.draw_id for group in batch.groups] for batch in engine.learner.batches]
    step = next(index for index, draws in enumerate(trained) if 1 in draws)
    assert step <= engine.overlap.max_age
    [group] = [group for group in engine.learner.batches[step].groups if group.draw_id == 1]
    assert [len(rollout.token_ids) for rollout in group.rollouts] == [3, 3, 3, 3, 400]
    assert sum(map(len, trained)) == reports[-1].trained == reports[-1].drawn == 21


def test_a_group_is_kept_as_long_as_two_members_have_a_score() -> None:
    """Draw d has d mod 4 members with a score, so 0 and 1 are rejected, 2 and 3 kept."""
    engine = build(
        {"delta": 3},
        group_size=3,
        score_of=lambda r: 1.5 if r.key.sample_index < r.key.draw_id % 4 else None,
        num_steps=2,
    )
    report = list(engine.run())[-1]
    kept = [group for batch in engine.learner.batches for group in batch.groups]
    assert {group.draw_id % 4 for group in kept} == {2, 3}
    assert report.rejected.keys() == {"reward_abstained"}
    assert report.reward_mean == 1.5
    for group in kept:
        scores = [rollout.scores["reward"] for rollout in group.rollouts]
        assert [score is None for score in scores] == [index >= group.draw_id % 4 for index in range(3)]


def test_a_score_that_is_not_finite_rejects_its_whole_group() -> None:
    engine = build({}, score_of=lambda r: math.nan if tuple(r.key) == (1, 3) else 1.0, num_steps=1)
    [report] = engine.run()
    assert [group.draw_id for group in engine.learner.batches[0].groups] == [0, 2, 3]
    assert report.rejected == {"non_finite_score": 1}


def test_when_no_member_ever_has_a_score_the_run_ends_and_says_so() -> None:
    engine = build({"delta": 3}, score_of=lambda rollout: None)
    with pytest.raises(PartFailedError, match=r"groups were all rejected \(reward_abstained\)"):
        engine.collect()


def test_a_batch_that_somebody_else_trained_is_committed_like_a_step() -> None:
    reports = {}
    for name in ("step", "commit"):
        engine = build({"delta": 2}, train_s=7.0)
        clock = engine._stopwatch._clock
        reports[name] = []
        for _ in range(engine.num_steps):
            batch = engine.collect()
            if name == "step":
                reports[name].append(engine.step(batch))
            else:
                clock.time_s += 7.0
                reports[name].append(engine.commit(batch))
                assert engine.generator.version == engine.version
    for one, other in zip(reports["step"], reports["commit"], strict=True):
        assert one.metrics
        assert not other.metrics
        assert (one.trained, one.version, one.age_max, one.trained_lengths, one.tokens_trained) == (
            other.trained,
            other.version,
            other.age_max,
            other.trained_lengths,
            other.tokens_trained,
        )
        assert one.train_s == other.train_s == 7.0
        assert one.engine_s == other.engine_s == 0.0


def test_without_new_weights_the_version_stays_and_the_groups_are_trained() -> None:
    engine = build({"delta": 2})
    first = engine.commit(engine.collect(), has_new_weights=False)
    assert (engine.version, first.trained, first.groups_trained) == (0, 3, 3)
    second = engine.commit(engine.collect())
    assert (engine.version, second.trained, second.age_max) == (1, 6, 0)


def test_a_batch_is_committed_once() -> None:
    engine = build({"delta": 2})
    batch = engine.collect()
    engine.commit(batch, has_new_weights=False)
    with pytest.raises(StateError, match="was trained or rejected before"):
        engine.commit(batch)
    engine.commit(engine.collect())
    with pytest.raises(StateError, match="collected at version 0, the engine is at 1"):
        engine.commit(batch)


def test_what_an_algorithm_learned_comes_back_with_the_state() -> None:
    engine = build({"delta": 2})
    engine.algorithm.state_dict = lambda: {"baseline": 0.25}
    state = engine.state_dict()
    resumed = build({"delta": 2})
    seen = []
    resumed.algorithm.load_state_dict = seen.append
    resumed.load_state_dict(state)
    assert seen == [{"baseline": 0.25}]
