"""Models and tokenizers of transformers, loaded so that reinforcement learning can rely on them.

Evaluation mode and no dropout (a ratio must not be noisy), decoders only, nothing silently random.
Masks never come from the pad token here or anywhere, so pad == eos is ordinary.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from oppo_kit.errors import ModelError

_logger = logging.getLogger(__name__)


class HasStopTokens(Protocol):
    """A model, or the settings that stand beside its weights."""

    @property
    def config(self) -> Any:
        """The model's configuration."""
        ...

    @property
    def generation_config(self) -> Any:
        """Its generation configuration; None without one."""
        ...


@dataclass(frozen=True)
class ModelSettings:
    """What a model's folder says without its weights."""

    config: PreTrainedConfig
    generation_config: GenerationConfig | None

    @property
    def context_tokens(self) -> int | None:
        """Positions that the model has; None when it does not say."""
        value = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return value if isinstance(value, int) and value > 0 else None


def load_settings(path: str | os.PathLike[str], *, offline_names: Sequence[str] = ()) -> ModelSettings:
    """Configuration and generation configuration, without weights.

    Args:
        path: folder or hub id.
        offline_names: what the caller can load without a network; named in the error.

    Raises:
        ModelError: it is not there, cannot be reached, or is an encoder-decoder.
    """
    config = _load_config(str(path), offline_names)
    try:
        generation_config = GenerationConfig.from_pretrained(str(path))
    except OSError:  # a model without generation_config.json; its config is there
        generation_config = None
    return ModelSettings(config, generation_config)


def load_causal_lm(
    path: str | os.PathLike[str], dtype: torch.dtype, *, offline_names: Sequence[str] = ()
) -> PreTrainedModel:
    """A causal language model in eval mode, dropout off.

    Raises:
        ModelError: it is not there, is no decoder with a language-model head, or its weights do not fit.
    """
    model, missing = _load(AutoModelForCausalLM, str(path), dtype, offline_names, {})
    if missing:
        raise ModelError(
            f"{path} has no weights for {', '.join(missing)}, which would start at random; a policy needs a "
            "causal language model: pass the folder or hub id of one"
        )
    return model


def load_sequence_classifier(
    path: str | os.PathLike[str],
    dtype: torch.dtype,
    *,
    offline_names: Sequence[str] = (),
    fresh_head: Literal["warn", "zero"] = "warn",
) -> PreTrainedModel:
    """A sequence classifier with one label in eval mode, dropout off: a reward model or a critic.

    A score head that the checkpoint lacks is the same on every load. ``warn`` starts it at random and warns:
    right for nothing but a try; ``zero`` starts it at 0 and logs it: right for a critic that grows from a
    language model.

    Raises:
        ModelError: it is not there, is no decoder, has another number of labels, or lacks more than a head.
    """
    model, missing = _load(
        AutoModelForSequenceClassification, str(path), dtype, offline_names, {"num_labels": 1}
    )
    body = [name for name in missing if name.startswith(f"{model.base_model_prefix}.")]
    if body:
        raise ModelError(
            f"{path} has no weights for {', '.join(body)}; the checkpoint is incomplete or another model's"
        )
    if missing and fresh_head == "zero":
        _logger.info("%s has no score head: %s starts at 0", path, ", ".join(missing))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in missing:
                    parameter.zero_()
    elif missing:
        warnings.warn(
            f"{path} has no trained score head: {', '.join(missing)} starts at random, so its scores mean "
            "nothing; pass a model trained for sequence classification",
            stacklevel=2,
        )
    return model


