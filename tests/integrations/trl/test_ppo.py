"""Our PPO under the interface of TRL 1.12's trainer, on tiny real models."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from peft import get_peft_model
from ppo_trainers import (
    LORA,
    OVERLAP,
    QUIET,
    ROWS,
    TOKENIZER,
    WORDS,
    make_trainer,
    prompts_of,
    watch,
    weights,
)
from tiny_models import tiny_causal_lm, tiny_classifier, tiny_tokenizer
from transformers import TrainerCallback
from trl_tiny import require_trl

from oppo_kit.errors import StateError


@pytest.fixture(autouse=True, scope="session")
def _trl() -> None:
    """Instead of the folder's, which wants TRL: our PPO needs none."""


@pytest.fixture
def make(tmp_path):
    return partial(make_trainer, tmp_path)


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []
        self.models: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def record(args: Any, state: Any, control: Any, **others: Any) -> None:
            self.events.append(name)
            self.models.add(type(others["model"]).__name__)

        return record


def test_training_moves_every_parameter_of_policy_and_critic_and_no_other(make) -> None:
    policy, critic, reward, reference = (
        tiny_causal_lm(),
        tiny_classifier(seed=5),
        tiny_classifier(),
        tiny_causal_lm(seed=3),
    )
    trained, frozen = weights(policy, critic), weights(reward, reference)
    trainer = make(model=policy, value_model=critic, reward_model=reward, ref_model=reference)
    output = trainer.train()
    assert output.global_step == 3
    assert output.metrics["train_loss"] == output.training_loss != 0
    for before, after in zip(trained, weights(trainer.model, trainer.value_model), strict=True):
        assert not torch.equal(before, after)
    assert trainer.model is policy
    assert all(map(torch.equal, frozen, weights(reward, reference)))
    # Another reference than the policy: the first step's KL is not 0.
    assert abs(trainer.state.log_history[0]["objective/kl"]) > 0.1


def test_a_fresh_adapter_is_trained_alone_and_its_reference_is_the_base(make, tmp_path) -> None:
    policy = tiny_causal_lm()
    base = weights(policy)
    trainer = make(model=policy, peft_config=LORA, total_episodes=8, num_ppo_epochs=2)
    adapter = [p.detach().clone() for n, p in trainer.model.named_parameters() if "lora_B" in n]
    reference = trainer.engine.scorers["reference"]._scorer.module
    shared = {id(parameter) for parameter in trainer.model.parameters()}
    assert all(id(parameter) in shared for parameter in reference.parameters())
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert all(map(torch.equal, base, (p for n, p in after.items() if "lora" not in n)))
    assert not any(map(torch.equal, adapter, (p for n, p in after.items() if "lora_B" in n)))
    first, second = (entry["objective/kl"] for entry in trainer.state.log_history)
    assert first == pytest.approx(0, abs=1e-4)
    assert abs(second) > 1e-6
    assert all(module.p == 0 for module in trainer.model.modules() if isinstance(module, torch.nn.Dropout))
    # Dropout would show here: the policy of the update would not be the one that sampled.
    assert trainer.state.log_history[0]["oppo/behaviour_gap_max"] < 1e-4
    trainer.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "adapter_model.safetensors").is_file()


def wrapped_with_two_adapters() -> Any:
    policy: Any = get_peft_model(tiny_causal_lm(), dataclasses.replace(LORA, init_lora_weights=False))
    policy.add_adapter("twin", policy.peft_config["default"])
    state = policy.state_dict()
    policy.load_state_dict(
        {name.replace("default", "twin"): value for name, value in state.items() if "default" in name},
        strict=False,
    )
    return policy


def test_the_reference_of_a_trained_adapter_is_the_base_or_the_adapter_that_is_named(make) -> None:
    kl = {}
    for name in (None, "twin"):
        trainer = make(
            model=wrapped_with_two_adapters(),
            model_adapter_name="default",
            ref_adapter_name=name,
            total_episodes=8,
        )
        twin = [p.detach().clone() for n, p in trainer.model.named_parameters() if "twin" in n]
        trainer.train()
        assert all(map(torch.equal, twin, (p for n, p in trainer.model.named_parameters() if "twin" in n)))
        kl[name] = [entry["objective/kl"] for entry in trainer.state.log_history]
    assert abs(kl[None][0]) > 0.1
    assert kl["twin"][0] == pytest.approx(0, abs=1e-4)
    assert abs(kl["twin"][1]) > 1e-6


