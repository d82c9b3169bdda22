"""Tiny random models, a tokenizer and a workload for the tests that run stock TRL."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from harness.workloads.loading import Workload
from oppo_kit.types import Prompt

PAD, BOS, EOS = 0, 1, 2
VOCABULARY = ["<pad>", "<bos>", "<eos>", *"abcdefghijklm"]


def require_trl() -> None:
    """Skip without TRL 1.12, but fail in continuous integration, which must have it."""
    try:
        installed = metadata.version("trl")
    except metadata.PackageNotFoundError:
        installed = "no trl"
    if installed.startswith("1.12."):
        return
    message = f"{installed} is installed; this test needs pip install 'oppo-kit[baseline]'"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = Split(Regex("."), "isolated")  # type: ignore[assignment]
    backend.decoder = Fuse()  # type: ignore[assignment]
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
    )


def make_policy(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(_config()).eval()


def make_classifier(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return Qwen2ForSequenceClassification(_config()).eval()


def _config() -> Qwen2Config:
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        tie_word_embeddings=False,
        # Wide enough that tokens differ in probability and values in size.
        initializer_range=0.3,
    )
    config.num_labels = 1
    return config


class TinyPrompts:
    """Prompts of one to four letters; draws 7 and 8 are the same prompt."""

    def draw(self, draw_id: int) -> Prompt:
        number = 7 if draw_id == 8 else draw_id
        letters = [3 + (number * 5 + place * 3) % 13 for place in range(1 + number % 4)]
        return Prompt(draw_id, (BOS, *letters), max_new_tokens=12)


class TinyWorkload(Workload):
    """The contract, with models made in memory."""

    def __init__(self, **changes: Any) -> None:
        values: dict[str, Any] = {
            "task": None,
            "tokenizer": make_tokenizer(),
            "prompts": TinyPrompts(),
            "eval_prompts": [],
            "stop_token_ids": (EOS,),
            "policy_path": "policy",
            "reward_path": "reward",
            "critic_path": "reward",
        }
        super().__init__(**(values | changes))

    def make_policy(self) -> PreTrainedModel:
        policy = make_policy(0)
        # As model folders have them; they would change the sampling of whoever inherits them.
        assert policy.generation_config is not None
        policy.generation_config.update(repetition_penalty=1.3, min_p=0.2)
        return policy

    def make_reward(self) -> PreTrainedModel:
        return make_classifier(1)

    def make_critic(self) -> PreTrainedModel:
        return make_classifier(2)
