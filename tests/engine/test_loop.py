"""The loop on fakes and a virtual clock: hooks, events, times, failures, and what overcommit buys."""

from __future__ import annotations

import math

import pytest
from fakes import (
    FakeAlgorithm,
    FakeGenerator,
    FakeHandle,
    FakeLearner,
    FakePrompts,
    VirtualClock,
    build_fake_engine,
    stable_hash,
)

from oppo_kit.config import OverlapConfig
from oppo_kit.engine.loop import OverlapEngine
from oppo_kit.errors import ConfigError, PartFailedError, StateError
from oppo_kit.types import TokenChunk


def long_tailed(draw_id: int, sample_index: int) -> int:
    return 2 + int(45 * (stable_hash(draw_id, sample_index) % 1000 / 1000) ** 4)


def test_overcommit_needs_fewer_ticks_for_the_same_draws_and_trains_each_once() -> None:
    ticks, trained = {}, {}
    for name, overlap in (
        ("sequential", OverlapConfig(schedule="sequential", decode_tokens=1)),
        ("overcommit", OverlapConfig(delta=4, decode_tokens=1)),
    ):
        engine = build_fake_engine(length_of=long_tailed, batch_size=8, num_steps=20, overlap=overlap)
        reports = list(engine.run())
        ticks[name] = sum(report.generate_s for report in reports)
        trained[name] = sorted(g.draw_id for batch in engine.learner.batches for g in batch.groups)
    assert trained["overcommit"] == trained["sequential"] == list(range(160))
    assert ticks["overcommit"] < 0.8 * ticks["sequential"]


def test_trained_and_drawn_lengths_agree_over_a_whole_run() -> None:
    """First-finished selection must not shift the trained distribution (verl PR#4160)."""
    engine = build_fake_engine(
        length_of=long_tailed, batch_size=8, num_steps=20, overlap=OverlapConfig(delta=8)
    )
    lengths = sorted(length for report in engine.run() for length in report.trained_lengths)
    assert lengths == sorted(min(long_tailed(draw, 0), 50) for draw in range(160))


def test_at_delta_zero_every_chunk_size_and_scoring_time_trains_the_same_batches() -> None:
    def trajectory(**overlap):
        engine = build_fake_engine(
            length_of=long_tailed, batch_size=4, num_steps=6, overlap=OverlapConfig(**overlap)
        )
        list(engine.run())
        return [
            [(g.draw_id, g.rollouts[0].token_ids, g.rollouts[0].scores) for g in batch.groups]
            for batch in engine.learner.batches
        ]

    expected = trajectory(schedule="sequential")
    for score_at in ("batch", "sample"):
        for decode_tokens in (1, 7, 64):
            assert trajectory(delta=0, decode_tokens=decode_tokens, score_at=score_at) == expected


def test_one_slow_member_holds_its_group_and_no_other() -> None:
    engine = build_fake_engine(
        length_of=lambda draw, sample: 40 if (draw, sample) == (0, 2) else 3,
        batch_size=2,
        num_steps=2,
        group_size=4,
        overlap=OverlapConfig(delta=1, decode_tokens=1),
    )
    first = engine.collect()
    assert [group.draw_id for group in first.groups] == [1, 2]
    assert engine.step(first).generate_s == 3.0
    second = engine.collect()
    assert [group.draw_id for group in second.groups] == [0, 3]
    assert second.num_rows == 8


def test_hooks_and_events_come_in_order() -> None:
    events: list[str] = []
    engine = build_fake_engine(
        length_of=lambda draw, sample: 2 + draw,
        batch_size=2,
        num_steps=1,
        overlap=OverlapConfig(decode_tokens=2),
        listeners=[lambda kind, facts: events.append(kind)],
    )
    engine.step(engine.collect())
    assert engine.algorithm.hooks == [
        ("chunk", 2),
        ("complete", 0),
        ("chunk", 1),
        ("complete", 1),
        ("batch", [0, 1]),
        ("update", 0),
    ]
    assert events == ["admitted", "decoded", "ended", "decoded", "ended", "selected", "updated"]


