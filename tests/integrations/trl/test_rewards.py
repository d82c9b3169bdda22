"""Reward models read what TRL gives them, and score it as TRL does."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CHAT_TEMPLATE, tiny_tokenizer
from trl_trainers import (
    WORDS,
    chat_data,
    make_policy,
    make_reward_model,
    make_trainer,
    overlap_class,
    stock_class,
    text_data,
    watched,
)

from oppo_kit.backends.hf_scorer import HFRewardScorer
from oppo_kit.integrations.trl.rewards import TrainerRendering
from oppo_kit.types import Prompt, Rollout, RolloutKey

REVERSED = {"is_permuted": True, "chat_template": CHAT_TEMPLATE}


def stock_scores(trainer, rows, prompts, completions) -> torch.Tensor:
    ids = [[1]] * len(prompts)
    return stock_class("grpo")._calculate_rewards(trainer, rows, prompts, completions, ids)


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("is_chat", [False, True], ids=["text", "chat"])
def test_scores_equal_those_of_the_stock_trainer(is_chat, adds_bos, tmp_path) -> None:
    """Another vocabulary; with a tokenizer that would add BOS too, which stock lets it not."""
    reward_tokenizer = tiny_tokenizer(adds_bos=adds_bos, **REVERSED)
    settings = {"data": chat_data() if is_chat else text_data(), "reward_tokenizer": reward_tokenizer}
    ours = make_trainer(
        "grpo",
        tmp_path,
        trainer_class=watched(overlap_class("grpo")),
        overlap={
            "delta": 2,
            "score_at": "chunk",
            "chunk_tokens": 2,
            "decode_tokens": 2,
            "placement": "inline",
        },
        reward=make_reward_model(),
        max_steps=2,
        **settings,
    )
    ours.train()
    stock = make_trainer(
        "grpo", tmp_path, trainer_class=stock_class("grpo"), reward=make_reward_model(), **settings
    )
    for batch, _ in ours.seen:
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        prompts = [rollout.prompt.columns["prompt"] for rollout in rollouts]
        texts = ours.processing_class.batch_decode([r.token_ids for r in rollouts], skip_special_tokens=True)
        completions = [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts
        expected = stock_scores(stock, [dict(r.prompt.columns) for r in rollouts], prompts, completions)
        assert batch.scores["reward_model_0"].tolist() == pytest.approx(expected[:, 0].tolist(), abs=1e-5)


def test_template_arguments_reach_the_reward_models_template(tmp_path) -> None:
    tokenizer = tiny_tokenizer(chat_template="{% if loud %}!{% endif %}" + CHAT_TEMPLATE, adds_bos=False)
    prompt = Prompt(0, (1,), 9, {"prompt": [{"role": "user", "content": "ab"}]})
    rollout = Rollout(RolloutKey(0, 0), prompt, token_ids=tokenizer("cd")["input_ids"])
    texts = [
        tokenizer.decode(TrainerRendering(tokenizer, tokenizer, arguments).encode(rollout))
        for arguments in ({}, {"loud": True})
    ]
    assert texts == ["<bos>user: ab\nassistant: cd\n", "!<bos>user: ab\nassistant: cd\n"]


def test_where_pad_is_eos_a_text_that_ends_with_it_is_scored_at_its_end() -> None:
    """Stock's model looks for the last token that is not pad, and so reads one too early."""
    tokenizer = tiny_tokenizer(is_pad_eos=True, adds_bos=False)
    model = make_reward_model(pad_token_id=2)
    prompt = Prompt(0, (1,), 9, {"prompt": "ab<eos>"})
    rollout = Rollout(RolloutKey(0, 0), prompt, finish_reason="stop")
    rendering = TrainerRendering(tokenizer, tokenizer, {})
    ids = rendering.encode(rollout)
    assert ids[-1] == tokenizer.eos_token_id
    hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state
    by_hand = model.score(hidden)[0, :, 0].tolist()
    assert HFRewardScorer(model, rendering=rendering).score([rollout]) == pytest.approx([by_hand[-1]])
    stock = model(input_ids=torch.tensor([ids])).logits.item()
    assert stock == pytest.approx(by_hand[-2])


def test_no_text_at_all_is_read_as_pad() -> None:
    tokenizer = tiny_tokenizer(adds_bos=False)
    rollout = Rollout(RolloutKey(0, 0), Prompt(0, (1,), 9, {"prompt": ""}), token_ids=[2])
    assert TrainerRendering(tokenizer, tokenizer, {}).encode(rollout) == [tokenizer.pad_token_id]


def test_the_callers_list_of_rewards_and_its_models_stay_as_they_are(tmp_path) -> None:
    model = make_reward_model()
    rewards = [model]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trainer = make_trainer(
        "grpo",
        tmp_path,
        reward=rewards,
        max_steps=1,
        model=make_policy(),
        data=text_data(WORDS[:4]),
        trainer_arguments={"reward_funcs": rewards},
    )
    trainer.train()
    assert rewards == [model]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert trainer.reward_func_names == ["reward-1"]
