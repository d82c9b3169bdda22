"""Scorers in a process of their own: the same scores, and no death on either side goes unheard.

Named pipes say where a child is; where a test waits longer than it should, something hangs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import child_scorers
import pytest
import torch
from child_scorers import Lengths, Raising, Streaming, ended
from process_handles import WAIT_S, Handles, placed, results
from tiny_models import tiny_classifier, tiny_rollouts

from oppo_kit import errors
from oppo_kit.backends.hf_scorer import HFRewardScorer
from oppo_kit.errors import ConfigError, PartFailedError, RewardError
from oppo_kit.placement.inline import InlinePlacement
from oppo_kit.placement.messages import Failure, rebuilt
from oppo_kit.types import Prompt, Rollout, RolloutKey

OURS = ["RewardError", "ModelError", "NonFiniteError", "ConfigError", "DataError", "StateError"]

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="pins and maps as Linux does")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipes")


@pytest.fixture(scope="module")
def big() -> child_scorers.Big:
    return child_scorers.Big()


@pytest.fixture(scope="module")
def handles(folder: Path, big: child_scorers.Big) -> Iterator[Handles]:
    """One child for all that leaves it whole; it has two threads and one core."""
    os.mkfifo(folder / "fed")
    handles = placed(
        Lengths(),
        Streaming(),
        child_scorers.Threads(),
        child_scorers.Cores(),
        child_scorers.Niceness(),
        child_scorers.Exiting(),
        child_scorers.Short(),
        child_scorers.Tensors(),
        child_scorers.Column(),
        child_scorers.RaisingOwn(),
        *(Raising(name, "with words") for name in (*OURS, "ValueError")),
        Raising("UnknownNameError", "algorithm", "pop", ["ppo"]),
        big,
        child_scorers.Announced(HFRewardScorer(tiny_classifier()), folder / "fed"),
        num_threads=2,
        cores=[0],
    )
    yield handles
    for handle in handles.values():
        handle.close()


# --- scores


def test_scores_come_back_in_order_through_the_futures(handles: Handles) -> None:
    handle = handles["lengths"]
    assert (handle.name, handle.call_per, handle.can_stream, handle.follows_weights) == (
        "lengths",
        "response",
        False,
        False,
    )
    handle.take_spans()
    first, second = handle.submit([ended(3, 4), ended(1, 2)]), handle.submit([ended(2, 0)])
    assert [future.result(WAIT_S) for future in first + second] == [4.0, 2.0, None]
    spans = handle.take_spans()
    assert {(span.lane, span.name) for span in spans} == {("scoring process", "score lengths")}
    assert sum(span.num_tokens for span in spans) == 6
    assert handle.submit([]) == []
    handle.check()


def test_what_was_done_is_on_record_before_its_scores_are_there(handles: Handles) -> None:
    for draw in range(20):
        results(handles["lengths"], ended(draw, 4))
        [span] = handles["streaming"].take_spans()
        assert (span.name, span.num_tokens) == ("score lengths", 4)


def test_tensors_do_not_travel_as_tensors(handles: Handles) -> None:
    assert results(handles["tensors"], ended(1), ended(2), ended(3)) == [2.5, [1.0, 2.0], 3.0]
    rollout = ended(1)
    prompt = Prompt(1, (1,), 4, {"numbers": torch.tensor([1.0, 2.5])})
    assert results(handles["column"], Rollout(rollout.key, prompt, [5], finish_reason="stop")) == [3.5]


def test_what_was_fed_is_there_until_it_is_forgotten(handles: Handles) -> None:
    handle = handles["streaming"]
    assert handle.can_stream
    rollouts = [Rollout(RolloutKey(draw, 0), Prompt(draw, (1,), 9), [5, 5]) for draw in range(4)]
    handle.feed(rollouts)
    # A forget waits for what runs, and drops what does not: after it, all others are fed.
    handle.forget([])
    handle.forget([RolloutKey(1, 0)])
    scores = results(handle, *rollouts)
    assert scores[1] == -1.0
    assert set(scores) <= {2.0, -1.0}
    handle.feed(rollouts)
    handle.forget(None)
    assert results(handle, *rollouts) == [-1.0] * 4


def test_a_model_scores_the_same_from_chunks(handles: Handles, folder: Path) -> None:
    rollouts = tiny_rollouts()
    inline = InlinePlacement(HFRewardScorer(tiny_classifier()))
    expected = [future.result(0) for future in inline.submit(rollouts)]
    handle = handles["reward"]
    assert results(handle, *rollouts) == pytest.approx(expected, abs=1e-5)
    handle.take_spans()
    for length in (4, 8):
        parts = [rollout.snapshot() for rollout in rollouts]
        for part in parts:
            part.finish_reason = None
            del part.token_ids[length:]
        handle.feed(parts)
        assert (folder / "fed").read_text() == "x"
    assert results(handle, *rollouts) == pytest.approx(expected, abs=1e-5)
    spans = handle.take_spans()
    assert [span.name for span in spans] == ["feed reward", "feed reward", "score reward"]
    num_tokens = sum(len(rollout.prompt.token_ids) + len(rollout.token_ids) for rollout in rollouts)
    assert sum(span.num_tokens for span in spans) == num_tokens
    assert spans[0].num_tokens == 3 * 4 + 3 + 4 + 5


def test_the_child_has_its_cores_and_its_threads_and_all_its_cores_while_somebody_waits(
    handles: Handles,
) -> None:
    assert results(handles["cores"], ended(1)) == [[0.0]]
    assert results(handles["threads"], ended(1)) == [2.0]
    handles["threads"].set_awaited(True)
    assert results(handles["threads"], ended(2)) == [1.0]
    handles["threads"].set_awaited(False)
    assert results(handles["threads"], ended(3)) == [2.0]
    tasks = Path(f"/proc/{handles['cores']._process.pid}/task").iterdir()
    assert {tuple(os.sched_getaffinity(int(task.name))) for task in tasks} == {(0,)}


def test_the_child_gives_way_on_cores_that_it_shares_and_not_on_its_own(handles: Handles) -> None:
    assert results(handles["niceness"], ended(1)) == [float(os.nice(0))]
    sharing = placed(child_scorers.Niceness())["niceness"]
    assert results(sharing, ended(1)) == [19.0]
    sharing.close()


def test_a_big_module_is_mapped_and_no_copy_stays_in_shared_memory(
    handles: Handles, big: child_scorers.Big
) -> None:
    assert results(handles["big"], ended(1)) == [pytest.approx(float(big.module.weight.double().sum()))]
    maps = Path(f"/proc/{handles['big']._process.pid}/maps").read_text().splitlines()
    assert not [line for line in maps if "/dev/shm" in line or "/torch_" in line]
    sizes = []
    for line in maps:
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if line.endswith("(deleted)"):
            sizes.append(last - first)
    assert max(sizes, default=0) >= big.module.weight.nbytes


# --- failures


@pytest.mark.parametrize("name", OURS)
def test_an_error_of_ours_keeps_its_class(handles: Handles, name: str) -> None:
    with pytest.raises(getattr(errors, name), match="^with words$") as info:
        results(handles[f"raising {name}"], ended(1))
    assert type(info.value) is getattr(errors, name)
    handles["lengths"].check()


def test_an_error_of_ours_that_makes_its_own_words_keeps_them(handles: Handles) -> None:
    with pytest.raises(errors.UnknownNameError, match="^unknown algorithm 'pop'; did you mean 'ppo'") as info:
        results(handles["raising UnknownNameError"], ended(1))
    assert isinstance(info.value, ConfigError)


def test_an_error_derived_from_ours_becomes_ours(handles: Handles) -> None:
    with pytest.raises(RewardError, match="^mine$"):
        results(handles["raising own"], ended(1))


def test_any_other_error_names_its_type_and_where_it_was_raised(handles: Handles) -> None:
    with pytest.raises(PartFailedError, match="^ValueError: with words\n") as info:
        results(handles["raising ValueError"], ended(1))
    assert "child_scorers.py" in info.value.__notes__[0]
    assert type(rebuilt(Failure("Iterable", "no error", ""))) is PartFailedError


def test_an_exit_is_a_failure_and_no_end(handles: Handles) -> None:
    for _ in range(2):
        with pytest.raises(PartFailedError, match=r"scorer 'exiting' raised SystemExit\(3\)"):
            results(handles["exiting"], ended(1))
    assert results(handles["lengths"], ended(1)) == [3.0]


def test_another_number_of_scores_is_named(handles: Handles) -> None:
    with pytest.raises(PartFailedError, match="'short' returned 0 scores for 1 rollouts; one each is needed"):
        results(handles["short"], ended(1))


def test_a_prompt_that_cannot_be_sent_says_so(handles: Handles) -> None:
    rollout = Rollout(RolloutKey(1, 0), Prompt(1, (1,), 4, {"check": lambda: None}))
    with pytest.raises(
        PartFailedError,
        match="cannot be sent to the scoring process: .*keep to numbers, text, lists and dicts",
    ):
        handles["lengths"].submit([rollout])
