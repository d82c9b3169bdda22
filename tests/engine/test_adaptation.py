"""The controllers inside the engine: Δ and the plan follow what steps report, and survive a save."""

from __future__ import annotations

import io

import pytest
import torch
from fakes import build_fake_engine, stable_hash

from oppo_kit.config import OverlapConfig
from oppo_kit.engine.adaptation import Adaptation
from oppo_kit.errors import StateError


def make_engine(num_steps: int, *, score_of, feed_s: float = 0.0, score_s: float = 0.0, **overlap):
    engine = build_fake_engine(
        length_of=lambda draw, sample: 3 + stable_hash(draw) % 9,
        batch_size=4,
        num_steps=num_steps,
        overlap=OverlapConfig(delta=4, decode_tokens=2, **overlap),
        score_of=score_of,
        score_s=score_s,
    )
    handle = engine.scorers["reward"]
    feed, clock = handle.feed, handle._clock

    def slow_feed(rollouts):
        clock.time_s += feed_s
        feed(rollouts)

    handle.feed = slow_feed
    return engine


def noise(rollout) -> float:
    return stable_hash(rollout.key.draw_id, 5) % 100 / 100


def test_delta_falls_to_nothing_on_a_plateau_and_then_nothing_is_carried() -> None:
    reports = list(make_engine(150, score_of=noise).run())
    assert reports[0].delta == 4
    assert [report.delta for report in reports[-20:]] == [0] * 20
    assert all(report.in_flight + report.queued <= 4 for report in reports)
    assert reports[-30].in_flight + reports[-30].queued == 0
    assert reports[-1].drawn == 600


def test_delta_stays_at_its_budget_while_the_reward_rises() -> None:
    reports = list(make_engine(100, score_of=lambda r: r.key.draw_id / 20 + noise(r)).run())
    assert sum(report.delta for report in reports) >= 0.8 * 4 * 100


def test_a_fixed_delta_is_left_alone() -> None:
    reports = list(make_engine(60, score_of=noise, delta_control="fixed").run())
    assert {report.delta for report in reports} == {4}


def test_auto_ends_without_overlap_where_feeding_and_early_scores_cost() -> None:
    engine = make_engine(
        80, score_of=noise, feed_s=6.0, score_at="auto", chunk_candidates=(2, 4), delta_control="fixed"
    )
    reports = list(engine.run())
    plans = {(report.score_at, report.chunk_tokens) for report in reports}
    assert plans == {("batch", 0), ("sample", 0), ("chunk", 2), ("chunk", 4)}
    assert {report.score_at for report in reports[-40:]} <= {"batch", "sample"}


def test_auto_begins_with_scoring_each_response_as_it_ends() -> None:
    engine = make_engine(8, score_of=noise, score_at="auto", chunk_candidates=(2, 4))
    plans = [(report.score_at, report.chunk_tokens) for report in engine.run()]
    assert plans == [("sample", 0)] * 3 + [("batch", 0)] * 3 + [("chunk", 4)] * 2


def test_the_controllers_go_on_after_a_save() -> None:
    straight = make_engine(60, score_of=noise, score_at="auto", chunk_candidates=(2, 4), feed_s=1.0)
    expected = [(r.delta, r.score_at, r.chunk_tokens) for r in straight.run()]
    engine = make_engine(60, score_of=noise, score_at="auto", chunk_candidates=(2, 4), feed_s=1.0)
    seen = []
    for _ in range(60):
        file = io.BytesIO()
        torch.save(engine.state_dict(), file)
        file.seek(0)
        clock = engine.generator.clock
        engine = make_engine(60, score_of=noise, score_at="auto", chunk_candidates=(2, 4), feed_s=1.0)
        engine.generator.clock.time_s = clock.time_s
        engine.load_state_dict(torch.load(file, weights_only=True))
        report = engine.step(engine.collect())
        seen.append((report.delta, report.score_at, report.chunk_tokens))
    assert seen == expected


def test_a_state_of_other_controllers_is_refused() -> None:
    state = make_engine(5, score_of=noise).state_dict()
    with pytest.raises(StateError, match="paper"):
        make_engine(5, score_of=noise, delta_control="paper").load_state_dict(state)
    with pytest.raises(StateError, match="robust"):
        make_engine(5, score_of=noise, score_at="auto").load_state_dict(state)


def test_a_skipped_batch_teaches_nothing() -> None:
    engine = build_fake_engine(
        length_of=lambda draw, sample: 3,
        batch_size=2,
        num_steps=2,
        overlap=OverlapConfig(score_at="auto"),
        non_finite=frozenset({0}),
    )
    before = engine.state_dict()["controllers"]
    engine.step(engine.collect())
    assert engine.state_dict()["controllers"] == before
    engine.step(engine.collect())
    assert engine.state_dict()["controllers"] != before


@pytest.mark.benchmark_only
def test_observing_a_step(benchmark) -> None:
    engine = make_engine(40, score_of=noise, score_at="auto")
    reports = list(engine.run())
    adaptation = Adaptation(engine.overlap)

    def observe_all() -> None:
        for report in reports:
            adaptation.observe(report)

    benchmark(observe_all)
