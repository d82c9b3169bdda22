"""The arguments of PPO's trainer: which are TRL's, what they do, and which are refused."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from peft import get_peft_model
from ppo_trainers import LORA, QUIET, ROWS, make_trainer, weights
from tiny_models import tiny_causal_lm, tiny_classifier, tiny_tokenizer
from transformers import TrainingArguments
from trl_tiny import require_trl

from oppo_kit import OverlapConfig
from oppo_kit.errors import ConfigError, DataError, ModelError, OppoError
from oppo_kit.integrations.trl import ppo, ppo_parts
from oppo_kit.integrations.trl.ppo import OverlapPPOTrainer
from oppo_kit.integrations.trl.ppo_config import OverlapPPOConfig


@pytest.fixture(autouse=True, scope="session")
def _trl() -> None:
    """Instead of the folder's, which wants TRL: our PPO needs none."""


@pytest.fixture
def make(tmp_path):
    return partial(make_trainer, tmp_path)


def test_our_arguments_have_trls_names_and_defaults() -> None:
    require_trl()
    from trl.experimental.ppo import PPOConfig

    def own_fields(config_class: Any) -> dict[str, Any]:
        base = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
        return {
            field.name: field.default
            for field in dataclasses.fields(config_class)
            if field.name not in base or base[field.name] != field.default
        }

    expected = own_fields(PPOConfig)
    assert expected.pop("world_size") is None
    assert expected.pop("gradient_checkpointing") is True
    assert own_fields(OverlapPPOConfig) == expected


@pytest.mark.parametrize(
    ("changes", "num_steps"),
    [
        ({"total_episodes": 7}, 2),
        ({"total_episodes": None, "num_train_epochs": 1.7}, 5),
        ({"max_steps": 1}, 1),
        ({"train_dataset": ROWS[:3], "total_episodes": None, "num_train_epochs": 2}, 2),
        ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 1, "num_mini_batches": 3}, 4),
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "total_episodes": 2}, 2),
    ],
)
def test_odd_sizes_make_as_many_whole_steps_as_trl_counts(make, changes, num_steps) -> None:
    trainer = make(**changes)
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps == trainer.args.num_total_batches == num_steps
    assert all(entry["objective/scores"] == entry["objective/scores"] for entry in trainer.state.log_history)


def test_optimizers_of_ones_own_are_stepped_once_a_mini_batch_and_once_a_step(make) -> None:
    policy, critic = tiny_causal_lm(), tiny_classifier(seed=5)
    optimizer = torch.optim.SGD([*policy.parameters(), *critic.parameters()], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    before = weights(policy, critic)
    trainer = make(model=policy, value_model=critic, optimizers=(optimizer, scheduler), num_mini_batches=2)
    trainer.train()
    assert trainer.lr_scheduler is scheduler
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.5e-3)
    assert [entry["lr"] for entry in trainer.state.log_history] == pytest.approx([0.5, 0.05, 0.005])
    assert not any(map(torch.equal, before, weights(policy, critic)))


def test_the_optimizer_is_as_the_trainer_of_transformers_makes_it(make) -> None:
    from transformers import Trainer

    trainer = make(
        weight_decay=0.1,
        optim="adamw_torch",
        adam_beta2=0.9,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        total_episodes=12,
    )
    [decaying, others] = trainer.optimizer.param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert decaying["betas"] == (0.9, 0.9)
    module = trainer.engine.learner._module
    expected = set(Trainer.get_decay_parameter_names(None, module))  # type: ignore[arg-type]
    held = {id(parameter) for parameter in decaying["params"]}
    assert {name for name, parameter in module.named_parameters() if id(parameter) in held} == expected
    trainer.train()
    assert [entry["lr"] for entry in trainer.state.log_history] == pytest.approx([0, 1e-3, 0.5e-3])


