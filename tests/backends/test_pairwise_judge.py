"""Judges of pairs as rewards: what they are given, what their verdicts become, and whom a slow one holds."""

from __future__ import annotations

import functools
import math
import threading
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from fakes import FakeAlgorithm, FakeGenerator, FakeLearner, FakePrompts, VirtualClock

from oppo_kit.backends.function_scorer import FunctionScorer
from oppo_kit.backends.pairwise_judge import pairwise_reward
from oppo_kit.config import OverlapConfig
from oppo_kit.engine.loop import OverlapEngine
from oppo_kit.errors import ConfigError, PartFailedError, RewardError
from oppo_kit.placement.functions import FunctionPlacement
from oppo_kit.types import Prompt, Rollout, RolloutKey

TOKENIZER = tiny_models.tiny_tokenizer()
WAIT_S = 30.0


def pair(first: str, second: str, prompt: Any = "ask", draw_id: int = 3) -> list[Rollout]:
    asked = Prompt(draw_id, (1, 5), 9, {"prompt": prompt})
    return [
        Rollout(
            RolloutKey(draw_id, member),
            asked,
            [tiny_models.VOCABULARY.index(character) for character in text] + [2],
            finish_reason="stop",
        )
        for member, text in enumerate((first, second))
    ]


def score(judge: Any, rollouts: list[Rollout] | None = None) -> list[Any]:
    scorer = FunctionScorer([pairwise_reward(judge)], TOKENIZER, call_per="group")
    return scorer.score(pair("good", "bad") if rollouts is None else rollouts)


def longest(prompts: list[Any], completions: list[list[Any]], shuffle_order: bool = True) -> list[int]:
    """Cannot decide between equals."""
    lengths = [[len(text) for text in pair] for pair in completions]
    return [-1 if first == second else int(second > first) for first, second in lengths]


# --- what it is given, and what becomes of its verdict


def test_the_better_scores_one_the_worse_zero_and_an_undecided_pair_has_no_scores() -> None:
    assert score(longest) == [1.0, 0.0]
    assert score(longest, pair("bad", "good")) == [0.0, 1.0]
    assert score(longest, pair("bad", "bed")) == [None, None]


def test_text_prompts_are_judged_as_text_and_conversations_as_messages() -> None:
    seen: list[Any] = []

    def spy(prompts: Any, completions: Any, shuffle_order: bool = True) -> list[int]:
        seen.append((prompts, completions, shuffle_order))
        return [0]

    messages = [{"role": "user", "content": "ask"}]
    score(spy)
    score(spy, pair("a", "", messages))
    assert seen == [
        (["ask"], [["good", "bad"]], True),
        (
            [messages],
            [[[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": ""}]]],
            True,
        ),
    ]


def test_an_object_with_a_method_judge_is_a_judge() -> None:
    class Longest:
        def judge(self, prompts: Any, completions: Any, shuffle_order: bool = True) -> list[int]:
            return longest(prompts, completions)

        def __call__(self) -> None:
            raise AssertionError("the method is asked")

    assert score(Longest()) == [1.0, 0.0]
    assert pairwise_reward(Longest()).__name__ == "Longest"


def test_an_argument_of_a_judge_is_fixed_by_a_partial_which_keeps_its_name() -> None:
    orders: list[bool] = []

    def judge(prompts: Any, completions: Any, shuffle_order: bool = True) -> list[int]:
        orders.append(shuffle_order)
        return [0]

    fixed = functools.partial(judge, shuffle_order=False)
    assert score(fixed) == [1.0, 0.0]
    assert orders == [False]
    assert pairwise_reward(fixed).__name__ == "judge"


@pytest.mark.parametrize("results", [(1,), np.array([1]), torch.tensor([1]), [np.int64(1)]])
def test_indices_of_every_kind_are_read(results: Any) -> None:
    assert score(lambda prompts, completions: results) == [0.0, 1.0]


def test_a_judge_is_weighted_and_joined_with_other_rewards() -> None:
    def brevity(completions: list[str], **columns: Any) -> list[float]:
        return [-float(len(text)) for text in completions]

    scorer = FunctionScorer([pairwise_reward(longest), brevity], TOKENIZER, [10.0, 1.0], call_per="group")
    assert scorer.score(pair("good", "bad")) == [6.0, -3.0]


# --- contracts broken


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([], r"but returned 0 for one prompt"),
        ([0, 1], r"but returned 2 for one prompt"),
        (0, r"not int \(0\)"),
        (None, r"not NoneType \(None\)"),
        ("0", r"not str \('0'\)"),
        ([2], r"not 2 \(int\)"),
        ([-2], r"not -2 \(int\)"),
        ([None], r"not None \(NoneType\)"),
        ([True], r"not True \(bool\)"),
        ([1.0], r"not 1.0 \(float\)"),
        (np.array([0.0]), r"not 0.0 \(float\)"),
        (["0"], r"not '0' \(str\)"),
        ([[0]], r"not \[0\] \(list\)"),
    ],
)
def test_another_result_than_one_index_names_the_judge(results: Any, words: str) -> None:
    def odd(prompts: Any, completions: Any) -> Any:
        return results

    with pytest.raises(
        RewardError,
        match=rf"^judge 'odd' must return a list of one index per prompt, 0, 1 or -1 \(undecided\), {words}$",
    ):
        score(odd)


@pytest.mark.parametrize("num_responses", [1, 3, 4])
def test_other_numbers_of_responses_say_what_to_set(num_responses: int) -> None:
    rollouts = [*pair("a", "b"), *pair("c", "d")][:num_responses]
    with pytest.raises(
        RewardError,
        match=f"judge 'longest' compares the two responses to a prompt, but was given {num_responses}; set "
        "call_per to 'group', and train with an algorithm of two responses per prompt, such as online_dpo",
    ):
        score(longest, rollouts)


def test_a_judge_that_raises_is_named_with_its_draw() -> None:
    def broken(prompts: Any, completions: Any) -> list[int]:
        raise TimeoutError("no answer")

    with pytest.raises(
        PartFailedError, match=r"reward function 'broken' raised TimeoutError\('no answer'\).* on draws? 3"
    ):
        score(broken)


def test_what_is_no_judge_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"the judge is a str; give a function that takes prompts and compl"
    ):
        pairwise_reward("longest")


