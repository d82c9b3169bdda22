"""Real tokenizers and models, small enough to build inside a test: two layers, hidden size 32, fp32.

Everything is a function of its arguments: equal arguments give equal vocabularies and equal weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from oppo_kit.types import Prompt, Rollout, RolloutKey

PAD_TEXT, BOS_TEXT, EOS_TEXT, UNK_TEXT = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:?!+-*/=()[]{}_'\"\n|"
VOCABULARY = (PAD_TEXT, BOS_TEXT, EOS_TEXT, UNK_TEXT, *CHARACTERS)
VOCAB_SIZE = len(VOCABULARY)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: "
    "{{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_tokenizer(
    folder: Path | None = None,
    *,
    adds_bos: bool = True,
    adds_eos: bool = False,
    has_bos: bool = True,
    is_pad_eos: bool = False,
    has_pad: bool = True,
    chat_template: str | None = None,
    is_permuted: bool = False,
) -> PreTrainedTokenizerFast:
    """Character tokenizer; saved into ``folder`` when one is given.

    Args:
        folder: where to save it; None keeps it in memory.
        adds_bos: encoding puts BOS first.
        adds_eos: encoding puts EOS last, as some tokenizers do.
        has_bos: whether there is a BOS token at all.
        is_pad_eos: the pad token is the EOS token.
        has_pad: whether a pad token is set.
        chat_template: for example ``CHAT_TEMPLATE``.
        is_permuted: the same tokens and size, but the characters have other ids.
    """
    special, characters = VOCABULARY[:4], VOCABULARY[4:]
    order = (*special, *(reversed(characters) if is_permuted else characters))
    token_ids = {text: index for index, text in enumerate(order)}
    backend = Tokenizer(models.WordLevel(token_ids, unk_token=UNK_TEXT))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    first = f"{BOS_TEXT} " if adds_bos and has_bos else ""
    last = f" {EOS_TEXT}" if adds_eos else ""
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first}$A{last}",
        special_tokens=[(BOS_TEXT, token_ids[BOS_TEXT]), (EOS_TEXT, token_ids[EOS_TEXT])],
    )
    roles = {"bos_token": BOS_TEXT} if has_bos else {}
    if has_pad:
        roles["pad_token"] = EOS_TEXT if is_pad_eos else PAD_TEXT
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS_TEXT,
        unk_token=UNK_TEXT,
        clean_up_tokenization_spaces=False,
        **roles,
    )
    tokenizer.chat_template = chat_template
    if folder is not None:
        tokenizer.save_pretrained(folder)
    return tokenizer


_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def _with_sizes(config_class: type[Any], **sizes: Any) -> Callable[..., PreTrainedConfig]:
    return lambda vocab_size, **extra: config_class(vocab_size=vocab_size, **{**sizes, **extra})


_OPT_SIZES = {"ffn_dim": 64, "word_embed_proj_dim": 32}
KINDS: dict[str, Callable[..., PreTrainedConfig]] = {
    "gemma": _with_sizes(GemmaConfig, **_SIZES, num_key_value_heads=2, head_dim=8),
    # Five layers with a sliding window, one with full attention.
    "gemma3": _with_sizes(
        Gemma3TextConfig,
        **{**_SIZES, "num_hidden_layers": 6},
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=8,
    ),
    "gpt2": _with_sizes(GPT2Config, n_embd=32, n_layer=2, n_head=4, n_positions=256),
    "gpt_neox": _with_sizes(GPTNeoXConfig, **_SIZES),
    "llama": _with_sizes(LlamaConfig, **_SIZES, num_key_value_heads=2),
    "mistral": _with_sizes(MistralConfig, **_SIZES, num_key_value_heads=2),
    "opt": _with_sizes(
        OPTConfig, **{k: v for k, v in _SIZES.items() if k != "intermediate_size"}, **_OPT_SIZES
    ),
    "qwen2": _with_sizes(Qwen2Config, **_SIZES, num_key_value_heads=2),
    "qwen3": _with_sizes(Qwen3Config, **_SIZES, num_key_value_heads=2, head_dim=8),
}


def tiny_config(kind: str = "llama", vocab_size: int = VOCAB_SIZE, **extra: Any) -> PreTrainedConfig:
    """Configuration of a tiny decoder; pad, BOS and EOS ids are those of ``tiny_tokenizer``."""
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return KINDS[kind](vocab_size, **{**special, **extra})


def tiny_causal_lm(
    kind: str = "llama",
    vocab_size: int = VOCAB_SIZE,
    *,
    seed: int = 0,
    folder: Path | None = None,
    **extra: Any,
) -> PreTrainedModel:
    """Language model in eval mode; ``kind`` is one of ``KINDS``, ``extra`` goes to its configuration."""
    return _build(AutoModelForCausalLM, tiny_config(kind, vocab_size, **extra), seed, folder)


def tiny_classifier(
    kind: str = "llama",
    vocab_size: int = VOCAB_SIZE,
    *,
    seed: int = 1,
    folder: Path | None = None,
    **extra: Any,
) -> PreTrainedModel:
    """Sequence classifier with one label in eval mode."""
    config = tiny_config(kind, vocab_size, **{"num_labels": 1, **extra})
    return _build(AutoModelForSequenceClassification, config, seed, folder)


def _build(auto_class: Any, config: PreTrainedConfig, seed: int, folder: Path | None) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto_class.from_config(config).float().eval()
        # The usual initialisation (0.02) leaves every distribution close to uniform, so that faults hide.
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.3)
    if folder is not None:
        model.save_pretrained(folder)
    return model


def tiny_rollouts() -> list[Rollout]:
    """Ended rollouts of unequal prompts and responses."""
    return [
        Rollout(
            RolloutKey(draw, 0),
            Prompt(draw, tuple(range(1, 4 + draw)), 30),
            token_ids=[(7 * i + draw) % VOCAB_SIZE for i in range(9 + 3 * draw)],
            finish_reason="stop",
        )
        for draw in range(3)
    ]
