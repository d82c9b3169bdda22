"""The desk waits for scores with its ears open."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from fakes import FakeHandle, build_fake_engine

from oppo_kit.config import OverlapConfig
from oppo_kit.engine.scoring import ScoringDesk
from oppo_kit.errors import PartFailedError
from oppo_kit.types import Group, Prompt, Rollout, RolloutKey


def ended_group(draw_id: int) -> Group:
    prompt = Prompt(draw_id, (1,), 4)
    return Group(prompt, [Rollout(RolloutKey(draw_id, 0), prompt, [5], finish_reason="stop")], 0)


class NeverFirst(FakeHandle):
    """The score of draw 0 never comes."""

    def submit(self, rollouts) -> list[Future]:
        futures = super().submit(rollouts)
        return [
            Future() if rollout.key.draw_id == 0 else f for rollout, f in zip(rollouts, futures, strict=True)
        ]


@pytest.mark.timeout(30)
def test_a_failure_is_heard_while_an_earlier_row_never_comes() -> None:
    def score_of(rollout) -> float:
        raise ValueError("no coffee")

    desk = ScoringDesk({"reward": NeverFirst("reward", score_of)})
    with pytest.raises(
        PartFailedError, match="scorer 'reward' failed while draw 1 waited for its score: ValueError"
    ):
        desk.settle([ended_group(0), ended_group(1)])


@pytest.mark.timeout(30)
def test_a_death_is_heard_while_another_scorer_is_waited_for() -> None:
    dead = FakeHandle("reference", lambda rollout: [0.0])
    dead.failure = PartFailedError("the scoring process 7 was killed")
    desk = ScoringDesk({"reference": dead, "reward": NeverFirst("reward", lambda rollout: 1.0)})
    with pytest.raises(PartFailedError, match="the scoring process 7 was killed"):
        desk.settle([ended_group(0)])


@pytest.mark.parametrize("moment", ["check", "feed"])
def test_a_failure_beside_decoding_names_its_scorer(moment: str) -> None:
    handle = FakeHandle("reward", lambda rollout: 1.0)
    desk = ScoringDesk({"reward": handle})

    def fail(*_) -> None:
        raise MemoryError("full")

    setattr(handle, moment, fail)
    with pytest.raises(
        PartFailedError, match="scorer 'reward' failed while it read unfinished responses: MemoryErr"
    ):
        desk.check() if moment == "check" else desk.feed([])


def test_all_placements_are_closed_though_one_cannot_be() -> None:
    handles = {name: FakeHandle(name, lambda rollout: 1.0) for name in ("a", "b", "c")}

    def fail() -> None:
        raise RuntimeError("stuck")

    handles["b"].close = fail
    with pytest.raises(RuntimeError, match="stuck"):
        ScoringDesk(handles).close()
    assert handles["a"].is_closed
    assert handles["c"].is_closed


def test_the_score_of_a_rejected_group_is_no_longer_wanted() -> None:
    handle = NeverFirst("reward", lambda rollout: 1.0)
    desk = ScoringDesk({"reward": handle})
    group = ended_group(0)
    desk._submit("reward", group.rollouts)
    [future] = desk._pending.values()
    desk.forget(group)
    assert future.cancelled()
    assert handle.forgotten == [[group.rollouts[0].key]]


def test_the_generator_is_told_before_every_call_whether_scorers_work_beside_it() -> None:
    told: list[bool] = []

    def make(score_at: str):
        engine = build_fake_engine(
            length_of=lambda draw, sample: (3, 9)[draw % 2],
            batch_size=2,
            num_steps=1,
            overlap=OverlapConfig(score_at=score_at, decode_tokens=2),
        )
        engine.generator.set_shared = told.append
        return engine, engine.scorers["reward"]

    engine, reward = make("sample")
    submit = reward.submit

    def submit_slowly(rollouts) -> list[Future]:
        reward.is_busy = len(reward.submitted) == 0  # with the first response, until the second has ended
        return submit(rollouts)

    reward.submit = submit_slowly
    engine.collect()
    assert told == [False, False, True, True, True], "draw 0 ends in the second call, draw 1 in the fifth"
    told.clear()
    engine, _ = make("batch")
    engine.collect()
    assert told == [False] * 5


def test_a_step_that_is_given_up_for_another_state_leaves_no_trace_in_the_reports() -> None:
    def make():
        return build_fake_engine(
            length_of=lambda draw, sample: 3,
            batch_size=2,
            num_steps=3,
            overlap=OverlapConfig(decode_tokens=1),
        )

    engine = make()
    state = make().state_dict()
    engine.collect()
    engine.load_state_dict(state)
    report = engine.step(engine.collect())
    assert report.tokens_decoded == report.tokens_trained == 6
    assert report.generate_s == 3.0