# --- the engine


class Prompts(FakePrompts):
    """The judge sees whose responses it is given."""

    def draw(self, draw_id: int) -> Prompt:
        return Prompt(draw_id, (draw_id % 7 + 1,), self.limit, {"prompt": str(draw_id)})


def trained_batches(judge: Any, *, num_steps: int, **overlap: Any) -> tuple[OverlapEngine, list[Any]]:
    clock = VirtualClock()
    learner: Any = FakeLearner(clock)
    scorer = FunctionScorer([pairwise_reward(judge)], TOKENIZER, call_per="group")
    with OverlapEngine(
        algorithm=FakeAlgorithm(group_size=2),
        generator=FakeGenerator(lambda draw_id, sample_index: 3 + sample_index, clock),
        scorers={"reward": FunctionPlacement(scorer)},
        learner=learner,
        prompts=Prompts(),
        batch_size=2,
        num_steps=num_steps,
        overlap=OverlapConfig(decode_tokens=1, **overlap),
        clock=clock,
    ) as engine:
        list(engine.run())
    return engine, learner.batches


@pytest.mark.parametrize("score_at", ["batch", "sample"])
def test_a_slow_judgement_holds_its_own_pair_and_no_other(score_at: str) -> None:
    """Draw 0 is judged only when draw 1 has been: asked in turn, it would wait in vain."""
    is_other_judged = threading.Event()

    def judge(prompts: list[str], completions: Any) -> list[int]:
        if prompts == ["0"]:
            assert is_other_judged.wait(WAIT_S)
        if prompts == ["1"]:
            is_other_judged.set()
        return [1]

    _, batches = trained_batches(judge, num_steps=2, score_at=score_at)
    assert sorted(group.draw_id for batch in batches for group in batch.groups) == [0, 1, 2, 3]
    assert [batch.scores["reward"].tolist() for batch in batches] == [[0.0, 1.0, 0.0, 1.0]] * 2


def test_an_undecided_pair_is_rejected_and_replaced() -> None:
    engine, (batch,) = trained_batches(
        lambda prompts, completions: [-1 if prompts == ["1"] else 0], num_steps=1
    )
    assert [group.draw_id for group in batch.groups] == [0, 2]
    assert not any(math.isnan(value) for value in batch.scores["reward"].tolist())
    assert engine.state_dict()["rejected"] == {"reward_abstained": 1}


def test_a_judge_that_breaks_its_contract_ends_the_step_with_its_own_words() -> None:
    with pytest.raises(RewardError, match=r"judge '<lambda>' must return .* but returned 2") as info:
        trained_batches(lambda prompts, completions: [0, 1], num_steps=1)
    assert "scorer 'reward' while draw" in "".join(info.value.__notes__)
