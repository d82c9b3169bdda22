"""Python rewards under the whole engine: what one call holds, who is asked again, and whom a slow row holds."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import tiny_models
from fakes import FakeAlgorithm, FakeGenerator, FakeHandle, FakeLearner, FakePrompts, VirtualClock

from oppo_kit.backends.function_scorer import FunctionScorer
from oppo_kit.config import OverlapConfig
from oppo_kit.engine.loop import OverlapEngine
from oppo_kit.engine.scoring import ScoringDesk
from oppo_kit.errors import PartFailedError
from oppo_kit.placement.functions import FunctionPlacement
from oppo_kit.placement.inline import InlinePlacement
from oppo_kit.protocols import ScorerHandle
from oppo_kit.types import Group, Prompt, Rollout, RolloutKey

TOKENIZER = tiny_models.tiny_tokenizer()
WAIT_S = 30.0


class Prompts(FakePrompts):
    """The function sees whose responses it is given."""

    def draw(self, draw_id: int) -> Prompt:
        return Prompt(draw_id, (draw_id % 7 + 1,), self.limit, {"prompt": "ask", "draw": draw_id})


def length_of(draw_id: int, sample_index: int) -> int:
    return 3 + 5 * ((3 * draw_id + sample_index) % 4)


def build(handle: ScorerHandle, *, group_size: int = 2, num_steps: int = 3, **overlap: Any) -> OverlapEngine:
    clock = VirtualClock()
    algorithm: Any = FakeAlgorithm(group_size)
    learner: Any = FakeLearner(clock)
    return OverlapEngine(
        algorithm=algorithm,
        generator=FakeGenerator(length_of, clock),
        scorers={"reward": handle},
        learner=learner,
        prompts=Prompts(),
        batch_size=2,
        num_steps=num_steps,
        overlap=OverlapConfig(decode_tokens=1, **overlap),
        clock=clock,
    )


def run(functions: Any, call_per: Any, *, weights: Any = None, **options: Any) -> OverlapEngine:
    scorer = FunctionScorer(functions, TOKENIZER, weights, call_per=call_per)
    with build(FunctionPlacement(scorer), **options) as engine:
        list(engine.run())
    return engine


def trained(engine: OverlapEngine) -> list[list[int]]:
    learner: Any = engine.learner
    return [[group.draw_id for group in batch.groups] for batch in learner.batches]


class Spy:
    """Remembers the draws of each call; its score is what a function of a draw says."""

    def __init__(self, score_of: Callable[[int], float | None] = float) -> None:
        self.calls: list[list[int]] = []
        self.score_of = score_of

    def __call__(self, draw: list[int], **columns: Any) -> list[float | None]:
        self.calls.append(draw)
        return [self.score_of(draw_id) for draw_id in draw]


OVERLAPS = [
    {"score_at": "batch"},
    {"score_at": "sample"},
    {"score_at": "sample", "delta": 2},
    {"score_at": "chunk", "delta": 2},
]


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_one_call_holds_one_response_or_one_group_or_one_batch(overlap: dict[str, Any]) -> None:
    for call_per in ("response", "group", "batch"):
        spy = Spy()
        batches = trained(run([spy], call_per, **overlap))
        draws = sorted(draw for batch in batches for draw in batch)
        assert draws == list(range(6))
        expected = {
            "response": [[draw] for draw in draws for _ in range(2)],
            "group": [[draw, draw] for draw in draws],
            "batch": sorted([draw for draw in batch for _ in range(2)] for batch in batches),
        }[call_per]
        assert sorted(sorted(call) for call in spy.calls) == expected


def test_a_batch_is_asked_anew_with_the_group_that_replaced_a_rejected_one() -> None:
    def score_of(draw_id: int) -> float | None:
        return {1: None, 2: math.nan}.get(draw_id, 1.0)

    spy = Spy(score_of)
    engine = run([spy], "batch", num_steps=1)
    assert spy.calls == [[0, 0, 1, 1], [0, 0, 2, 2], [0, 0, 3, 3]]
    assert trained(engine) == [[0, 3]]
    assert engine.state_dict()["rejected"] == {"reward_abstained": 1, "non_finite_score": 1}


def test_the_scores_of_a_batch_are_those_of_its_last_call() -> None:
    calls: list[int] = []

    def rank_of_call(draw: list[int], **columns: Any) -> list[float | None]:
        calls.append(len(calls))
        return [None if draw_id == 1 else float(len(calls)) for draw_id in draw]

    engine = run([rank_of_call], "batch", num_steps=1)
    learner: Any = engine.learner
    assert learner.batches[0].scores["reward"].tolist() == [2.0] * 4


@pytest.mark.parametrize("call_per", ["response", "group"])
def test_a_response_or_group_is_asked_once_also_when_another_is_rejected(call_per: str) -> None:
    spy = Spy(lambda draw_id: None if draw_id == 1 else 1.0)
    run([spy], call_per, num_steps=1)
    asked = sorted(draw for call in spy.calls for draw in call)
    assert asked == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("call_per", ["response", "group", "batch"])
def test_sync_and_async_functions_are_weighted_and_may_abstain(call_per: str) -> None:
    async def slow(draw: list[int], **columns: Any) -> list[float | None]:
        await asyncio.sleep(0)
        return [None if draw_id == 0 else 10.0 for draw_id in draw]

    def plain(draw: list[int], **columns: Any) -> list[float | None]:
        return [float(draw_id) for draw_id in draw]

    engine = run([slow, plain], call_per, weights=[1.0, 0.5], num_steps=1, score_at="sample")
    learner: Any = engine.learner
    assert learner.batches[0].scores["reward"].tolist() == [0.0, 0.0, 10.5, 10.5]


@pytest.mark.parametrize("call_per", ["response", "group"])
@pytest.mark.parametrize("overlap", OVERLAPS[:3])
def test_a_slow_row_holds_its_group_and_not_the_others(call_per: str, overlap: dict[str, Any]) -> None:
    """Draw 0 gets its score only when both of its batch's other scores are there, whoever was asked first."""
    others = threading.Semaphore(0)

    def reward(draw: list[int], **columns: Any) -> list[float]:
        if draw[0] == 0:
            assert others.acquire(timeout=WAIT_S)
        return [float(draw_id) for draw_id in draw]

    class Watched(FunctionPlacement):
        def submit(self, rollouts: Any) -> list[Future[Any]]:
            futures = super().submit(rollouts)
            for rollout, future in zip(rollouts, futures, strict=True):
                if rollout.key.draw_id != 0:
                    future.add_done_callback(lambda _: others.release())
            return futures

    scorer = FunctionScorer([reward], TOKENIZER, call_per=call_per)  # type: ignore[arg-type]
    with build(Watched(scorer), **overlap) as engine:
        list(engine.run())
    assert sorted(draw for batch in trained(engine) for draw in batch) == list(range(6))


