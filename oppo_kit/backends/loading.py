"""Models and tokenizers of transformers, loaded so that reinforcement learning can rely on them.

Evaluation mode and no dropout (a ratio must not be noisy), decoders only, nothing silently random.
Masks never come from the pad token here or anywhere, so pad == eos is ordinary.

A folder may hold a LoRA adapter instead of a model: its base is loaded, and the adapter is merged into it.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn
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

from oppo_kit.backends.forward import context_tokens
from oppo_kit.errors import ModelError

_logger = logging.getLogger(__name__)

_ADAPTER_CONFIG = "adapter_config.json"


class HasConfig(Protocol):
    """A model, or the settings that stand beside its weights."""

    @property
    def config(self) -> Any:
        """The model's configuration."""
        ...


class HasStopTokens(HasConfig, Protocol):
    """The same, with what stops a generation."""

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
        return context_tokens(self.config)


def load_settings(path: str | os.PathLike[str], *, offline_names: Sequence[str] = ()) -> ModelSettings:
    """Configuration and generation configuration, without weights.

    Args:
        path: folder or hub id; of a LoRA adapter: what its base says.
        offline_names: what the caller can load without a network; named in the error.

    Raises:
        ModelError: it is not there, cannot be reached, or is an encoder-decoder.
    """
    config = _load_config(str(path), offline_names)
    try:
        generation_config = GenerationConfig.from_pretrained(_adapters_of(str(path))[0])
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
        _logger.info(
            "the critic starts from %s, which has no score head: %s starts at 0", path, ", ".join(missing)
        )
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
    """A tokenizer; without a pad token, EOS pads too. A LoRA adapter without one has its base's.

    Raises:
        ModelError: it is not there or cannot be read.
    """
    base, adapters = _adapters_of(str(path))
    source = next((folder for folder in adapters if (Path(folder) / "tokenizer_config.json").is_file()), base)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ModelError(_unavailable("tokenizer", source, error, offline_names)) from error
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


def has_same_vocabulary(
    policy_tokenizer: PreTrainedTokenizerBase, reward_tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Whether every token of the policy has the same id in the reward model."""
    return not _differing_tokens(policy_tokenizer.get_vocab(), reward_tokenizer.get_vocab())


def _differing_tokens(policy: Mapping[str, int], reward: Mapping[str, int]) -> list[tuple[int, str]]:
    return sorted((index, token) for token, index in policy.items() if reward.get(token) != index)


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
    differing = _differing_tokens(policy, reward)
    if not differing:
        return
    shown = ", ".join(
        f"{token!r} is {index} and {reward.get(token, 'absent')}" for index, token in differing[:3]
    )
    raise ModelError(
        f"the policy's and the reward model's vocabularies differ in {len(differing)} tokens (sizes "
        f"{len(policy)} and {len(reward)}; {shown}); set reward_input to 'text', or pass a reward "
        "model of the policy's family"
    )


def check_vocab_sizes(
    policy: HasConfig,
    reward: HasConfig | nn.Module | None,
    critic: HasConfig | nn.Module | None,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Every id that the policy can be given or sample has an embedding in it, the reward model and the critic.

    Args:
        policy: the model or its settings, as the next two.
        reward: None with a reward that is no model; a module without a configuration is not checked.
        critic: None without one.
        tokenizer: the policy's.

    Raises:
        ModelError: naming both sizes.
    """
    size = _vocab_size(policy)
    needed = 1 + max(tokenizer.get_vocab().values(), default=-1)
    if size < needed:
        raise ModelError(
            f"the policy's vocab_size is {size}, but its tokenizer needs {needed}: the ids from {size} on have no "
            f"embedding; pass the model's own tokenizer, or save the model after resize_token_embeddings({needed})"
        )
    for role, model in (("reward model", reward), ("critic", critic)):
        if hasattr(model, "config") and (own := _vocab_size(model)) < size:
            raise ModelError(
                f"the {role}'s vocab_size is {own}, the policy's {size}: the policy could sample ids "
                f"that the {role} has no embedding for; pass a {role} with the policy's vocab_size, or save it "
                f"after resize_token_embeddings({size})"
            )


def _vocab_size(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def _adapters_of(path: str) -> tuple[str, list[str]]:
    """The model below a folder of a LoRA adapter, and the adapters on it, outermost first."""
    adapters: list[str] = []
    while (Path(path) / _ADAPTER_CONFIG).is_file() and not (Path(path) / "config.json").is_file():
        file = Path(path) / _ADAPTER_CONFIG
        adapters.append(path)
        try:
            base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"{file} cannot be read: {error}; save the adapter again") from error
        if not base or base in adapters:
            raise ModelError(
                f"{path} is a LoRA adapter whose {_ADAPTER_CONFIG} names {'itself' if base else 'no model'} as its "
                "base; set base_model_name_or_path there to the folder or hub id of the model that it was trained on"
            )
        path = str(base)
    return path, adapters


def _merge(model: PreTrainedModel, adapter: str, *, is_classifier: bool) -> tuple[PreTrainedModel, set[str]]:
    """The model with the adapter merged into its weights, and the modules that the adapter replaced entirely.

    A classifier may have a language model's adapter, from which it has the backbone; not the other way round.
    """
    from peft import PeftModel

    try:
        config = _adapter_config(adapter, is_classifier)
        merged: Any = PeftModel.from_pretrained(model, adapter, config=config)
        model = merged.merge_and_unload()
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelError(
            f"the LoRA adapter in {adapter} does not fit {model.name_or_path}: {_first_line(error)}; correct "
            f"base_model_name_or_path in its {_ADAPTER_CONFIG}, or pass a model with the adapter merged"
        ) from error
    model.name_or_path = str(
        Path(adapter).resolve()
    )  # so that an adapter trained on the merged model names it as its base
    return model.requires_grad_(True), set(getattr(config, "modules_to_save", None) or ())


def _adapter_config(adapter: str, is_classifier: bool) -> Any:
    from peft import PeftConfig

    config: Any = PeftConfig.from_pretrained(adapter)
    if not is_classifier and config.task_type == "SEQ_CLS":
        raise ValueError("it is of a sequence classifier, not of a language model")
    if is_classifier and config.task_type != "SEQ_CLS":
        config.task_type = None  # what PEFT wants of a language model is of no use here
    return config


def _load(
    auto_class: Any, path: str, dtype: torch.dtype, offline_names: Sequence[str], extra: dict[str, Any]
) -> tuple[PreTrainedModel, list[str]]:
    base, adapters = _adapters_of(path)
    config = _load_config(path, offline_names, **extra)
    _switch_dropout_off(config)
    try:
        # A head that the checkpoint lacks must not differ between two loads, nor advance anybody's generator.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, info = auto_class.from_pretrained(
                base, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except (OSError, ValueError) as error:
        raise ModelError(_unavailable("model", base, error, offline_names)) from error
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
    missing = set(info["missing_keys"])
    for adapter in reversed(adapters):
        model, replaced = _merge(model, adapter, is_classifier=bool(extra))
        missing = {name for name in missing if replaced.isdisjoint(name.split("."))}
    return model.eval(), sorted(missing)


def _load_config(path: str, offline_names: Sequence[str], **extra: Any) -> PreTrainedConfig:
    base, adapters = _adapters_of(path)
    try:
        config = AutoConfig.from_pretrained(base, **extra)
    except (OSError, ValueError) as error:
        what = f"{path} is a LoRA adapter, and its base is missing: " if adapters else ""
        raise ModelError(what + _unavailable("model", base, error, offline_names)) from error
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
