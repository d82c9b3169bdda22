"""Where a scorer runs changes neither its scores nor that its failures are heard. The process: see test_process."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
from child_scorers import (
    Exiting,
    FailingFeed,
    Lengths,
    Raising,
    Short,
    Streaming,
    Tensors,
    Words,
    ended,
)
from tiny_models import tiny_classifier, tiny_rollouts

from oppo_kit.backends.hf_scorer import HFRewardScorer
from oppo_kit.errors import NonFiniteError, PartFailedError
from oppo_kit.placement import functions as functions_module
from oppo_kit.placement import worker as worker_module
from oppo_kit.placement.functions import FunctionPlacement
from oppo_kit.placement.inline import InlinePlacement
from oppo_kit.placement.thread import ThreadPlacement, place_in_thread
from oppo_kit.protocols import ScorerHandle
from oppo_kit.types import Prompt, Rollout, RolloutKey

WAIT_S = 30.0
PLACEMENTS = [InlinePlacement, ThreadPlacement, FunctionPlacement]
STREAMING_PLACEMENTS = [InlinePlacement, ThreadPlacement]


def results(handle: ScorerHandle, rollouts: list[Rollout]) -> list[Any]:
    return [future.result(WAIT_S) for future in handle.submit(rollouts)]


class Scoring:
    """A scorer of one function of the rollouts."""

    def __init__(self, function: Any, call_per: str = "response", name: str = "reward") -> None:
        self.name = name
        self.call_per = call_per
        self.score = function


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_scores_come_back_in_order_through_the_futures(placement: Any) -> None:
    handle = placement(Lengths())
    assert handle.name == "lengths"
    assert handle.call_per == "response"
    assert not handle.follows_weights
    assert results(handle, [ended(3, 4), ended(1, 2), ended(2, 0)]) == [4.0, 2.0, None]
    assert handle.submit([]) == []
    handle.check()
    handle.close()
    handle.close()


@pytest.mark.parametrize("placement", STREAMING_PLACEMENTS)
def test_a_handle_says_what_its_scorer_can(placement: Any) -> None:
    scorer = Streaming()
    scorer.follows_weights = True  # type: ignore[attr-defined]
    scorer.call_per = "group"  # type: ignore[attr-defined]
    handle = placement(scorer)
    assert (handle.can_stream, handle.follows_weights, handle.call_per) == (True, True, "group")
    handle.close()
    handle = placement(Lengths())
    assert not handle.can_stream
    handle.forget(None)
    handle.close()


@pytest.mark.parametrize("placement", STREAMING_PLACEMENTS)
def test_what_was_fed_is_there_until_it_is_forgotten(placement: Any) -> None:
    scorer = Streaming()
    has_fed = threading.Event()
    feed = scorer.feed
    scorer.feed = lambda rollouts: (feed(rollouts), has_fed.set())  # type: ignore[method-assign]
    handle = placement(scorer)
    rollouts = [Rollout(RolloutKey(draw, 0), Prompt(draw, (1,), 9), [5, 5]) for draw in range(3)]
    handle.feed(rollouts)
    assert has_fed.wait(WAIT_S)
    handle.forget([RolloutKey(1, 0)])
    assert results(handle, rollouts) == [2.0, -1.0, 2.0]
    has_fed.clear()
    handle.feed(rollouts)
    assert has_fed.wait(WAIT_S)
    handle.forget(None)
    assert results(handle, rollouts) == [-1.0] * 3
    names = [span.name for span in handle.take_spans()]
    assert names == ["feed streaming", "score streaming"] * 2
    handle.close()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_failure_is_the_futures_exception(placement: Any) -> None:
    for scorer, expected, words in (
        (Raising("ValueError", "no coffee"), ValueError, "no coffee"),
        (Raising("NonFiniteError", "row 3"), NonFiniteError, "row 3"),
    ):
        handle = placement(scorer)
        with pytest.raises(expected, match=words):
            results(handle, [ended(1)])
        handle.check()
        handle.close()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_exit_is_a_failure_and_no_end(placement: Any) -> None:
    handle = placement(Exiting())
    for draw in range(2):  # whoever works is still there
        with pytest.raises(PartFailedError, match=r"scorer 'exiting' raised SystemExit\(3\)"):
            results(handle, [ended(draw)])
    handle.close()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_another_number_of_scores_is_named(placement: Any) -> None:
    scorer = Short()
    scorer.call_per = "batch"  # type: ignore[attr-defined]
    handle = placement(scorer)
    with pytest.raises(PartFailedError, match="'short' returned 1 scores for 2 rollouts; one each is needed"):
        results(handle, [ended(1), ended(2)])
    handle.close()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_scores_become_plain_numbers_and_anything_else_is_refused(placement: Any) -> None:
    scorer = Tensors()
    scorer.call_per = "batch"  # type: ignore[attr-defined]
    handle = placement(scorer)
    scores = results(handle, [ended(1), ended(2), ended(3)])
    assert scores == [2.5, [1.0, 2.0], 3.0]
    assert [type(score) for score in (scores[0], *scores[1], scores[2])] == [float] * 4
    handle.close()
    handle = placement(Words())
    with pytest.raises(
        PartFailedError, match="scorer 'words' returned a score of type str; a score is a number, a list of"
    ):
        results(handle, [ended(1)])
    handle.close()
    handle = placement(Scoring(lambda rollouts: [{}]))
    with pytest.raises(PartFailedError, match="scorer 'reward' returned a score of type dict"):
        results(handle, [ended(1)])
    handle.close()


def test_numbers_that_are_not_finite_are_handed_on() -> None:
    handle = InlinePlacement(Scoring(lambda rollouts: [math.nan, -math.inf]))
    nan, infinity = results(handle, [ended(1), ended(2)])
    assert math.isnan(nan)
    assert infinity == -math.inf


def test_inline_an_interrupt_of_the_user_is_no_failure_of_the_scorer() -> None:
    handle = InlinePlacement(Raising("KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        handle.submit([ended(1)])


def test_inline_a_failing_feed_is_the_callers_and_an_exit_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="no appetite"):
        InlinePlacement(FailingFeed("raise")).feed([ended(1)])
    with pytest.raises(PartFailedError, match=r"scorer 'streaming' raised SystemExit\(0\)"):
        InlinePlacement(FailingFeed("exit")).feed([ended(1)])


@pytest.mark.parametrize(
    ("how", "expected", "words"),
    [
        ("raise", ValueError, "no appetite"),
        ("exit", PartFailedError, r"'streaming' raised SystemExit\(0\)"),
    ],
)
def test_in_a_thread_a_failing_feed_is_heard_and_scores_go_on(how: str, expected: Any, words: str) -> None:
    handle = ThreadPlacement(FailingFeed(how))
    handle.feed([ended(7)])
    handle.forget([])  # waits for what runs
    [future] = handle.submit([ended(1)])
    assert future.result(WAIT_S) == -1.0
    handle.feed([ended(8)])
    [future] = handle.submit([ended(1)])
    assert future.result(WAIT_S) == -1.0
    with handle._worker._changed:
        assert handle._worker._changed.wait_for(lambda: handle._worker._failure is not None, WAIT_S)
    with pytest.raises(expected, match=words):
        handle.check()
    handle.close()


def test_a_thread_placement_uses_one_thread_that_is_not_the_callers() -> None:
    threads: set[int] = set()

    def score(rollouts: Any) -> list[float]:
        threads.add(threading.get_ident())
        return [0.0] * len(rollouts)

    handle = ThreadPlacement(Scoring(score))
    for future in [future for draw in range(5) for future in handle.submit([ended(draw)])]:
        future.result(WAIT_S)
    handle.close()
    assert len(threads) == 1
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_was_done_is_on_record_before_its_scores_are_there(placement: Any) -> None:
    handle = placement(Lengths())
    for draw in range(20):
        results(handle, [ended(draw, 4)])
        [span] = handle.take_spans()
        assert span.name == "score lengths"
        assert span.num_tokens == (0 if placement is FunctionPlacement else 4)
        assert span.start_s <= span.stop_s
    handle.close()


# --- functions


def calls_of(call_per: str, rollouts: list[Rollout]) -> list[list[tuple[int, int]]]:
    calls: list[list[tuple[int, int]]] = []

    def score(rollouts: Any) -> list[float]:
        calls.append([tuple(rollout.key) for rollout in rollouts])
        return [float(rollout.key.draw_id) for rollout in rollouts]

    handle = FunctionPlacement(Scoring(score, call_per), num_workers=1)
    assert results(handle, rollouts) == [float(rollout.key.draw_id) for rollout in rollouts]
    handle.close()
    return calls


def test_a_call_holds_a_response_a_whole_group_or_all() -> None:
    rollouts = [ended(4, sample_index=0), ended(2), ended(4, sample_index=1), ended(2, sample_index=1)]
    assert calls_of("response", rollouts) == [[(4, 0)], [(2, 0)], [(4, 1)], [(2, 1)]]
    assert calls_of("group", rollouts) == [[(4, 0), (4, 1)], [(2, 0), (2, 1)]]
    assert calls_of("batch", rollouts) == [[(4, 0), (2, 0), (4, 1), (2, 1)]]


@pytest.mark.parametrize("call_per", ["response", "group"])
def test_a_slow_call_does_not_hold_the_others(call_per: str) -> None:
    is_other_scored = threading.Event()

    def score(rollouts: Any) -> list[float]:
        if rollouts[0].key.draw_id == 0:
            assert is_other_scored.wait(WAIT_S)
        return [1.0] * len(rollouts)

    handle = FunctionPlacement(Scoring(score, call_per))
    slow, other = handle.submit([ended(0), ended(1)])
    other.add_done_callback(lambda _: is_other_scored.set())
    assert slow.result(WAIT_S) == 1.0
    handle.close()


def test_closing_functions_waits_for_what_runs_and_cancels_what_has_not_begun() -> None:
    begun, release = threading.Event(), threading.Event()

    def score(rollouts: Any) -> list[float]:
        begun.set()
        assert release.wait(WAIT_S)
        return [1.0] * len(rollouts)

    handle = FunctionPlacement(Scoring(score), num_workers=1)
    running, waiting = handle.submit([ended(0), ended(1)])
    is_cancelled = threading.Event()
    waiting.add_done_callback(lambda _: is_cancelled.set())
    assert begun.wait(WAIT_S)
    closing = threading.Thread(target=handle.close)
    closing.start()
    assert is_cancelled.wait(WAIT_S)
    assert not running.done()
    release.set()
    closing.join(WAIT_S)
    assert running.result(0) == 1.0
    assert waiting.cancelled()
    handle.close()
    with pytest.raises(
        PartFailedError, match="the placement of scorer 'reward' is closed; build a new engine"
    ):
        handle.submit([ended(2)])


def test_functions_are_not_fed_and_keep_nothing() -> None:
    handle = FunctionPlacement(Streaming())
    assert not handle.can_stream
    handle.feed([ended(1)])
    handle.forget(None)
    assert results(handle, [ended(1)]) == [-1.0]
    handle.close()


# --- a real model


def test_a_model_scores_the_same_in_a_thread_and_from_chunks() -> None:
    rollouts = tiny_rollouts()
    expected = results(InlinePlacement(HFRewardScorer(tiny_classifier())), rollouts)
    num_tokens = sum(len(rollout.prompt.token_ids) + len(rollout.token_ids) for rollout in rollouts)
    for placement in STREAMING_PLACEMENTS:
        scorer = HFRewardScorer(tiny_classifier())
        fed = threading.Semaphore(0)
        feed = scorer.feed
        scorer.feed = lambda rollouts, feed=feed, fed=fed: (feed(rollouts), fed.release())  # type: ignore[method-assign]
        handle = placement(scorer)
        for length in (4, 8):
            parts = [rollout.snapshot() for rollout in rollouts]
            for part in parts:
                part.finish_reason = None
                del part.token_ids[length:]
            handle.feed(parts)
            assert fed.acquire(timeout=WAIT_S)
        assert results(handle, rollouts) == pytest.approx(expected, abs=1e-5)
        spans = handle.take_spans()
        assert [span.name for span in spans] == ["feed reward", "feed reward", "score reward"]
        assert sum(span.num_tokens for span in spans) == num_tokens
        assert spans[0].num_tokens == 3 * 4 + 3 + 4 + 5
        handle.close()


@pytest.mark.timeout(60)
def test_closing_does_not_wait_for_a_call_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    release, begun = threading.Event(), threading.Event()

    class Hanging:
        name = "reward"

        def score(self, rollouts):
            begun.set()
            release.wait()
            return [1.0]

    for module in (functions_module, worker_module):
        monkeypatch.setattr(module, "CLOSE_S", 0.05)
    for place in (FunctionPlacement, ThreadPlacement):
        begun.clear()
        handle = place(Hanging())
        [future] = handle.submit([ended(1)])
        assert begun.wait(30)
        handle.close()
        assert not future.done()
    release.set()


def test_a_thread_placement_goes_by_the_name_that_it_was_placed_under() -> None:
    handle = place_in_thread({"judge": Lengths()})["judge"]
    assert handle.name == "judge"
    assert handle.submit([ended(3)])[0].result(30) == 3.0
    handle.close()