def test_inline_a_slow_row_would_hold_all_which_is_why_functions_have_threads() -> None:
    """The test above can fail: asked in turn, draw 0 waits in vain."""
    is_other_scored = threading.Event()

    def reward(draw: list[int], **columns: Any) -> list[float]:
        if draw[0] == 0 and not is_other_scored.wait(0.05):
            raise TimeoutError("nobody else was asked")
        is_other_scored.set()
        return [1.0] * len(draw)

    scorer = FunctionScorer([reward], TOKENIZER, call_per="group")
    with (
        build(InlinePlacement(scorer)) as engine,
        pytest.raises(PartFailedError, match="'reward' raised TimeoutError"),
    ):
        engine.collect()


# --- the desk


def ended_group(draw_id: int) -> Group:
    prompt = Prompt(draw_id, (1,), 9)
    keys = [RolloutKey(draw_id, index) for index in range(2)]
    return Group(prompt, [Rollout(key, prompt, [5], finish_reason="stop") for key in keys], 0)


@pytest.mark.parametrize("sample_index", [0, 1])
@pytest.mark.parametrize("call_per", ["response", "group", "batch"])
def test_after_a_failure_only_whole_groups_and_batches_are_asked_again(
    call_per: str, sample_index: int
) -> None:
    is_broken = True
    second = {
        "response": [[(1, sample_index)]],
        "group": [[(1, 0), (1, 1)]],
        "batch": [[(0, 0), (0, 1), (1, 0), (1, 1)]],
    }[call_per]

    def score_of(rollout: Rollout) -> float:
        if is_broken and rollout.key == (1, sample_index):
            raise ValueError("no network")
        return 1.0

    handle = FakeHandle("reward", score_of, call_per=call_per)
    desk = ScoringDesk({"reward": handle})  # type: ignore[dict-item]
    groups = [ended_group(0), ended_group(1)]
    with pytest.raises(PartFailedError, match="scorer 'reward' failed while draw 1 waited"):
        desk.settle(groups)
    is_broken = False
    handle.calls.clear()
    assert desk.settle(groups) == {}
    assert handle.calls == second
    assert all(rollout.scores == {"reward": 1.0} for group in groups for rollout in group.rollouts)
    assert desk.settle(groups) == {}
    assert handle.calls == second


@pytest.mark.parametrize("call_per", ["response", "group", "batch"])
def test_groups_that_come_back_without_their_scores_are_asked_again(call_per: str) -> None:
    """As when an earlier state of the same draws is loaded into a running engine."""
    handle = FakeHandle("reward", lambda rollout: 1.0, call_per=call_per)
    desk = ScoringDesk({"reward": handle})  # type: ignore[dict-item]
    for _ in range(2):
        groups = [ended_group(0), ended_group(1)]
        assert desk.settle(groups) == {}
        assert all(rollout.scores == {"reward": 1.0} for group in groups for rollout in group.rollouts)


def test_scores_that_were_made_beside_other_groups_are_void() -> None:
    handle = FakeHandle("reward", lambda rollout: 1.0, call_per="batch")
    desk = ScoringDesk({"reward": handle})  # type: ignore[dict-item]
    groups = [ended_group(draw_id) for draw_id in range(3)]
    for first, second in ((0, 1), (1, 2), (0, 2)):
        assert desk.settle([groups[first], groups[second]]) == {}
    assert [[key[0] for key in call] for call in handle.calls] == [[0, 0, 1, 1], [1, 1, 2, 2], [0, 0, 2, 2]]