def load_tokenizer(
    path: str | os.PathLike[str], *, offline_names: Sequence[str] = ()
) -> PreTrainedTokenizerBase:
    """A tokenizer; without a pad token, EOS pads too.

    Raises:
        ModelError: it is not there or cannot be read.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise ModelError(_unavailable("tokenizer", str(path), error, offline_names)) from error
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model: HasStopTokens) -> tuple[int, ...]:
    """Tokens that end a response, sorted: the tokenizer's EOS, and all EOS of the model's two configurations.

    Raises:
        ModelError: there is none.
    """
    found: set[int] = set()
    text_config = model.config.get_text_config()
    sources = (
        tokenizer.eos_token_id,
        *(getattr(c, "eos_token_id", None) for c in (model.generation_config, text_config)),
    )
    for ids in map(_as_ids, sources):
        found.update(ids)
    if not found:
        raise ModelError(
            "neither the tokenizer nor the model names an end-of-sequence token, so no response would ever "
            "stop; set sampling.stop_token_ids"
        )
    return tuple(sorted(found))


def _as_ids(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def check_same_vocabulary(
    policy_tokenizer: PreTrainedTokenizerBase, reward_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Every token of the policy must have the same id in the reward model; more tokens there are harmless.

    The reward model reads the policy's token ids; with another vocabulary its scores would be of another
    text.

    Raises:
        ModelError: naming sizes and the first differing tokens.
    """
    policy, reward = policy_tokenizer.get_vocab(), reward_tokenizer.get_vocab()
    differing = sorted((index, token) for token, index in policy.items() if reward.get(token) != index)
    if not differing:
        return
    shown = ", ".join(
        f"{token!r} is {index} and {reward.get(token, 'absent')}" for index, token in differing[:3]
    )
    raise ModelError(
        f"the policy's and the reward model's vocabularies differ in {len(differing)} tokens (sizes "
        f"{len(policy)} and {len(reward)}; {shown}); the reward model reads the policy's token ids, so pass "
        "one of the same model family"
    )


def _load(
    auto_class: Any, path: str, dtype: torch.dtype, offline_names: Sequence[str], extra: dict[str, Any]
) -> tuple[PreTrainedModel, list[str]]:
    config = _load_config(path, offline_names, **extra)
    _switch_dropout_off(config)
    try:
        # A head that the checkpoint lacks must not differ between two loads, nor advance anybody's generator.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, info = auto_class.from_pretrained(
                path, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except (OSError, ValueError) as error:
        raise ModelError(_unavailable("model", path, error, offline_names)) from error
    if info["mismatched_keys"]:
        shapes = "; ".join(
            f"{name} is {list(there)}, not {list(here)}" for name, there, here in info["mismatched_keys"]
        )
        needs = (
            "a reward model or critic has exactly one label"
            if extra
            else "the folder's config.json is another model's"
        )
        raise ModelError(f"the weights of {path} do not fit: {shapes}; {needs}")
    return model.eval(), sorted(info["missing_keys"])


def _load_config(path: str, offline_names: Sequence[str], **extra: Any) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(path, **extra)
    except (OSError, ValueError) as error:
        raise ModelError(_unavailable("model", path, error, offline_names)) from error
    if config.is_encoder_decoder:
        raise ModelError(
            f"{path} is an encoder-decoder ({config.model_type}); only decoders, where the response "
            "continues the prompt, can be trained"
        )
    return config


def _switch_dropout_off(config: PreTrainedConfig) -> None:
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            is_dropout = "dropout" in name or "pdrop" in name or name.endswith("_drop")
            if is_dropout and isinstance(value, float) and not isinstance(value, bool):
                setattr(part, name, 0.0)


def _unavailable(kind: str, path: str, error: Exception, offline_names: Sequence[str]) -> str:
    offline = f", or a name that works offline: {', '.join(offline_names)}" if offline_names else ""
    advice = f"pass a folder written by save_pretrained, or a hub id that can be reached{offline}"
    if Path(path).is_dir():
        return f"no {kind} can be loaded from the folder {path}: {_first_line(error)}; {advice}"
    return (
        f"{kind} {path!r} is no folder here and could not be had from the hub: {_first_line(error)}; {advice}"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