def test_callbacks_are_called_once_a_step_with_the_policy(make) -> None:
    recorder = Recorder()
    make(callbacks=[recorder], save_strategy="steps", save_steps=2, logging_steps=3).train()
    step = ["on_step_begin", "on_step_end"]
    assert recorder.events == [
        *["on_init_end", "on_train_begin", "on_epoch_begin"],
        *step,
        *[*step, "on_save"],
        # Episode 12 of 10 prompts: the third step ends an epoch, and the run.
        *[*step, "on_epoch_end", "on_log", "on_save", "on_epoch_begin"],
        "on_train_end",
    ]
    assert recorder.models == {"LlamaForCausalLM"}


def test_a_callback_stops_training_and_callbacks_come_and_go(make) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = state.global_step == 2
            return control

    trainer = make()
    trainer.add_callback(Stop)
    trainer.add_callback(Recorder())
    assert isinstance(trainer.pop_callback(Recorder), Recorder)
    assert trainer.train().global_step == 2
    trainer.remove_callback(Stop)
    assert not [one for one in trainer.callback_handler.callbacks if isinstance(one, Stop)]
    with pytest.raises(StateError, match="this trainer has trained; make a new one"):
        trainer.train()


def test_the_log_has_trls_names_and_ours_beside_them(make, tmp_path) -> None:
    """The real trainer of 1.12 logs two steps on the same models, from the same arguments."""
    require_trl()
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    changes: dict[str, Any] = {"total_episodes": 8, "num_sample_generations": 0}
    ours = make(PPOConfig, gradient_checkpointing=False, **changes)
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.padding_side = "left"
    args = ours.args.__class__(**{
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_ppo_epochs": 1,
        "response_length": 8,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        **QUIET,
        **changes,
    })  # fmt: skip
    from datasets import Dataset

    stock = PPOTrainer(
        args,
        tokenizer,
        tiny_causal_lm(),
        None,
        tiny_classifier(),
        Dataset.from_list(ROWS),
        tiny_classifier(seed=5),
        eval_dataset=Dataset.from_list(ROWS),
    )
    stock.train()
    ours.train()
    theirs = [set(entry) for entry in stock.state.log_history]
    own = [set(entry) for entry in ours.state.log_history]
    assert len(own) == len(theirs) == 2
    for mine, their in zip(own, theirs, strict=True):
        assert their <= mine
        assert {name for name in mine - their if not name.startswith("oppo/")} == {"grad_norm"}
    # What TRL writes into its arguments.
    for name in ("batch_size", "num_total_batches", "mini_batch_size", "local_batch_size", "total_episodes"):
        assert getattr(ours.args, name) == getattr(stock.args, name)
    assert ours.args.world_size == 1
    assert ours.state.episode == stock.state.episode == 8
    assert ours.state.epoch == stock.state.epoch


def test_a_log_is_the_mean_of_the_steps_since_the_last_one_and_nothing_is_lost(make) -> None:
    single = make()
    single.train()
    trainer = make(logging_steps=2)
    trainer.train()
    steps, logs = single.state.log_history, trainer.state.log_history
    assert [entry["step"] for entry in logs] == [2, 3]
    assert logs[0]["objective/scores"] == pytest.approx(
        (steps[0]["objective/scores"] + steps[1]["objective/scores"]) / 2
    )
    assert [entry["episode"] for entry in logs] == [8, 12]
    assert logs[0]["lr"] == steps[1]["lr"]
    assert logs[1]["loss/value_avg"] == pytest.approx(steps[2]["loss/value_avg"])


