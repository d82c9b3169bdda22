"""Function rewards: what a function is given, and what becomes of everything it may return."""

from __future__ import annotations

import asyncio
import copy
import functools
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tiny_models
import torch

from oppo_kit.backends.function_scorer import FunctionScorer, name_of
from oppo_kit.errors import ConfigError, PartFailedError, RewardError
from oppo_kit.types import Prompt, Rollout, RolloutKey

EOS = 2
TOKENIZER = tiny_models.tiny_tokenizer()


def ids_of(text: str) -> list[int]:
    return [tiny_models.VOCABULARY.index(character) for character in text]


def rollout(draw_id: int, response: str, *, is_stopped: bool = True, **columns: Any) -> Rollout:
    prompt = Prompt(draw_id, (1, *ids_of("ask")), 9, {"prompt": "ask", **columns})
    token_ids = ids_of(response) + ([EOS] if is_stopped else [])
    made = Rollout(RolloutKey(draw_id, 0), prompt, token_ids)
    made.finish_reason = "stop" if is_stopped else "length"
    return made


THREE = [rollout(7, "a"), rollout(8, "bb", is_stopped=False), rollout(12, "")]


def score(*functions: Any, rollouts: list[Rollout] | None = None, **options: Any) -> list[Any]:
    return FunctionScorer(functions, TOKENIZER, **options).score(THREE if rollouts is None else rollouts)


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def seen_by(rollouts: list[Rollout], **options: Any) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def spy(**arguments: Any) -> list[float]:
        seen.update(arguments)
        return [0.0] * len(rollouts)

    FunctionScorer([spy], TOKENIZER, **options).score(rollouts)
    return seen


# --- what a function is given


def test_text_prompts_give_text_without_special_tokens() -> None:
    rollouts = [rollout(0, "hi", answer=3), rollout(1, "oh", is_stopped=False, answer=4)]
    assert seen_by(rollouts) == {
        "prompts": ["ask", "ask"],
        "completions": ["hi", "oh"],
        "completion_ids": [[*ids_of("hi"), EOS], ids_of("oh")],
        "is_stopped": [True, False],
        "answer": [3, 4],
    }


def test_conversations_give_assistant_messages() -> None:
    messages = [{"role": "user", "content": "ask"}]
    seen = seen_by([rollout(0, "hi", prompt=messages)])
    assert seen["prompts"] == [messages]
    assert seen["completions"] == [[{"role": "assistant", "content": "hi"}]]


def test_the_prompt_may_stand_in_another_column_or_be_decoded() -> None:
    rollouts = [rollout(0, "hi", question="what?")]
    assert seen_by(rollouts, prompt_column="question")["prompts"] == ["what?"]
    assert seen_by(rollouts, prompt_column="nowhere")["prompts"] == ["ask"]


def test_a_column_that_some_rows_lack_is_none_there() -> None:
    assert seen_by([rollout(0, "a", hint="x"), rollout(1, "b")])["hint"] == ["x", None]


def test_a_column_never_replaces_an_argument() -> None:
    seen = seen_by([rollout(0, "hi", completions="evil", is_stopped="evil")])
    assert (seen["completions"], seen["is_stopped"]) == (["hi"], [True])


def test_a_function_that_changes_its_lists_does_not_disturb_the_next() -> None:
    def clear(completions: list[str], **columns: Any) -> list[float]:
        completions.clear()
        return [0.0] * 3

    assert score(clear, length) == [1.0, 2.0, 0.0]


def test_a_function_that_changes_prompts_and_columns_changes_neither_the_data_nor_what_the_next_sees() -> (
    None
):
    columns = {"prompt": [{"role": "user", "content": "ask"}], "tags": ["x"], "info": {"steps": [1]}}
    rollouts = [rollout(0, "hi", **copy.deepcopy(columns))]
    seen: list[Any] = []

    def careless(prompts: Any, tags: Any, info: Any, **columns: Any) -> list[float]:
        seen.append(copy.deepcopy((prompts[0], tags[0], info[0])))
        prompts[0].append({"role": "assistant", "content": "no"})
        prompts[0][0]["content"] = "changed"
        tags[0].append("y")
        info[0]["steps"].append(2)
        return [0.0]

    score(careless, careless, rollouts=rollouts)
    assert rollouts[0].prompt.columns == columns
    assert seen == [tuple(columns.values())] * 2


