"""What users of TRL rely on, on the stock trainers and on ours."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import psutil
import pytest
import torch
from peft import LoraConfig
from tiny_models import CHAT_TEMPLATE, tiny_tokenizer
from transformers import TrainerCallback
from trl_trainers import (
    NAMES,
    WORDS,
    chat_data,
    logged,
    make_arguments,
    make_reward_model,
    make_trainer,
    overlap_class,
    reward_of_length,
    stock_class,
    text_data,
    watched,
)

from oppo_kit.errors import ConfigError, DataError, PartFailedError

OVERLAP = {"delta": 3, "decode_tokens": 4}
KINDS = ("stock", "ours")
both = pytest.mark.parametrize("kind", KINDS)
each = pytest.mark.parametrize("name", NAMES)


def make(name, kind, folder, **settings):
    stock = {"trainer_class": stock_class(name)} if kind == "stock" else {"overlap": OVERLAP}
    return make_trainer(name, folder, **stock, **settings)


async def slow_reward(completions, **columns):
    await asyncio.sleep(0)
    return [float(len(text)) for text in completions]


def sometimes(completions, **columns):
    return [None if len(text) % 2 else float(len(text)) for text in completions]


def never(completions, **columns):
    return [None] * len(completions)


REWARDS = {
    "function": (reward_of_length, {}),
    "async": (slow_reward, {}),
    "some None": (sometimes, {}),
    "several, weighted": ([reward_of_length, never, slow_reward], {"reward_weights": [0.5, 1.0, 2.0]}),
    "model and function": ([make_reward_model, reward_of_length], {}),
    "two models": ([make_reward_model, lambda: make_reward_model(2)], {}),
}


@pytest.mark.parametrize(
    ("kind", "reward"),
    [("stock", "function"), ("stock", "model and function"), *(("ours", reward) for reward in REWARDS)],
)
@each
def test_every_parameter_moves_with_rewards_of_every_kind(name, kind, reward, tmp_path) -> None:
    functions, settings = REWARDS[reward]
    if "model" in reward:
        functions = [one if one is reward_of_length else one() for one in functions]
    trainer = make(name, kind, tmp_path, reward=functions, **settings)
    before = {key: p.detach().clone() for key, p in trainer.model.named_parameters()}
    trainer.train()
    assert len(logged(trainer, "train_loss")) == 1
    # A key's bias adds the same to all of a query's scores, so it has no gradient.
    still = [
        key
        for key, p in trainer.model.named_parameters()
        if torch.equal(p, before[key]) and "k_proj.bias" not in key
    ]
    assert still == []


@each
def test_metrics_are_those_computed_by_hand(name, tmp_path) -> None:
    def reward(completions, **columns):
        return [float(row) for row in range(len(completions))]

    trainer = make_trainer(
        name,
        tmp_path,
        trainer_class=watched(overlap_class(name)),
        overlap=OVERLAP,
        reward=reward,
        max_steps=2,
    )
    trainer.train()
    assert logged(trainer, "reward") == [3.5, 3.5]
    assert logged(trainer, "rewards/reward/std") == pytest.approx([6**0.5, 6**0.5])
    assert logged(trainer, "frac_reward_zero_std") == [0, 0]
    for step, (batch, output) in enumerate(trainer.seen):
        lengths = batch.response_lengths.float()
        assert logged(trainer, "completions/mean_length")[step] == pytest.approx(lengths.mean().item())
        # Pairs of rewards 0 and 1, 2 and 3, …
        scale = {"grpo": 0.5 / (0.5**0.5 + 1e-4), "rloo": 1.0}[name]
        assert output["advantages"].tolist() == pytest.approx([-scale, scale] * 4, abs=1e-5)


@both
@each
def test_constant_rewards_teach_nothing(name, kind, tmp_path) -> None:
    trainer = make(name, kind, tmp_path, reward=lambda completions, **_: [1.0] * len(completions))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert logged(trainer, "frac_reward_zero_std") == [1, 1, 1]
    assert all(torch.equal(one, p) for one, p in zip(before, trainer.model.parameters(), strict=True))


@both
@each
def test_callbacks_fire_once_an_update(name, kind, tmp_path) -> None:
    class Counting(TrainerCallback):
        counts: dict[str, int] = {}  # noqa: RUF012

        def on_step_begin(self, *args, **kwargs):
            self.counts["begin"] = self.counts.get("begin", 0) + 1

        def on_step_end(self, *args, **kwargs):
            self.counts["end"] = self.counts.get("end", 0) + 1

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.counts["log"] = self.counts.get("log", 0) + ("loss" in logs)

    Counting.counts = {}
    make(name, kind, tmp_path, trainer_arguments={"callbacks": [Counting()]}, num_iterations=2).train()
    assert Counting.counts == {"begin": 3, "end": 3, "log": 3}


@both
@each
def test_reward_functions_see_every_column_and_the_trainers_helpers(name, kind, tmp_path) -> None:
    calls = []

    def reward(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **columns):
        assert [prompt.upper() for prompt in prompts] == answer
        assert len(completions) == len(completion_ids) == 8
        log_extra("answer", answer)
        log_metric("calls", 1.0)
        calls.append(trainer_state.global_step)
        return [float(len(ids)) for ids in completion_ids]

    words = [*WORDS[:10], WORDS[0], WORDS[0]]
    data = text_data(words, answer=[word.upper() for word in words], unused=[{"a": None}] * 12)
    trainer = make(name, kind, tmp_path, reward=reward, data=data)
    trainer.train()
    assert calls == [0, 1, 2]
    assert logged(trainer, "calls") == [1, 1, 1]


@both
@each
def test_conversations_are_trained_by_a_function_and_a_model(name, kind, tmp_path) -> None:
    def reward(completions, **columns):
        assert all(message["role"] == "assistant" for [message] in completions)
        return [float(len(message["content"])) for [message] in completions]

    trainer = make(name, kind, tmp_path, reward=[reward, make_reward_model()], data=chat_data())
    trainer.train()
    assert len(logged(trainer, "rewards/reward-1/mean")) == 3


@both
@each
def test_evaluation_is_stocks_on_its_own_responses(name, kind, tmp_path) -> None:
    """And changes nothing of what ours is trained on."""
    runs = []
    for strategy in ("no", "steps")[kind == "stock" :]:
        trainer = make(
            name,
            kind,
            tmp_path,
            reward=[make_reward_model(), reward_of_length],
            trainer_arguments={"eval_dataset": text_data(WORDS[:4])},
            eval_strategy=strategy,
            eval_steps=1,
            per_device_eval_batch_size=4,
        )
        trainer.train()
        runs.append(logged(trainer, "rewards/reward-1/mean"))
    assert len(logged(trainer, "eval_rewards/reward-1/mean")) == 3
    assert runs[0] == pytest.approx(runs[-1], abs=1e-3)
    assert "eval_reward" in trainer.evaluate()


@each
def test_an_adapter_is_trained_and_sampled_with_while_the_base_stays(name, tmp_path) -> None:
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    trainer = make_trainer(
        name,
        tmp_path,
        trainer_class=watched(overlap_class(name)),
        overlap=OVERLAP,
        trainer_arguments={"peft_config": lora},
    )
    before = {key: p.detach().clone() for key, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {key for key, p in trainer.model.named_parameters() if not torch.equal(p, before[key])}
    assert moved == {key for key in before if "lora_" in key}


@both
@each
def test_trls_own_errors_are_left_as_they_are(name, kind, tmp_path) -> None:
    with pytest.raises(ValueError, match="Number of reward weights"):
        make(name, kind, tmp_path, reward_weights=[1.0, 2.0])
    with pytest.raises(ValueError, match="number of reward processing classes"):
        make(name, kind, tmp_path, trainer_arguments={"reward_processing_classes": [None, None]})
    with pytest.raises(ValueError, match="divisible"):
        make_arguments(name, tmp_path, num_generations=3)
    with pytest.raises(ValueError, match="`train_dataset` is required"):
        make(name, kind, tmp_path, trainer_arguments={"train_dataset": None})
    with pytest.raises(ValueError, match="returned 1 rewards, but 8 were expected"):
        make(name, kind, tmp_path, reward=lambda **_: [1.0]).train()
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        make(name, kind, tmp_path, trainer_arguments={"unknown": 1})


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("oppo")]


@each
def test_a_thread_of_scorers_ends_with_the_training_however_it_ends(name, tmp_path) -> None:
    overlap = OVERLAP | {"score_at": "chunk", "placement": "thread", "chunk_tokens": 4}
    trainer = make_trainer(name, tmp_path, overlap=overlap, reward=make_reward_model())
    seen = []
    start = trainer._start_rollouts
    trainer._start_rollouts = lambda: (start(), seen.extend(our_threads()))[0]
    trainer.train()
    assert seen
    assert our_threads() == []

    def broken(**columns):
        raise ZeroDivisionError

    trainer = make_trainer(name, tmp_path, overlap=overlap, reward=[make_reward_model(), broken])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert our_threads() == []
    assert trainer._rollouts is None


def test_a_process_of_scorers_gives_the_scores_of_a_thread_and_ends_with_the_training(tmp_path) -> None:
    rewards = []
    for placement in ("process", "inline"):
        overlap = OVERLAP | {"score_at": "chunk", "placement": placement, "chunk_tokens": 4}
        trainer = make_trainer(
            "grpo",
            tmp_path,
            overlap=overlap,
            reward=make_reward_model(),
            max_steps=2,
            trainer_arguments={"eval_dataset": text_data(WORDS[:4])},
            eval_strategy="steps",
            eval_steps=1,
        )
        trainer.train()
        rewards.append(logged(trainer, "reward") + logged(trainer, "eval_reward"))
        assert not [child for child in psutil.Process().children() if "oppo_kit" in " ".join(child.cmdline())]
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-3)


def test_a_failing_reward_model_names_its_part(tmp_path) -> None:
    trainer = make_trainer("grpo", tmp_path, reward=make_reward_model(), overlap={})
    trainer.reward_funcs[0].scorer.score = lambda rollouts: 1 / 0
    with pytest.raises(PartFailedError, match="scorer 'reward_model_0' failed while draw 0 waited"):
        trainer.train()


def test_a_loader_of_another_order_is_refused(tmp_path) -> None:
    class Shuffling(overlap_class("grpo")):
        def _get_train_sampler(self, dataset=None):
            self.args.seed += 1  # another order in each loader
            return super()._get_train_sampler(dataset)

    trainer = make_trainer("grpo", tmp_path, trainer_class=Shuffling, overlap={})
    with pytest.raises(
        ConfigError, match=r"the data loader brought the prompt '.*' where draw \d, '.*', was expected"
    ):
        trainer.train()


def test_a_prompt_without_tokens_or_with_too_many_is_refused(tmp_path) -> None:
    with pytest.raises(DataError, match="the prompt '' has no token, and the policy must read one"):
        make_trainer("grpo", tmp_path, data=text_data([""] * 4), max_steps=1).train()
    with pytest.raises(
        DataError, match="250 prompt tokens and max_completion_length=12 exceed .* context of 256"
    ):
        make_trainer("grpo", tmp_path, data=text_data(["a" * 250] * 4), max_steps=1).train()


def test_a_conversation_that_changes_while_it_is_trained_is_heard_of(tmp_path) -> None:
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE, adds_bos=False)
    trainer = make_trainer("grpo", tmp_path, data=chat_data(), tokenizer=tokenizer, overlap={})
    answers = trainer._answers

    def changed(prompt_ids):
        return answers([[*ids, 5] for ids in prompt_ids])

    trainer._answers = changed
    with pytest.raises(Exception, match="the trainer encodes the prompts of the batch otherwise"):
        trainer.train()


def test_stock_answers_whoever_asks_outside_of_a_round(tmp_path) -> None:
    trainer = make_trainer("grpo", tmp_path)
    assert trainer._answers([[1]]) is None
    trainer._rollouts = SimpleNamespace()
    assert trainer._answers([[1]]) is None
