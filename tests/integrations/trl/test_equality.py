"""Without overcommit the weights are stock's; with it, the same prompts are trained, against the right log-probs."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny_causal_lm
from trl_trainers import (
    NAMES,
    WORDS,
    answers_of,
    logged,
    make_reward_model,
    make_trainer,
    overlap_class,
    parameter_hash,
    playback,
    reward_of_length,
    stock_class,
    text_data,
    watched,
)

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several passes, checkpointing": {
        "num_iterations": 2,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 2,
        "max_steps": 6,
        "gradient_checkpointing": True,
        "pad_to_multiple_of": 8,
    },
    "autocast": {"bf16": True, "max_steps": 2},
    "rounds within an update": {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
}

# What is trimmed is the same to rounding alone.
UNTRIMMED: dict[str, Any] = {"trainer_arguments": {"trims_padding": False}}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, "plain") for name in NAMES),
        *((name, "several passes, checkpointing") for name in NAMES),
        ("grpo", "autocast"),
        ("rloo", "rounds within an update"),
    ],
)
def test_without_overcommit_the_weights_are_those_of_the_stock_trainer_fed_the_same_tokens(
    name, settings, tmp_path
) -> None:
    changes = SETTINGS[settings]
    ours = make_trainer(
        name, tmp_path, trainer_class=watched(overlap_class(name)), overlap={}, **changes, **UNTRIMMED
    )
    ours.train()
    stock = make_trainer(
        name, tmp_path, trainer_class=playback(stock_class(name), answers_of(ours)), **changes
    )
    before = parameter_hash(stock.model)
    stock.train()
    assert parameter_hash(ours.model) == parameter_hash(stock.model) != before
    assert logged(ours, "loss") == logged(stock, "loss")
    versions = {"plain": [0, 1, 2], "rounds within an update": [0, 0, 1, 2, 2]}
    assert [batch.version for batch, _ in ours.seen] == versions.get(settings, [0, 1])
    assert logged(ours, "reward") == logged(stock, "reward")


@pytest.mark.parametrize("name", NAMES)
def test_with_a_reference_the_weights_are_stocks_too(name, tmp_path) -> None:
    folder = tmp_path / "policy"
    tiny_causal_lm("qwen2", folder=folder, tie_word_embeddings=False)
    settings = {"beta": 0.1, "max_steps": 2}
    ours = make_trainer(
        name,
        tmp_path,
        trainer_class=watched(overlap_class(name)),
        overlap={},
        model=str(folder),
        reward=make_reward_model(),
        **settings,
    )
    ours.train()
    stock = make_trainer(
        name,
        tmp_path,
        trainer_class=playback(stock_class(name), answers_of(ours)),
        model=str(folder),
        reward=make_reward_model(),
        **settings,
    )
    stock.train()
    assert logged(ours, "reward") == pytest.approx(logged(stock, "reward"), abs=1e-5)
    for one, other in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        # Rewards differ by rounding, and Adam's first steps magnify that.
        torch.testing.assert_close(one, other, atol=1e-3, rtol=0)


def trained_prompts(trainer) -> Counter:
    return Counter(row.prompt.columns["prompt"] for batch, _ in trainer.seen for row in batch.groups)


@pytest.mark.parametrize("is_stream", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("name", NAMES)
def test_overcommit_trains_the_same_prompts_and_leaves_nothing_in_the_air(name, is_stream, tmp_path) -> None:
    """Over two epochs, whose orders differ; the trainer checks its loader's order against ours in every round."""
    data = text_data([*WORDS, WORDS[0]])  # a prompt twice, and one that no full batch is left for
    data = data.to_iterable_dataset() if is_stream else data
    trainers = {}
    for delta in (0, 5):
        trainers[delta] = make_trainer(
            name,
            tmp_path,
            trainer_class=watched(overlap_class(name)),
            overlap={"delta": delta, "delta_control": "fixed", "decode_tokens": 2, "max_age": 3},
            data=data,
            max_steps=6,
        )
        trainers[delta].train()
    assert trained_prompts(trainers[5]) == trained_prompts(trainers[0])
    assert sum(trained_prompts(trainers[5]).values()) == 24
    last = {key: logged(trainers[5], f"oppo/{key}")[-1] for key in ("in_flight", "queued")}
    assert last == {"in_flight": 0, "queued": 0}
    assert len(logged(trainers[5], "oppo/delta")) == 6  # of each update, when it is logged
    assert sum(logged(trainers[5], "oppo/num_deferred")) > 0
    assert max(logged(trainers[5], "oppo/stale_token_frac")) > 0


@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_older_weights_are_compared_with_the_logprobs_they_were_sampled_with(
    name, tmp_path
) -> None:
    trainer = make_trainer(
        name,
        tmp_path,
        trainer_class=watched(overlap_class(name)),
        overlap={"delta": 4, "delta_control": "fixed", "decode_tokens": 2},
        max_steps=4,
        pad_to_multiple_of=8,
    )
    trainer.train()
    num_stale = 0
    for batch, output in trainer.seen:
        stale = (batch.response_mask & ~batch.is_current).any(1)
        anchor = output.get(trainer._anchor_name)
        if not stale.any():
            assert name == "rloo" or anchor is None  # stock's own: the ratio is one
            continue
        num_stale += int(stale.sum())
        expected = batch.behaviour_logprobs
        if name == "rloo":
            torch.testing.assert_close(anchor[stale], expected.sum(1)[stale])
        else:
            width = expected.shape[1]
            assert anchor.shape == output["completion_mask"].shape
            torch.testing.assert_close(anchor[:, :width][stale], expected[stale])
            assert not anchor[:, width:].any()
    assert num_stale > 3


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_the_current_weights_keep_stocks_logprobs_beside_stale_ones(name) -> None:
    trainer_class = overlap_class(name)
    trainer = object.__new__(trainer_class)
    batch = SimpleNamespace(
        response_mask=torch.tensor([[True, True], [True, False]]),
        is_current=torch.tensor([[True, True], [False, False]]),
        behaviour_logprobs=torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]),
    )
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    stock = {"grpo": torch.full((2, 3), -9.0), "rloo": torch.full((2,), -9.0)}[name]
    output = {"completion_mask": mask, trainer_class._anchor_name: stock}
    trainer._anchor(output, batch)
    expected = {"grpo": [[-9.0, -9.0, -9.0], [-3.0, 0.0, 0.0]], "rloo": [-9.0, -3.0]}[name]
    assert output[trainer_class._anchor_name].tolist() == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_controller_of_delta_hears_the_weighted_sum_of_all_rewards(name, tmp_path) -> None:
    def some(completions, **columns):
        return [None] * (len(completions) - 1) + [2.0]

    heard = []
    trainer = make_trainer(
        name,
        tmp_path,
        trainer_class=watched(overlap_class(name)),
        overlap={},
        reward=[reward_of_length, some],
        reward_weights=[1.0, 0.5],
        max_steps=1,
    )
    commit = trainer._commit
    trainer._commit = lambda: (
        heard.append(trainer._rollouts.batch and trainer._rollouts.batch.scores["reward"].mean().item()),
        commit(),
    )
    trainer.train()
    assert [value for value in heard if value is not None] == pytest.approx(logged(trainer, "reward"))