def test_an_eos_inside_the_vocabulary_of_a_pad_eos_tokenizer_is_no_text() -> None:
    tokenizer = tiny_models.tiny_tokenizer(is_pad_eos=True)
    assert FunctionScorer([length], tokenizer).score(THREE) == [1.0, 2.0, 0.0]


# --- what it returns


def test_scores_are_weighted_and_summed() -> None:
    def two(**columns: Any) -> list[float]:
        return [2.0] * 3

    assert score(length, two) == [3.0, 4.0, 2.0]
    assert score(length, two, weights=[10.0, 0.5]) == [11.0, 21.0, 1.0]


def test_abstaining_counts_for_nothing_and_all_abstaining_gives_none() -> None:
    def first(**columns: Any) -> list[float | None]:
        return [None, 0.0, None]

    def second(**columns: Any) -> list[float | None]:
        return [5.0, 1.0, None]

    assert score(first, second, weights=[1.0, 2.0]) == [10.0, 2.0, None]


def test_nan_and_infinity_are_handed_on_for_the_engine_to_reject() -> None:
    values = score(lambda **columns: [math.nan, math.inf, -math.inf])
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]


@pytest.mark.parametrize(
    "results", [(1, True, 2.5), torch.tensor([1.0, 1.0, 2.5]), [torch.tensor(1), 1, 2.5]]
)
def test_numbers_of_every_kind_become_floats(results: Any) -> None:
    values = score(lambda **columns: results)
    assert values == [1.0, 1.0, 2.5]
    assert {type(value) for value in values} == {float}


def test_async_functions_run_also_where_a_loop_is_running() -> None:
    async def slow(completions: list[str], **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        return length(completions)

    async def notebook() -> list[Any]:
        return score(slow)

    assert score(slow, length) == [2.0, 4.0, 0.0]
    assert asyncio.run(notebook()) == [1.0, 2.0, 0.0]


def test_no_rollouts_call_no_function() -> None:
    assert score(lambda **columns: pytest.fail("called"), rollouts=[]) == []


# --- contracts broken


def test_a_function_that_raises_is_named_with_its_draws() -> None:
    def broken(**columns: Any) -> list[float]:
        raise KeyError("answer")

    with pytest.raises(
        PartFailedError, match=r"reward function 'broken' raised KeyError\('answer'\) on draws 7, 8, 12"
    ) as info:
        score(broken)
    assert isinstance(info.value.__cause__, KeyError)


def test_the_line_that_raised_is_told() -> None:
    def broken(**columns: Any) -> list[float]:
        return [1 / 0]

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(
        PartFailedError, match=rf"on draws 7, 8, 12 \(.*test_function_scorer.py, line {line}\)"
    ):
        score(broken)


def test_an_exception_that_cannot_be_printed_is_named_by_its_class() -> None:
    class UnprintableError(Exception):
        def __repr__(self) -> str:
            raise RuntimeError("no words")

    def broken(**columns: Any) -> list[float]:
        raise UnprintableError

    with pytest.raises(PartFailedError, match="reward function 'broken' raised UnprintableError on draws 7"):
        score(broken)


def test_an_interrupt_that_a_function_raises_in_a_thread_is_its_own() -> None:
    def interrupts(**columns: Any) -> list[float]:
        raise KeyboardInterrupt

    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(PartFailedError, match="'interrupts' raised KeyboardInt"),
    ):
        pool.submit(score, interrupts).result(60)
    with pytest.raises(KeyboardInterrupt):
        score(interrupts)


def test_an_async_function_that_raises_is_named_too() -> None:
    async def broken(**columns: Any) -> list[float]:
        raise ValueError("no")

    with pytest.raises(PartFailedError, match="reward function 'broken' raised ValueError"):
        score(broken)