def test_the_variance_of_the_ratio_is_that_of_the_micro_batches_means(make) -> None:
    trainer = make(
        num_ppo_epochs=3,
        total_episodes=4,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        learning_rate=3e-2,
    )
    ratios: list[float] = []
    loss = trainer.engine.algorithm.loss

    def watched(micro_batch: Any, outputs: Any) -> Any:
        behaviour = micro_batch.tensors["anchor_logprobs"]
        ratio = (outputs.policy_logprobs.detach() - behaviour).exp()
        ratios.append(float(ratio[micro_batch.mask].mean()))
        return loss(micro_batch, outputs)

    trainer.engine.algorithm.loss = watched
    trainer.train()
    assert len(ratios) > 3, "several micro-batches an optimizer step"
    expected = float(torch.tensor(ratios).var())
    assert expected > 1e-3
    assert trainer.state.log_history[0]["val/ratio_var"] == pytest.approx(expected, rel=1e-4)


def test_overcommit_trains_the_same_prompts_as_often(make) -> None:
    counts, orders = [], []
    for overlap in (None, OVERLAP):
        trainer = make(overlap=overlap, total_episodes=20, response_length=24)
        batches = watch(trainer)
        trainer.train()
        counts.append(prompts_of(batches))
        orders.append([[group.draw_id for group in batch.groups] for batch in batches])
    assert counts[0] == counts[1]
    assert set(counts[0].values()) == {2}
    assert orders[0] != orders[1]


def test_prompts_may_be_text_messages_or_collated_ids(make) -> None:
    conversation = [[{"role": "user", "content": word}] for word in WORDS]
    templated = [
        tuple(TOKENIZER.apply_chat_template(one, add_generation_prompt=True)["input_ids"])
        for one in conversation
    ]
    plain = [tuple(row["input_ids"]) for row in ROWS]
    unpadded = [{"input_ids": [0, 0, *ids], "attention_mask": [0, 0, *[1] * len(ids)]} for ids in plain]

    def collate(rows: list[dict[str, str]]) -> Any:
        return TOKENIZER([row["text"] for row in rows], return_tensors="pt")

    for rows, expected, collator in (
        ([{"prompt": word, "images": None} for word in WORDS], plain, None),
        ([{"prompt": one} for one in conversation], templated, None),
        (unpadded, plain, None),
        ([{"text": word} for word in WORDS], plain, collate),
    ):
        trainer = make(train_dataset=rows, data_collator=collator, total_episodes=8)
        batches = watch(trainer)
        trainer.train()
        assert set(prompts_of(batches)) <= set(expected)
        assert sum(prompts_of(batches).values()) == 8


def test_responses_end_at_their_stop_token_or_nowhere(make) -> None:
    lengths = {}
    for name, settings in {
        "none": {"stop_token_id": None},
        "id": {"stop_token_id": 10},
        "eos": {"stop_token_id": None, "stop_token": "eos"},
    }.items():
        trainer = make(**settings, response_length=40, total_episodes=4)
        [batch] = (watched := watch(trainer), trainer.train())[0]
        lengths[name] = batch.response_lengths.tolist()
        ends = [int(ids[n - 1]) for ids, n in zip(batch.response_ids, lengths[name], strict=True)]
        for end, is_stopped in zip(ends, batch.is_stopped.tolist(), strict=True):
            assert not is_stopped or end == {"id": 10, "eos": TOKENIZER.eos_token_id}[name]
        assert len(watched) == 1
    assert lengths["none"] == [40] * 4
    assert min(lengths["id"]) < 40


def test_a_reward_model_of_another_tokenizer_reads_text(make) -> None:
    """trl#3595: TRL gives it the policy's ids."""
    other = tiny_tokenizer(is_permuted=True, adds_bos=False)
    scores = {}
    for name, tokenizer in (("ids", None), ("text", other)):
        trainer = make(reward_processing_class=tokenizer, total_episodes=4)
        [batch] = (watch(trainer), trainer.train())[0]
        scores[name] = batch.scores["reward"]
    text = [
        TOKENIZER.decode(prompt, skip_special_tokens=True)
        + TOKENIZER.decode(ids[:length].tolist(), skip_special_tokens=True)
        for prompt, ids, length in zip(
            batch.prompt_ids, batch.response_ids, batch.response_lengths.tolist(), strict=True
        )
    ]
    with torch.no_grad():
        expected = [tiny_classifier()(**other(one, return_tensors="pt")).logits.item() for one in text]
    assert scores["text"].tolist() == pytest.approx(expected, abs=1e-5)
    assert not torch.allclose(scores["ids"], scores["text"], atol=1e-2)
