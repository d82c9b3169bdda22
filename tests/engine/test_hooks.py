"""What algorithms/README.md says of an algorithm's hooks: when, what may be changed, what errors do."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import build_fake_engine

from oppo_kit.config import OverlapConfig
from oppo_kit.engine.loop import OverlapEngine
from oppo_kit.errors import ConfigError, PartFailedError


def make_engine(**changes: Any) -> tuple[OverlapEngine, Any]:
    settings: dict[str, Any] = {"batch_size": 2, "num_steps": 3, "overlap": OverlapConfig(delta=1)}
    engine = build_fake_engine(length_of=lambda draw, _: 3 + 9 * (draw % 2), **settings | changes)
    return engine, engine.algorithm


@pytest.mark.parametrize("hook", ["on_chunk", "on_complete", "on_batch", "on_update"])
def test_a_hook_that_raises_ends_the_step_and_is_named_with_its_algorithm(hook: str) -> None:
    engine, algorithm = make_engine()

    def fails(_: Any) -> None:
        raise KeyError("nothing there")

    setattr(algorithm, hook, fails)
    with pytest.raises(
        PartFailedError, match=rf"hook {hook} of 'fake' failed in step \d.*: KeyError: 'nothing there'"
    ):
        next(engine.run())


def test_an_error_of_ours_passes_a_hook_as_it_is() -> None:
    engine, algorithm = make_engine()

    def refuses(_: Any) -> None:
        raise ConfigError("rewards must be positive")

    algorithm.on_batch = refuses
    with pytest.raises(ConfigError, match="^rewards must be positive$"):
        next(engine.run())


def test_every_drawn_group_is_complete_once_and_a_batch_is_seen_between_its_groups_and_its_update() -> None:
    engine, algorithm = make_engine()
    list(engine.run())
    kinds = [kind for kind, _ in algorithm.hooks if kind != "chunk"]
    assert sorted(fact for kind, fact in algorithm.hooks if kind == "complete") == list(range(6))
    assert [kind for kind in kinds if kind != "complete"] == ["batch", "update"] * 3
    completed: list[int] = []
    for kind, fact in algorithm.hooks:
        if kind == "complete":
            completed.append(fact)
        elif kind == "batch":
            assert set(fact) <= set(completed)


def test_a_batch_that_is_collected_again_is_seen_again() -> None:
    engine, algorithm = make_engine()
    engine.collect()
    engine.step(engine.collect())
    batches = [fact for kind, fact in algorithm.hooks if kind == "batch"]
    assert len(batches) == 2
    assert batches[0] == batches[1]


def test_scores_changed_in_on_batch_are_those_of_prepare_and_of_the_report() -> None:
    engine, algorithm = make_engine()
    prepare, seen = algorithm.prepare, []

    def on_batch(batch: Any) -> None:
        batch.scores["reward"] = batch.scores["reward"] * 0.0 + 7.0

    def watched(batch: Any) -> Any:
        seen.extend(batch.scores["reward"].tolist())
        return prepare(batch)

    algorithm.on_batch, algorithm.prepare = on_batch, watched
    assert next(engine.run()).reward_mean == 7.0
    assert seen == [7.0, 7.0]


def test_on_update_may_add_metrics_and_hears_of_a_batch_that_was_left_out() -> None:
    engine, algorithm = make_engine(non_finite=frozenset({0}))

    def on_update(report: Any) -> None:
        report.metrics["theirs"] = float(report.groups_trained)

    algorithm.on_update = on_update
    assert [report.metrics["theirs"] for report in engine.run()] == [0.0, 2.0, 2.0]


def test_a_resumed_run_does_not_repeat_the_hooks_of_what_it_restores() -> None:
    engine, algorithm = make_engine()
    next(engine.run())
    state = engine.state_dict()
    resumed, again = make_engine()
    resumed.load_state_dict(state)
    list(resumed.run())
    first, second = (
        {fact for kind, fact in hooks if kind == "complete"} for hooks in (algorithm.hooks, again.hooks)
    )
    assert not first & second
    assert first | second == set(range(6))