def test_the_times_of_a_step_add_up() -> None:
    engine = build_fake_engine(
        length_of=lambda draw, sample: 4,
        batch_size=3,
        num_steps=1,
        overlap=OverlapConfig(decode_tokens=4),
        decode_s=0.5,
        score_s=0.25,
        train_s=7.0,
    )
    [report] = engine.run()
    assert (report.generate_s, report.score_s, report.train_s) == (2.0, 0.75, 7.0)
    assert report.step_s == 9.75
    assert report.engine_s == 0.0
    assert report.tokens_decoded == report.tokens_trained == 12
    assert report.metrics == {"prepared": 1.0, "loss": 0.5}


def test_each_rollout_is_scored_once_however_often_it_is_considered() -> None:
    for score_at in ("batch", "sample"):
        engine = build_fake_engine(
            length_of=long_tailed,
            batch_size=3,
            num_steps=5,
            group_size=2,
            overlap=OverlapConfig(delta=3, score_at=score_at),
            score_of=lambda rollout: None if rollout.key.draw_id % 4 == 1 else 1.0,
        )
        list(engine.run())
        submitted = engine.scorers["reward"].submitted
        assert len(submitted) == len(set(submitted))


def test_selection_never_looks_at_scores() -> None:
    def chosen(score_of):
        engine = build_fake_engine(
            length_of=long_tailed,
            batch_size=3,
            num_steps=4,
            overlap=OverlapConfig(delta=3),
            score_of=score_of,
        )
        list(engine.run())
        return [[g.draw_id for g in batch.groups] for batch in engine.learner.batches]

    assert chosen(lambda r: float(r.key.draw_id)) == chosen(lambda r: -float(r.key.draw_id))


def test_a_scorer_that_raises_ends_the_step_with_its_name_and_draw() -> None:
    """NeMo-RL#3488: nothing hangs."""

    def fail(rollout):
        raise RuntimeError("out of coffee")

    engine = build_fake_engine(
        length_of=lambda d, s: 3, batch_size=2, num_steps=1, overlap=OverlapConfig(), score_of=fail
    )
    with pytest.raises(
        PartFailedError, match=r"scorer 'reward' failed while draw 0 .* RuntimeError: out of coffee"
    ) as caught:
        engine.collect()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_generator_that_raises_is_named_with_its_step() -> None:
    engine = build_fake_engine(
        length_of=lambda d, s: 1 // 0, batch_size=2, num_steps=1, overlap=OverlapConfig()
    )
    with pytest.raises(PartFailedError, match="the generator failed in step 0: ZeroDivisionError"):
        engine.collect()


def test_a_learner_that_raises_is_named_with_the_draws() -> None:
    engine = build_fake_engine(length_of=lambda d, s: 3, batch_size=2, num_steps=1, overlap=OverlapConfig())
    engine.learner.update = lambda batch, algorithm: 1 / 0
    with pytest.raises(
        PartFailedError, match=r"the learner failed in step 0 on draws \[0, 1\]: ZeroDivisionError"
    ):
        engine.step(engine.collect())


@pytest.mark.parametrize("score", [None, math.nan, math.inf])
def test_when_every_group_is_rejected_the_run_ends_instead_of_drawing_for_ever(score) -> None:
    engine = build_fake_engine(
        length_of=lambda d, s: 3, batch_size=2, num_steps=1, overlap=OverlapConfig(), score_of=lambda r: score
    )
    reason = "reward_abstained" if score is None else "non_finite_score"
    with pytest.raises(
        PartFailedError, match=rf"the last 32 groups were all rejected \({reason}\); the reward must"
    ):
        engine.collect()


def test_a_rejected_group_is_replaced_and_counted() -> None:
    engine = build_fake_engine(
        length_of=lambda d, s: 3,
        batch_size=2,
        num_steps=2,
        overlap=OverlapConfig(),
        score_of=lambda r: {0: None, 3: math.nan}.get(r.key.draw_id, 1.0),
    )
    reports = list(engine.run())
    assert [[g.draw_id for g in batch.groups] for batch in engine.learner.batches] == [[1, 2], [4, 5]]
    assert reports[-1].rejected == {"reward_abstained": 1, "non_finite_score": 1}
    assert reports[-1].drawn == 6


def test_scores_that_do_not_fit_their_rollouts_are_refused() -> None:
    engine = build_fake_engine(
        length_of=lambda d, s: 3,
        batch_size=2,
        num_steps=1,
        overlap=OverlapConfig(),
        score_of=lambda rollout: [1.0],
    )
    with pytest.raises(PartFailedError, match="returned 1 numbers for draw 0, whose response has 3 tokens"):
        engine.collect()