def test_a_function_that_exits_does_not_end_the_training_as_if_it_were_complete() -> None:
    def leaves(**columns: Any) -> list[float]:
        sys.exit(0)

    async def leaves_later(**columns: Any) -> list[float]:
        sys.exit(0)

    for function in (leaves, leaves_later):
        with pytest.raises(
            PartFailedError,
            match=rf"reward function '{function.__name__}' raised SystemExit\(0\) on draws 7, 8",
        ):
            score(function)


def test_a_function_whose_task_is_cancelled_is_named_too() -> None:
    async def cancelled(**columns: Any) -> list[float]:
        raise asyncio.CancelledError

    with pytest.raises(PartFailedError, match=r"'cancelled' raised CancelledError\(\) on draws 7, 8, 12"):
        score(cancelled)


@pytest.mark.parametrize("exponent", [400, 5000])
def test_a_number_too_large_for_a_float_is_refused_without_being_printed(exponent: int) -> None:
    def huge(**columns: Any) -> list[Any]:
        return [0.0, 10**exponent, 0.0]

    with pytest.raises(
        RewardError, match=r"'huge' returned a number too large for a float \(int\) for draw 8; return one of"
    ):
        score(huge)


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([1.0], "list of 3 numbers or None, one per completion, but returned 1; nothing is broadcast"),
        ([1.0] * 4, "but returned 4"),
        ([], "but returned 0"),
        (1.0, r"not float \(1.0\); nothing is broadcast"),
        (None, "not NoneType"),
        ("abc", "not str"),
        (torch.tensor(1.0), "not float"),
    ],
)
def test_another_number_of_results_is_refused_and_never_broadcast(results: Any, words: str) -> None:
    def one(**columns: Any) -> Any:
        return results

    with pytest.raises(RewardError, match=f"reward function 'one' must return a .*{words}"):
        score(one)


@pytest.mark.parametrize("value", ["1.0", [1.0], {}, b"1", torch.tensor([1.0, 2.0]), torch.tensor(1j)])
def test_a_result_that_is_no_number_names_function_and_draw(value: Any) -> None:
    def odd(**columns: Any) -> list[Any]:
        return [0.0, value, 0.0]

    with pytest.raises(
        RewardError, match=r"reward function 'odd' returned .* for draw 8; return a number, or None"
    ):
        score(odd)


def test_objects_and_partials_have_a_name() -> None:
    class Brevity:
        def __call__(self, **columns: Any) -> list[float]:
            raise ValueError("no")

    assert name_of(functools.partial(functools.partial(length), scale=2)) == "length"
    with pytest.raises(PartFailedError, match="reward function 'Brevity' raised ValueError"):
        score(Brevity())


def test_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs at least one function"):
        FunctionScorer([], TOKENIZER)


def test_another_number_of_weights_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"2 reward weights for 1 functions \(length\); give one weight each"
    ):
        FunctionScorer([length], TOKENIZER, weights=[1.0, 2.0])


def test_what_one_call_holds_is_one_of_three_words() -> None:
    assert FunctionScorer([length], TOKENIZER).call_per == "response"
    for call_per in ("response", "group", "batch"):
        assert FunctionScorer([length], TOKENIZER, call_per=call_per).call_per == call_per
    with pytest.raises(
        ConfigError, match="call_per is 'grup'; did you mean 'group'.* known: batch, group, response"
    ):
        FunctionScorer([length], TOKENIZER, call_per="grup")  # type: ignore[arg-type]


def test_all_async_calls_run_on_one_event_loop() -> None:
    """A client's session or a semaphore that a function keeps belongs to the loop that made it."""
    loops = []

    async def remembers(prompts, completions, **columns):
        loops.append(asyncio.get_running_loop())
        return [1.0 for _ in completions]

    scorer = FunctionScorer([remembers], TOKENIZER)
    for draw_id, response in enumerate("ab"):
        assert scorer.score([rollout(draw_id, response)]) == [1.0]
    assert loops[0] is loops[1]