def test_the_integration_needs_no_trl(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    names = [name for name in sys.modules if name.startswith("oppo_kit.integrations.trl.ppo")]
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    assert import_module("oppo_kit.integrations.trl.ppo").OverlapPPOTrainer is not OverlapPPOTrainer
    assert len(names) == 5


IMAGE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"stop_token": "eos"}, ConfigError, "stop_token='eos' and stop_token_id=10 are both set"),
        ({"stop_token": "end", "stop_token_id": None}, ConfigError, "stop_token='end' is unknown"),
        (
            {"stop_token_id": None, "missing_eos_penalty": 1.0},
            ConfigError,
            r"missing_eos_penalty=1\.0 .* without a stop token these are all",
        ),
        (
            {"num_mini_batches": 3},
            ConfigError,
            r"num_mini_batches=3 does not divide the batch of 4 .*it may be one of \[1, 2, 4\]",
        ),
        ({"total_episodes": 0}, ConfigError, "total_episodes=0 trains nothing"),
        ({"kl_estimator": "k2"}, ConfigError, "kl_estimator = 'k2'"),
        ({"temperature": 0.0}, ConfigError, r"temperature = 0\.0"),
        ({"fp16": True, "bf16": None, "use_cpu": False}, ConfigError, "fp16=True is not supported .* bf16"),
        ({"push_to_hub": True}, ConfigError, "push_to_hub=True is not supported .*save_model"),
        ({"args": TrainingArguments(**QUIET)}, ConfigError, "TrainingArguments without num_ppo_epochs"),
        ({"overlap": OverlapConfig(schedule="oppo", delta=9)}, ConfigError, "delta=9 exceeds"),
        ({"optimizers": (None, object())}, ConfigError, "a schedule, but no optimizer"),
        (
            {"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)},
            ConfigError,
            "the optimizer holds no parameter that is trained",
        ),
        ({"peft_config": {"r": 4}}, ConfigError, r"peft_config is a dict; pass a peft\.PeftConfig"),
        ({"processing_class": object()}, ConfigError, "processing_class is a object; pass the policy's tok"),
        ({"train_dataset": iter(ROWS)}, DataError, "train_dataset is a list_iterator without a length"),
        ({"train_dataset": [{"text": "a"}]}, DataError, "row 0 of train_dataset has neither .*but text"),
        ({"train_dataset": [{"prompt": "a", "tools": []}]}, DataError, "row 0 of train_dataset has tools"),
        ({"eval_dataset": [{"prompt": IMAGE}]}, DataError, "row 0 of eval_dataset has prompt with parts"),
        ({"data_collator": lambda rows: {"a": rows}}, DataError, "data_collator returned no 'input_ids'"),
        ({"response_length": 250}, DataError, r"the longest prompt has 12 tokens.* context of 256"),
        ({"reward_model": "gpt2"}, ModelError, "reward_model is a str; pass a model"),
    ],
)
def test_arguments_that_cannot_work_are_refused_with_what_can(make, changes, error, words) -> None:
    with pytest.raises(error, match=words) as caught:
        make(**changes)
    assert isinstance(caught.value, OppoError)


def test_models_that_are_one_object_are_refused(make) -> None:
    policy, classifier = tiny_causal_lm(), tiny_classifier()
    with pytest.raises(ConfigError, match="model and ref_model are one object"):
        make(model=policy, ref_model=policy)
    with pytest.raises(ModelError, match="value_model and reward_model are one object"):
        make(reward_model=classifier, value_model=classifier)


def test_adapters_that_cannot_be_trained_are_refused(make) -> None:
    wrapped = get_peft_model(tiny_causal_lm(), LORA)
    with pytest.raises(ConfigError, match="model is a PEFT model already, and peft_config is given too"):
        make(model=wrapped, peft_config=LORA)
    with pytest.raises(ModelError, match="no parameter of model requires a gradient"):
        make(model=wrapped.requires_grad_(False))


def test_a_conversation_needs_a_chat_template_and_eos_a_tokenizer_that_has_one(make) -> None:
    plain = tiny_tokenizer()
    with pytest.raises(DataError, match="row 0 is a conversation, but the tokenizer has no chat template"):
        make(processing_class=plain, train_dataset=[{"prompt": [{"role": "user", "content": "a"}]}])
    plain.eos_token = None
    with pytest.raises(ConfigError, match="the tokenizer has no EOS token; set stop_token_id"):
        make(processing_class=plain, stop_token="eos", stop_token_id=None)


def test_several_processes_and_a_second_device_are_refused(make, monkeypatch) -> None:
    class Two:
        num_processes = 2

    monkeypatch.setattr(ppo, "make_accelerator", lambda _: Two())
    with pytest.raises(ConfigError, match="2 processes were started, but training runs in one"):
        make()

    def refuse(**_: Any) -> None:
        raise ValueError("AcceleratorState has already been initialized")

    monkeypatch.undo()
    monkeypatch.setattr(ppo_parts, "Accelerator", refuse)
    with pytest.raises(
        ConfigError, match="bf16=False, use_cpu=True cannot be set up: Accel.* start a new one"
    ):
        make()
