"""A handle says whether its scorer is at work, so that decoding leaves it cores then, and only then."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from child_scorers import FailingFeed, Lengths, Streaming, ended, waiting_pipes
from process_handles import WAIT_S, placed

from oppo_kit.placement.functions import FunctionPlacement
from oppo_kit.placement.inline import InlinePlacement
from oppo_kit.placement.thread import place_in_thread
from oppo_kit.types import Prompt, Rollout, RolloutKey


def live(draw_id: int) -> Rollout:
    return Rollout(RolloutKey(draw_id, 0), Prompt(draw_id, (1,), 9), [5, 5])


def comes_to_rest(handle: Any) -> bool:
    """What is done is not said in the same instant."""
    end_s = time.monotonic() + WAIT_S
    while handle.is_busy and time.monotonic() < end_s:
        time.sleep(0.001)
    return not handle.is_busy


class Held(Streaming):
    """Stops in each call until it is let go on."""

    name = "held"

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Semaphore(0)

    def feed(self, rollouts: Any) -> None:
        assert self.release.acquire(timeout=WAIT_S)
        super().feed(rollouts)

    def score(self, rollouts: Any) -> list[Any]:
        assert self.release.acquire(timeout=WAIT_S)
        return super().score(rollouts)


class HeldByPipe(Streaming):
    """The same in another process; every call reads the pipe once."""

    name = "held"

    def __init__(self, pipe: Path) -> None:
        super().__init__()
        self.pipe = pipe

    def feed(self, rollouts: Any) -> None:
        self.pipe.read_text()
        super().feed(rollouts)

    def score(self, rollouts: Any) -> list[Any]:
        self.pipe.read_text()
        return super().score(rollouts)


@pytest.fixture(params=["thread", "process"])
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Any, Callable[[], Any]]]:
    """A held scorer, an idle one at the same place, and what lets the held one do one piece of work."""
    if request.param == "thread":
        scorer = Held()
        handles = place_in_thread({"held": scorer, "idle": Lengths()})
        let_go: Callable[[], Any] = scorer.release.release
    else:
        pipe = tmp_path / "release"
        os.mkfifo(pipe)
        handles = placed(HeldByPipe(pipe), Lengths())
        handles["idle"] = handles.pop("lengths")

        def let_go() -> None:
            pipe.write_text("x")

    yield handles["held"], handles["idle"], let_go
    for handle in handles.values():
        handle.close()


def test_a_place_is_busy_from_a_submission_to_its_last_score(held: Any) -> None:
    handle, idle, let_go = held
    assert comes_to_rest(handle)
    [first] = handle.submit([ended(1)])
    assert handle.is_busy
    assert idle.is_busy, "they share a place, so they share its cores"
    [second] = idle.submit([ended(2)])
    let_go()
    first.result(WAIT_S)
    second.result(WAIT_S)
    assert comes_to_rest(handle)
    assert not idle.is_busy


def test_a_place_is_busy_until_what_it_was_fed_is_read(held: Any) -> None:
    handle, _, let_go = held
    handle.feed([live(1)])
    assert handle.is_busy
    let_go()
    assert comes_to_rest(handle)
    handle.feed([live(1)])
    handle.feed([live(2)])
    assert handle.is_busy
    let_go()
    assert handle.is_busy or comes_to_rest(handle)  # both may have been read at once
    threading.Thread(target=let_go, daemon=True).start()
    assert comes_to_rest(handle)


def test_what_is_forgotten_unread_keeps_no_place_busy(held: Any) -> None:
    handle, _, let_go = held
    [first] = handle.submit([ended(1)])
    handle.feed([live(2)])
    handle.feed([live(3)])
    forgetting = threading.Thread(target=lambda: handle.forget(None), daemon=True)
    forgetting.start()  # in a thread it waits for what runs
    for _ in range(3):  # as often as there is work, should it be forgotten too late
        threading.Thread(target=let_go, daemon=True).start()
    first.result(WAIT_S)
    forgetting.join(WAIT_S)
    assert comes_to_rest(handle)


def test_a_feed_that_fails_does_not_keep_a_place_busy() -> None:
    for handles in (place_in_thread({"streaming": FailingFeed("raise")}), placed(FailingFeed("raise"))):
        handle: Any = handles["streaming"]
        handle.feed([live(1)])
        assert comes_to_rest(handle)
        with pytest.raises(Exception, match="no appetite"):
            handle.check()
        handle.close()


def test_a_child_that_is_killed_is_not_waited_for(tmp_path: Path) -> None:
    handle = placed(waiting_pipes(tmp_path))["waiting"]
    handle.submit([ended(1)])
    assert (tmp_path / "begun").read_text() == "x"
    assert handle.is_busy
    os.kill(handle._process.pid, 9)
    assert comes_to_rest(handle)


def test_inline_nothing_is_at_work_between_two_calls_and_functions_need_no_cores() -> None:
    inline = InlinePlacement(Lengths())
    inline.submit([ended(1)])
    assert not inline.is_busy
    scorer = Held()
    functions = FunctionPlacement(scorer)
    [score] = functions.submit([ended(1)])
    assert not functions.is_busy
    scorer.release.release()
    score.result(WAIT_S)
    functions.close()
