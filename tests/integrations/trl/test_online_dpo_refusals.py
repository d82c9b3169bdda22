"""What online DPO with overlap refuses: settings, prompts, columns and orders that cannot work."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from online_dpo_trainers import CHATS, OVERLAP, ROWS, by_length, make_online_dpo
from tiny_models import tiny_tokenizer

from oppo_kit import OverlapConfig
from oppo_kit.errors import ConfigError, DataError
from oppo_kit.integrations.trl import online_dpo


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Makes trainers that write into this test's folder."""
    return partial(make_online_dpo, tmp_path)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"use_vllm": True}, ConfigError, "use_vllm=True cannot be used with overlap"),
        (
            {"generation_kwargs": {"top_k": 3}},
            ConfigError,
            "generation_kwargs=.* cannot be used with overlap",
        ),
        ({"repetition_penalty": 1.1}, ConfigError, r"repetition_penalty=1\.1 cannot be used with overlap"),
        ({"cache_implementation": "static"}, ConfigError, "cache_implementation='static' cannot be used"),
        ({"ignore_data_skip": True}, ConfigError, "ignore_data_skip=True goes on with the first prompts"),
        (
            {"overlap": OverlapConfig(schedule="oppo", delta=5)},
            ConfigError,
            r"overlap\.delta=5 exceeds B × max_age = 2 × 2.*delta may be 0 to 4, usually up to 1",
        ),
        (
            {"overlap": OverlapConfig(score_at="sample", placement="thread"), "reward_funcs": by_length},
            ConfigError,
            "has no reward model to work on",
        ),
        ({"processing_class": object()}, ConfigError, "processing_class is a object; overlap is for text"),
        (
            {"rows": [{"prompt": "a", "image": "b"}] * 4},
            ConfigError,
            "the training data has a column 'image'",
        ),
        (
            {"rows": ROWS[:1]},
            DataError,
            "has 1 prompts, and a micro-batch takes per_device_train_batch_size=2",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(make, changes, error, words) -> None:
    with pytest.raises(error, match=words):
        make(**changes)


def test_a_conversation_needs_a_chat_template(make) -> None:
    with pytest.raises(ConfigError, match="the prompts are conversations, and processing_class has no chat"):
        make(rows=CHATS, processing_class=tiny_tokenizer())
    with pytest.raises(ConfigError, match="the reward model's tokenizer has no chat template"):
        make(rows=CHATS, reward_processing_classes=tiny_tokenizer())


def test_a_prompt_that_leaves_no_room_for_a_response_is_refused(make) -> None:
    with pytest.raises(
        DataError, match=r"\d+ prompt tokens and max_new_tokens=12 exceed .*; lower max_new_tokens"
    ):
        make(rows=[{"prompt": "a" * 250}] * 4, max_steps=1).train()


def test_columns_that_the_collator_pads_are_refused(make) -> None:
    rows = [{**row, "a_input_ids": [1, 2]} for row in ROWS]
    with pytest.raises(DataError, match="the collator makes a Tensor of the column 'a_input_ids'"):
        make(rows=rows).train()


def test_another_order_than_the_loaders_is_refused_and_scorers_are_closed(make, monkeypatch) -> None:
    trainer = make(overlap=OVERLAP.model_copy(update={"placement": "thread", "score_at": "sample"}))
    replay = online_dpo.replay_loader

    def shifted(*args: Any, **kwargs: Any) -> Any:
        rows = replay(*args, **kwargs)
        next(rows)
        return rows

    monkeypatch.setattr(online_dpo, "replay_loader", shifted)
    with pytest.raises(ConfigError, match="the data loader brought the prompt .* was expected"):
        trainer.train()
    assert trainer._rollouts is None
