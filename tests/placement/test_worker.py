"""The thread that works for scorers: in which order, on what, and what becomes of its errors. Events, no sleeps."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from child_scorers import FailingForget, Lengths, Streaming, Threads, ended

from oppo_kit.errors import PartFailedError
from oppo_kit.placement.thread import ThreadPlacement, place_in_thread
from oppo_kit.placement.worker import ScoringWorker
from oppo_kit.types import Prompt, Rollout, RolloutKey

WAIT_S = 30.0


def live(draw_id: int, num_tokens: int) -> Rollout:
    return Rollout(RolloutKey(draw_id, 0), Prompt(draw_id, (1,), 40), [5] * num_tokens)


class Gated(Streaming):
    """Writes down every call, and stops in those whose first draw is at the gate."""

    name = "gated"

    def __init__(self, gate: int = 0, name: str = "gated", call_per: str = "response") -> None:
        super().__init__()
        self.name = name
        self.call_per = call_per
        self.gate = gate
        self.calls: list[tuple[str, Any]] = []
        self.begun, self.release = threading.Event(), threading.Event()

    def _enter(self, kind: str, rollouts: Any) -> None:
        self.calls.append((kind, [(r.key.draw_id, len(r.token_ids)) for r in rollouts]))
        if rollouts[0].key.draw_id == self.gate:
            self.begun.set()
            assert self.release.wait(WAIT_S)

    def feed(self, rollouts: Any) -> None:
        self._enter("feed", rollouts)
        super().feed(rollouts)

    def score(self, rollouts: Any) -> list[Any]:
        self._enter("score", rollouts)
        return super().score(rollouts)

    def forget(self, keys: Any) -> None:
        self.calls.append(("forget", keys))
        super().forget(keys)


class Gate:
    """A worker that is at work on draw 0, so that whatever comes next has to wait."""

    def __init__(self, **options: Any) -> None:
        self.scorer = Gated(**options)
        self.worker = ScoringWorker({"gated": self.scorer}, lane="test")
        [self.first] = self.worker.submit("gated", [ended(0)])
        assert self.scorer.begun.wait(WAIT_S)

    def open(self) -> None:
        self.scorer.release.set()


def test_submissions_go_before_feeds_and_are_one_call() -> None:
    gate = Gate()
    gate.worker.feed("gated", [live(1, 2)])
    futures = gate.worker.submit("gated", [ended(2), ended(3)]) + gate.worker.submit("gated", [ended(4)])
    gate.open()
    assert [future.result(WAIT_S) for future in futures] == [-1.0] * 3
    [last] = gate.worker.submit("gated", [ended(1)])
    last.result(WAIT_S)
    gate.worker.close()
    scores = [draws for kind, draws in gate.scorer.calls if kind == "score"]
    assert scores[:2] == [[(0, 3)], [(2, 3), (3, 3), (4, 3)]]


@pytest.mark.parametrize("call_per", ["group", "batch"])
def test_submissions_are_not_joined_where_a_score_depends_on_the_call(call_per: str) -> None:
    gate = Gate(call_per=call_per)
    futures = gate.worker.submit("gated", [ended(2), ended(3)]) + gate.worker.submit("gated", [ended(4)])
    gate.open()
    for future in futures:
        future.result(WAIT_S)
    gate.worker.close()
    assert gate.scorer.calls[1:] == [("score", [(2, 3), (3, 3)]), ("score", [(4, 3)])]


def test_the_newest_feed_of_a_rollout_replaces_an_unread_one() -> None:
    gate = Gate(gate=0)
    for num_tokens in (1, 2, 3):
        gate.worker.feed("gated", [live(1, num_tokens), live(2, 10 * num_tokens)])
    gate.worker.feed("gated", [live(1, 4)])
    fed = threading.Event()
    feed = gate.scorer.feed
    gate.scorer.feed = lambda rollouts: (feed(rollouts), fed.set())  # type: ignore[method-assign]
    gate.open()
    assert fed.wait(WAIT_S)
    gate.worker.close()
    assert gate.scorer.calls[1:] == [("feed", [(1, 4), (2, 30)])]


def test_a_submission_drops_the_waiting_feed_of_its_rollouts_only() -> None:
    gate = Gate()
    gate.worker.feed("gated", [live(1, 2), live(2, 2)])
    [future] = gate.worker.submit("gated", [ended(1)])
    fed = threading.Event()
    feed = gate.scorer.feed
    gate.scorer.feed = lambda rollouts: (feed(rollouts), fed.set())  # type: ignore[method-assign]
    gate.open()
    assert future.result(WAIT_S) == -1.0
    assert fed.wait(WAIT_S)
    gate.worker.close()
    assert gate.scorer.calls[1:] == [("score", [(1, 3)]), ("feed", [(2, 2)])]


def test_what_was_handed_on_does_not_change_with_the_rollout() -> None:
    scorer = Gated()
    handle = ThreadPlacement(scorer)
    [first] = handle.submit([ended(0)])
    assert scorer.begun.wait(WAIT_S)
    rollout = live(1, 2)
    handle.feed([rollout])
    rollout.token_ids += [5, 5, 5]
    rollout.finish_reason = "stop"
    fed = threading.Event()
    seen: list[Any] = []
    scorer.feed = lambda rollouts: (seen.extend(rollouts), fed.set())  # type: ignore[method-assign]
    scorer.release.set()
    assert fed.wait(WAIT_S)
    first.result(WAIT_S)
    handle.close()
    assert (seen[0].token_ids, seen[0].finish_reason, seen[0].prompt) == ([5, 5], None, rollout.prompt)


@pytest.mark.parametrize("keys", [None, [RolloutKey(1, 0), RolloutKey(99, 0)]])
def test_forget_waits_for_what_runs_and_goes_before_all_that_waits(keys: Any) -> None:
    """Also where more work is always there: the thread pauses for whoever forgets."""
    gate = Gate()
    gate.worker.feed("gated", [live(1, 2)])
    later = gate.worker.submit("gated", [ended(3)])
    is_forgotten = threading.Event()
    forgetting = threading.Thread(target=lambda: (gate.worker.forget("gated", keys), is_forgotten.set()))
    forgetting.start()
    with gate.worker._changed:
        assert gate.worker._changed.wait_for(lambda: gate.worker._num_forgetting == 1, WAIT_S)
    assert not is_forgotten.is_set()
    assert gate.scorer.calls == [("score", [(0, 3)])]
    gate.open()
    assert is_forgotten.wait(WAIT_S)
    later[0].result(WAIT_S)
    forgetting.join(WAIT_S)
    gate.worker.close()
    assert gate.scorer.calls == [("score", [(0, 3)]), ("forget", keys), ("score", [(3, 3)])]


def test_forget_leaves_the_waiting_feeds_of_others() -> None:
    gate = Gate()
    gate.worker.feed("gated", [live(1, 2), live(2, 2)])
    forgetting = threading.Thread(target=lambda: gate.worker.forget("gated", [RolloutKey(1, 0)]))
    forgetting.start()
    with gate.worker._changed:
        assert gate.worker._changed.wait_for(lambda: gate.worker._num_forgetting == 1, WAIT_S)
    gate.open()
    forgetting.join(WAIT_S)
    fed = threading.Event()
    feed = gate.scorer.feed
    gate.scorer.feed = lambda rollouts: (feed(rollouts), fed.set())  # type: ignore[method-assign]
    gate.worker.feed("gated", [live(3, 1)])
    assert fed.wait(WAIT_S)
    gate.worker.close()
    assert sorted(row for kind, rows in gate.scorer.calls if kind == "feed" for row in rows) == [
        (2, 2),
        (3, 1),
    ]


def test_an_error_of_forget_is_the_callers_and_the_thread_goes_on() -> None:
    worker = ScoringWorker({"streaming": FailingForget()}, lane="test")
    with pytest.raises(ValueError, match="I remember"):
        worker.forget("streaming", None)
    assert worker.submit("streaming", [ended(1)])[0].result(WAIT_S) == -1.0
    worker.close()


def test_closing_waits_for_what_runs_and_cancels_what_has_not_begun() -> None:
    gate = Gate(call_per="group")
    waiting = gate.worker.submit("gated", [ended(2), ended(3)]) + gate.worker.submit("gated", [ended(4)])
    gate.worker.feed("gated", [live(5, 1)])
    closing = threading.Thread(target=gate.worker.close)
    closing.start()
    with gate.worker._changed:
        assert gate.worker._changed.wait_for(lambda: gate.worker._is_closed, WAIT_S)
    assert all(future.cancelled() for future in waiting)
    assert not gate.first.done()
    gate.open()
    closing.join(WAIT_S)
    assert gate.first.result(0) == -1.0
    assert gate.scorer.calls == [("score", [(0, 3)])]
    gate.worker.close()
    gate.worker.forget("gated", None)
    gate.worker.feed("gated", [live(6, 1)])
    with pytest.raises(
        PartFailedError, match="the placement of scorer 'gated' is closed; build a new engine"
    ):
        gate.worker.submit("gated", [ended(7)])


def test_a_score_that_nobody_wants_any_more_is_not_made() -> None:
    gate = Gate(call_per="group")
    unwanted, wanted = (
        gate.worker.submit("gated", [ended(2)]),
        gate.worker.submit("gated", [ended(3), ended(4)]),
    )
    unwanted[0].cancel()
    wanted[0].cancel()
    gate.open()
    assert wanted[1].result(WAIT_S) == -1.0
    gate.worker.close()
    assert gate.scorer.calls[1:] == [("score", [(3, 3), (4, 3)])]


def test_a_thread_that_cannot_go_on_says_so_to_all_who_wait_and_to_those_who_come() -> None:
    def fail() -> None:
        raise MemoryError("no room")

    scorer = Gated(call_per="group")
    worker = ScoringWorker({"gated": scorer}, lane="test", on_work=fail)
    [first] = worker.submit("gated", [ended(0)])
    assert scorer.begun.wait(WAIT_S)
    [second] = worker.submit("gated", [ended(1)])
    scorer.release.set()
    assert first.result(WAIT_S) == -1.0
    words = r"the thread of the test ended: MemoryError\('no room'\)"
    with pytest.raises(PartFailedError, match=words) as info:
        second.result(WAIT_S)
    assert isinstance(info.value.__cause__, MemoryError)
    with pytest.raises(PartFailedError, match=words):
        worker.check()
    with pytest.raises(PartFailedError, match=words):
        worker.submit("gated", [ended(2)])
    worker.forget("gated", None)
    worker.close()


def test_a_thread_that_ends_while_it_works_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise SystemExit(0)

    monkeypatch.setattr("oppo_kit.placement.worker.outcome_of", broken)
    worker = ScoringWorker({"lengths": Lengths()}, lane="test")
    for future in worker.submit("lengths", [ended(1), ended(2)]):
        with pytest.raises(PartFailedError, match=r"the thread of the test ended: SystemExit\(0\)"):
            future.result(WAIT_S)
    worker.close()


def test_several_scorers_of_a_thread_take_turns_and_its_spans_say_who() -> None:
    handles = place_in_thread({"lengths": Lengths(), "streaming": Streaming()})
    assert [future.result(WAIT_S) for future in handles["lengths"].submit([ended(1), ended(2, 5)])] == [
        3.0,
        5.0,
    ]
    assert handles["streaming"].submit([ended(1)])[0].result(WAIT_S) == -1.0
    spans = handles["streaming"].take_spans()
    assert [(span.lane, span.name, span.num_tokens) for span in spans] == [
        ("scorers", "score lengths", 8),
        ("scorers", "score streaming", 0),
    ]
    assert all(span.start_s <= span.stop_s for span in spans)
    assert handles["lengths"].take_spans() == []
    for handle in handles.values():
        handle.close()


def test_a_thread_has_its_own_number_of_cpu_threads_and_the_callers_while_somebody_waits() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        handle = place_in_thread({"threads": Threads()}, num_threads=2)["threads"]
        asked = []
        for draw, is_awaited in enumerate((False, True, False)):
            handle.set_awaited(is_awaited)
            asked.append(handle.submit([ended(draw)])[0].result(WAIT_S))
        handle.close()
        assert asked == [2.0, 3.0, 2.0]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_scorer_that_always_has_feeds_leaves_the_others_their_turn() -> None:
    """The first one is handed new feeds while it works on its last."""
    order: list[str] = []
    done = threading.Event()

    class Ordered(Streaming):
        def __init__(self, name: str, worker: list[ScoringWorker]) -> None:
            super().__init__()
            self.name = name
            self.worker = worker

        def feed(self, rollouts: Any) -> None:
            order.append(self.name)
            if len(order) == 6:
                done.set()
            elif self.name == "first":
                self.worker[0].feed("first", [live(len(order), 1)])
            super().feed(rollouts)

    gate, workers = Gated(), []
    scorers = {"gated": gate, "first": Ordered("first", workers), "second": Ordered("second", workers)}
    worker = ScoringWorker(scorers, lane="test")
    workers.append(worker)
    [held] = worker.submit("gated", [ended(0)])
    assert gate.begun.wait(WAIT_S)
    worker.feed("first", [live(0, 1)])
    worker.feed("second", [live(0, 1)])
    gate.release.set()
    held.result(WAIT_S)
    assert done.wait(WAIT_S)
    worker.close()
    assert order[:3] == ["first", "second", "first"]
