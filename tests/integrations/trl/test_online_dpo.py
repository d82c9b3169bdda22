"""TRL's online DPO on batches of the overlap engine, on tiny real models."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from online_dpo_trainers import CHATS, LORA, OVERLAP, ROWS, WORDS, by_length, make_online_dpo
from tiny_models import CHAT_TEMPLATE, tiny_classifier, tiny_tokenizer
from transformers import TrainerCallback
from trl.experimental.online_dpo import OnlineDPOTrainer

from oppo_kit.errors import DataError
from oppo_kit.integrations.trl import online_dpo


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Makes trainers that write into this test's folder."""
    return partial(make_online_dpo, tmp_path)


def weights(trainer: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def watch(trainer: Any) -> list[Any]:
    """The batches of the engine, with what the stock trainer is given to train."""
    batches: list[Any] = []
    make_rollouts = trainer._make_rollouts

    def watched(scorers: Any) -> Any:
        rollouts = make_rollouts(scorers)
        collect = rollouts.collect

        def collected(update: int) -> Any:
            batches.append(collect(update))
            return batches[-1]

        rollouts.collect = collected
        return rollouts

    trainer._make_rollouts = watched
    return batches


def prompts_of(batches: list[Any]) -> Counter[str]:
    return Counter(str(group.prompt.columns["prompt"]) for batch in batches for group in batch.groups)


@pytest.mark.parametrize(
    ("changes", "overlap"),
    [
        ({}, None),
        ({"rows": CHATS}, OVERLAP),
        ({}, OVERLAP.model_copy(update={"score_at": "chunk", "chunk_tokens": 4, "placement": "thread"})),
        ({"loss_type": "ipo", "missing_eos_penalty": 1.0, "top_k": 5, "reward_funcs": by_length}, OVERLAP),
    ],
)
def test_training_moves_every_parameter(make, changes, overlap) -> None:
    trainer = make(overlap=overlap, **changes)
    before = weights(trainer)
    trainer.train()
    assert trainer.state.global_step == 3
    assert not any(map(torch.equal, before, weights(trainer)))


def test_an_adapter_is_trained_alone(make) -> None:
    torch.manual_seed(0)
    trainer = make(peft_config=LORA, overlap=OVERLAP)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(before[name], parameter) == ("lora" not in name)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logs[0]["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert abs(logs[2]["objective/kl"]) > 1e-4


def test_the_log_has_trls_names_and_ours_beside_them(make) -> None:
    stock, ours = make(OnlineDPOTrainer), make(overlap=OVERLAP)
    stock.train()
    ours.train()
    theirs = [set(entry) for entry in stock.state.log_history]
    own = [set(entry) for entry in ours.state.log_history]
    assert len(own) == len(theirs) == 4
    for mine, their in zip(own, theirs, strict=True):
        assert their <= mine
        assert all(name.startswith("oppo/") for name in mine - their)
    assert "oppo/delta" in own[0]
    assert "oppo/delta" not in own[3]


@pytest.mark.parametrize("rows", [ROWS, CHATS])
def test_scores_are_those_of_the_stock_trainer_for_the_same_text(make, rows) -> None:
    """Also where reward models are mixed with functions, and weighted."""
    reward = tiny_classifier()
    settings: dict[str, Any] = {
        "rows": rows,
        "reward_funcs": [reward, lambda completions, **_: [1.0] * len(completions)],
        "reward_weights": [1.0, 0.5],
        "max_steps": 1,
        "reward_processing_classes": [tiny_tokenizer(chat_template=CHAT_TEMPLATE), None],
    }
    stock, ours = make(OnlineDPOTrainer, **settings), make(overlap=OVERLAP, **settings)
    calls: list[tuple[Any, torch.Tensor]] = []
    calculate = OnlineDPOTrainer._calculate_rewards_from_functions

    def watched(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards = calculate(self, *args, **kwargs)
        calls.append(((args, kwargs), rewards))
        return rewards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnlineDPOTrainer, "_calculate_rewards_from_functions", watched)
        ours.train()
    assert len(calls) == 2
    for (args, kwargs), rewards in calls:
        names = ("prompts", "completions", "completion_ids_list")
        expected = stock._calculate_rewards_from_functions(**dict(zip(names, args, strict=False)), **kwargs)
        assert rewards.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
        assert len(set(rewards.tolist())) == 4, "pairs that are all different"


def test_the_stock_trainer_is_given_rows_in_blocks_with_their_own_columns_and_masks(make) -> None:
    seen: list[Any] = []

    def reward(prompts: Any, completions: Any, completion_ids: Any, number: Any, **_: Any) -> list[float]:
        seen.append((prompts, completions, completion_ids, number))
        return [float(len(text)) for text in completions]

    trainer = make(overlap=OVERLAP, reward_funcs=reward)
    batches = watch(trainer)
    generated: list[Any] = []
    generate = trainer._generate
    trainer._generate = lambda *args, **kwargs: generated.append(generate(*args, **kwargs)) or generated[-1]
    trainer.train()
    tokenizer = trainer.processing_class
    assert len(seen) == len(batches) == len(generated) == 6
    for (prompts, completions, ids, numbers), batch, parts in zip(seen, batches, generated, strict=True):
        order = [batch.groups[g].rollouts[member] for member in range(2) for g in range(2)]
        assert prompts == [rollout.prompt.columns["prompt"] for rollout in order]
        assert numbers == [WORDS.index(prompt) for prompt in prompts]
        prompt_ids, prompt_mask, completion_ids, completion_mask, *_ = parts
        for row, rollout in enumerate(order):
            assert completion_ids[row][completion_mask[row].bool()].tolist() == rollout.token_ids
            assert set(completion_ids[row][~completion_mask[row].bool()].tolist()) <= {0}
            assert (
                prompt_ids[row][prompt_mask[row].bool()].tolist()
                == tokenizer(prompts[row], add_special_tokens=False)["input_ids"]
            )
            assert not prompt_mask[row].bool().diff().any() or not prompt_mask[row, 0]
            assert ids[row] == completion_ids[row].tolist()
            assert completions[row] == tokenizer.decode(rollout.token_ids, skip_special_tokens=True)


def test_overcommit_trains_the_same_prompts_as_often(make) -> None:
    counts, orders = [], []
    for overlap in (None, OVERLAP):
        trainer = make(overlap=overlap, max_steps=4, max_new_tokens=24)
        batches = watch(trainer)
        trainer.train()
        counts.append(prompts_of(batches))
        orders.append([[group.draw_id for group in batch.groups] for batch in batches])
    assert counts[0] == counts[1]
    assert set(counts[0].values()) == {2}
    assert orders[0] != orders[1]


def test_weights_reach_the_engine_once_an_update(make) -> None:
    trainer = make(overlap=OVERLAP)
    batches = watch(trainer)
    versions: list[int] = []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            versions.append(trainer._rollouts.engine.version)

    trainer.add_callback(Look())
    trainer.train()
    assert versions == [1, 2, 3]
    assert [batch.version for batch in batches] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_resumed_run_is_equal_to_the_bit_to_one_that_was_never_interrupted(make, lora) -> None:
    settings: dict[str, Any] = {
        "overlap": OVERLAP,
        "max_steps": 5,
        "max_new_tokens": 24,
        "peft_config": lora,
        "save_strategy": "steps",
        "save_steps": 2,
    }

    def run() -> Any:
        torch.manual_seed(0)  # of a fresh adapter
        return make(**settings)

    straight = run()
    straight.train()

    class Kill(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                assert first._rollouts.engine.num_in_flight + first._rollouts.engine.num_queued == 2
                raise KeyboardInterrupt

    first = run()
    first.add_callback(Kill())
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert first._rollouts is None
    resumed = run()
    resumed.train(resume_from_checkpoint=f"{first.args.output_dir}/checkpoint-2")
    assert all(map(torch.equal, weights(straight), weights(resumed)))


def test_a_checkpoint_of_the_stock_trainer_is_gone_on_with(make, caplog) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2}
    stock = make(OnlineDPOTrainer, **settings)
    stock.train()
    trainer = make(overlap=OVERLAP, max_steps=4)
    batches = watch(trainer)
    trainer.train(resume_from_checkpoint=f"{stock.args.output_dir}/checkpoint-2")
    assert "training goes on with prompt 8" in caplog.text
    assert sorted(group.draw_id for batch in batches for group in batch.groups) == list(range(8, 16))


def test_an_unfilled_last_micro_batch_is_left_out_and_streams_are_read(make, caplog) -> None:
    trainer = make(rows=ROWS[:7], max_steps=-1, num_train_epochs=2, overlap=OVERLAP)
    batches = watch(trainer)
    trainer.train()
    assert "the last 1 of 7 prompts of every epoch make no micro-batch of 2" in caplog.text
    assert sorted(group.draw_id for batch in batches for group in batch.groups) == list(range(12))

    def stream() -> Any:
        yield from ROWS[:7]

    def all_rows() -> Any:
        yield from ROWS

    # Without it accelerate wants tensors, with the stock trainer too.
    settings: dict[str, Any] = {"overlap": OVERLAP, "accelerator_config": {"dispatch_batches": False}}
    with pytest.raises(
        DataError, match="brought 1 prompts where per_device_train_batch_size=2 were expected"
    ):
        make(rows=IterableDataset.from_generator(stream), **settings).train()
    trainer = make(rows=IterableDataset.from_generator(all_rows), max_steps=2, **settings)
    batches = watch(trainer)
    trainer.train()
    assert prompts_of(batches) == Counter(WORDS)


def test_whoever_generates_beside_training_gets_the_stock_generation(make) -> None:
    trainer = make()
    parts = trainer._generate(trainer.model, ["ab", "x"])
    assert parts[0].shape[0] == 4
    assert len(parts) == 4 + online_dpo._HAS_IMAGE_PART


@pytest.mark.parametrize(
    ("changes", "is_shorter"), [({}, True), ({"peft_config": LORA}, True), ({"max_length": 8}, False)]
)
def test_trimmed_updates_are_the_untrimmed_ones_to_rounding(make, changes, is_shorter, monkeypatch) -> None:
    """But prompts that TRL cuts to its max_length are cut as stock cuts them."""
    monkeypatch.setattr("oppo_kit.integrations.trl.passes._PASS_TOKENS", 1)
    logs, tokens, ends = [], [], []
    for trims_padding in (True, False):
        torch.manual_seed(0)
        trainer = make(overlap=OVERLAP, trims_padding=trims_padding, learning_rate=1e-4, **changes)
        tokens.append(0)

        def count(_module: Any, _args: Any, kwargs: Any) -> None:
            if "past_key_values" not in kwargs:  # as decoding has
                tokens[-1] += kwargs["attention_mask"].numel()

        trainer.model.register_forward_pre_hook(count, with_kwargs=True)
        trainer.train()
        logs.append([entry for entry in trainer.state.log_history if "loss" in entry])
        ends.append(weights(trainer))
    for one, other in zip(*logs, strict=True):
        for key in ("loss", "grad_norm", "logps/chosen", "rewards/margins"):
            assert one[key] == pytest.approx(other[key], rel=1e-3, abs=1e-5), key
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=0)
    assert (tokens[0] < tokens[1]) == is_shorter
    assert tokens[1] > 0
