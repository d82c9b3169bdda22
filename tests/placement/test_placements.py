"""Where a scorer runs changes neither its scores nor that its failures are heard."""

from __future__ import annotations

import threading

import pytest

from oppo_kit.placement.inline import InlinePlacement
from oppo_kit.placement.thread import ThreadPlacement
from oppo_kit.types import Prompt, Rollout, RolloutKey

ROLLOUTS = [Rollout(RolloutKey(draw, 0), Prompt(draw, (1,), 4), token_ids=[3] * draw) for draw in range(3)]


class Lengths:
    name = "reward"

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def score(self, rollouts):
        self.threads.add(threading.get_ident())
        return [float(len(rollout.token_ids)) for rollout in rollouts]


class Failing:
    name = "reward"

    def score(self, rollouts):
        raise ValueError("no coffee")


@pytest.mark.parametrize("placement", [InlinePlacement, ThreadPlacement])
def test_scores_come_back_in_order_through_the_future(placement) -> None:
    handle = placement(Lengths())
    assert handle.name == "reward"
    assert handle.submit(ROLLOUTS).result(timeout=30) == [0.0, 1.0, 2.0]
    handle.close()


@pytest.mark.parametrize("placement", [InlinePlacement, ThreadPlacement])
def test_a_failure_is_the_futures_exception(placement) -> None:
    handle = placement(Failing())
    with pytest.raises(ValueError, match="no coffee"):
        handle.submit(ROLLOUTS).result(timeout=30)
    handle.close()


def test_a_thread_placement_uses_one_thread_that_is_not_the_callers() -> None:
    scorer = Lengths()
    handle = ThreadPlacement(scorer)
    for future in [handle.submit(ROLLOUTS) for _ in range(5)]:
        future.result(timeout=30)
    handle.close()
    assert len(scorer.threads) == 1
    assert threading.get_ident() not in scorer.threads


def test_closing_waits_for_what_runs_and_cancels_what_has_not_begun() -> None:
    release, begun = threading.Event(), threading.Event()

    class Slow:
        name = "reward"

        def score(self, rollouts):
            begun.set()
            release.wait(30)
            return [1.0]

    handle = ThreadPlacement(Slow())
    running, waiting = handle.submit(ROLLOUTS[:1]), handle.submit(ROLLOUTS[:1])
    assert begun.wait(30)
    release.set()
    handle.close()
    assert running.result(timeout=0) == [1.0]
    assert waiting.cancelled() or waiting.result(timeout=0) == [1.0]
