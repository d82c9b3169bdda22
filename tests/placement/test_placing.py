"""Where scorers run when nobody says so."""

from __future__ import annotations

import pytest
import torch

from oppo_kit.config import OverlapConfig
from oppo_kit.placement.inline import InlinePlacement
from oppo_kit.placement.placing import place, settle_placement

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def settled(device: torch.device, **overlap) -> tuple[str, int | None]:
    result = settle_placement(OverlapConfig(**overlap), device, num_threads=4)
    assert settle_placement(result, device, num_threads=4) == result, "settling twice changes nothing"
    return result.placement, result.decode_threads


@pytest.mark.parametrize("device", [CPU, GPU])
def test_without_overlap_scorers_stay_inline_and_decoding_has_all_threads(device) -> None:
    assert settled(device) == ("inline", None)
    assert settled(device, placement="process") == ("process", None)


@pytest.mark.parametrize("score_at", ["sample", "chunk", "auto"])
def test_with_overlap_scorers_leave_the_actors_thread(score_at) -> None:
    assert settled(CPU, score_at=score_at) == ("process", 3)
    assert settled(GPU, score_at=score_at) == ("thread", None)


def test_a_critic_that_is_streamed_stays_in_the_process_that_trains_it() -> None:
    assert settled(CPU, score_at="chunk", stream_critic=True) == ("thread", 3)


def test_pinned_scorers_are_in_a_process_also_without_overlap() -> None:
    assert settled(CPU, scorer_cores=(0,)) == ("process", None)


def test_what_was_said_is_kept() -> None:
    assert settled(CPU, score_at="chunk", placement="inline") == ("inline", None)
    assert settled(CPU, score_at="chunk", placement="thread") == ("thread", 3)
    assert settled(CPU, score_at="sample", decode_threads=2) == ("process", 2)
    assert settled(GPU, score_at="sample", decode_threads=2) == ("thread", 2)


def test_decoding_keeps_a_thread_however_many_the_scorers_have() -> None:
    assert settled(CPU, score_at="sample", scorer_threads=9) == ("process", 1)


def test_inline_scorers_are_placed_as_they_are() -> None:
    class Silent:
        name = "reward"

        def score(self, rollouts):
            return [None for _ in rollouts]

    handles = place({"reward": Silent()}, OverlapConfig(placement="inline"), CPU)
    assert isinstance(handles["reward"], InlinePlacement)
    assert place({}, OverlapConfig(placement="process"), CPU) == {}
