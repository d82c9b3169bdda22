"""How a configuration becomes a workload."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

from harness.workloads import free_form, math_task, tiny
from harness.workloads.base import is_held_out
from harness.workloads.loading import Workload, load_workload
from oppo_kit.backends.rendering import IdsRendering, TextRendering
from oppo_kit.config import TrainConfig, parse_config
from oppo_kit.errors import ConfigError, DataError, ModelError

pytestmark = pytest.mark.usefixtures("no_hub")


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
    assert "which has no score head: score.weight starts at 0" in caplog.text
    padded = torch.tensor([[1, 5], [1, 6]])
    assert critic(input_ids=padded).logits.tolist() == [[0.0], [0.0]]
    assert made.make_policy().config.pad_token_id == made.tokenizer.pad_token_id == 2
    with pytest.raises(ConfigError, match=r"the reward is a function \(chain_reward\), not a model"):
        made.make_reward()


def test_a_reward_model_of_another_vocabulary_reads_text_unless_ids_are_asked_for(
    folders: dict[str, str], prompt_file: str
) -> None:
    """trl#3595."""
    names = {"model": folders["policy"], "reward": folders["permuted"], "dataset": prompt_file}
    made = workload(**names)
    assert made.reward_tokenizer is not None
    assert isinstance(made.reward_rendering(), TextRendering)
    assert made.critic_path == made.policy_path, "a critic reads the policy's ids"
    with pytest.raises(
        ModelError, match="vocabularies differ in 58 tokens .*; set reward_input to 'text', or pass"
    ):
        workload(**names, reward_input="ids")
    same = workload(model=folders["policy"], reward=folders["reward"], dataset=prompt_file)
    assert same.reward_tokenizer is None
    assert isinstance(same.reward_rendering(), IdsRendering)
    asked = workload(
        model=folders["policy"], reward=folders["reward"], dataset=prompt_file, reward_input="text"
    )
    assert isinstance(asked.reward_rendering(), TextRendering)


def test_a_critic_of_another_vocabulary_is_refused(folders: dict[str, str], prompt_file: str) -> None:
    with pytest.raises(ModelError, match="vocabularies differ in 58 tokens"):
        workload(
            model=folders["policy"], reward=folders["reward"], critic=folders["permuted"], dataset=prompt_file
        )


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