def test_a_batch_is_trained_once() -> None:
    engine = build_fake_engine(length_of=lambda d, s: 3, batch_size=2, num_steps=3, overlap=OverlapConfig())
    batch = engine.collect()
    engine.step(batch)
    with pytest.raises(
        StateError, match=r"collected at version 0, the engine is at 1; call collect\(\) and step\(\)"
    ):
        engine.step(batch)


def test_no_step_goes_beyond_the_last() -> None:
    engine = build_fake_engine(length_of=lambda d, s: 3, batch_size=2, num_steps=1, overlap=OverlapConfig())
    list(engine.run())
    with pytest.raises(StateError, match="all 1 steps are done; build an engine with more num_steps"):
        engine.collect()


def test_closing_closes_every_scorer() -> None:
    engine = build_fake_engine(length_of=lambda d, s: 3, batch_size=2, num_steps=1, overlap=OverlapConfig())
    with engine:
        list(engine.run())
    assert engine.scorers["reward"].is_closed


class _Liar(FakeGenerator):
    def __init__(self, chunks: list[TokenChunk]) -> None:
        super().__init__(lambda d, s: 3, VirtualClock())
        self.chunks = chunks

    def decode(self, max_tokens: int) -> list[TokenChunk]:
        return self.chunks


@pytest.mark.parametrize(
    ("chunks", "error", "message"),
    [
        ([], PartFailedError, "the generator returned no chunk while 1 responses are in flight"),
        (
            [TokenChunk((9, 0), [1], [-1.0], 0, 1, None)],
            StateError,
            "returned tokens for .* which is not in flight",
        ),
        (
            [TokenChunk((0, 0), [1] * 51, [-1.0] * 51, 0, 1, None)],
            StateError,
            "51 tokens .* whose limit leaves 50",
        ),
    ],
)
def test_a_generator_that_breaks_the_protocol_is_found_out(chunks, error, message) -> None:
    engine = build_fake_engine(length_of=lambda d, s: 3, batch_size=1, num_steps=1, overlap=OverlapConfig())
    engine.generator = _Liar(chunks)
    with pytest.raises(error, match=message):
        engine.collect()


def make_engine(**changes) -> OverlapEngine:
    parts = {
        "algorithm": FakeAlgorithm(),
        "generator": FakeGenerator(lambda d, s: 3, VirtualClock()),
        "scorers": {"reward": FakeHandle("reward", lambda r: 1.0)},
        "learner": FakeLearner(),
        "prompts": FakePrompts(),
        "batch_size": 2,
        "num_steps": 1,
    }
    return OverlapEngine(**parts | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scorers": {}}, r"algorithm 'fake' needs the scorers \['reward'\], but only \[\] are given"),
        ({"batch_size": 0}, "batch_size=0 and num_steps=1 must both be at least 1"),
        ({"overlap": OverlapConfig(delta=9, max_age=2)}, "delta=9 exceeds batch_size × max_age = 4"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(**changes)


def test_more_mini_batches_than_groups_are_refused() -> None:
    from oppo_kit.algorithm import AlgorithmConfig

    algorithm = FakeAlgorithm()
    algorithm.config = AlgorithmConfig(num_mini_batches=3)
    with pytest.raises(
        ConfigError, match="num_mini_batches=3 exceeds batch_size=2: a mini-batch would be empty"
    ):
        make_engine(algorithm=algorithm)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 5}, "saved state has batch_size=5, this engine has 2"),
        ({"state_version": 0}, "saved state has state_version=0, this engine has 4"),
        (
            {"num_trained": 1},
            "saved counts do not conserve: 3 drawn, but 1 trained \\+ 3 held \\+ 0 rejected = 4",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change, message) -> None:
    engine = make_engine(num_steps=4, overlap=OverlapConfig(delta=1))
    engine.collect()
    with pytest.raises(StateError, match=message):
        engine.load_state_dict(engine.state_dict() | change)


def test_a_damaged_rollout_in_a_state_is_named() -> None:
    """slime#2207: per-token lists of one length at every boundary."""
    engine = make_engine(num_steps=4, overlap=OverlapConfig(delta=1))
    engine.collect()
    state = engine.state_dict()
    state["groups"][0]["rollouts"][0]["versions"].pop()
    with pytest.raises(
        StateError, match="saved rollout .* is damaged: 3 tokens, 3 log-probs, 2 versions, limit 50"
    ):
        engine.load_state_dict(state)
