"""Which models a run has, and how large they are: counted on the meta device, where a parameter takes no memory.

An alias's architecture comes with this package; a folder has its own, and so has a hub id in the hub's cache. Any other
reward model or critic is taken to be as large as the policy, which the report says. No weights are read, and nothing is
downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, try_to_load_from_cache
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from harness.gpu_check.random_models import load_shape
from harness.models import ALIASES, Role, resolve_model
from harness.packaged_models import NUM_REWARD_LAYERS
from harness.workloads.base import get_task
from oppo_kit.algorithm import AlgorithmBase
from oppo_kit.backends.loading import load_settings
from oppo_kit.build import add_adapter
from oppo_kit.config import LoraSettings, TrainConfig
from oppo_kit.errors import ConfigError, ModelError

# Aliases without weights in this package: the embedded configuration, and what differs in the reward model's.
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-3b": ("qwen2.5-3b", {}),
    "qwen2.5-7b": ("qwen2.5-7b", {}),
    "smollm2-135m": ("smollm2-135m", {"num_hidden_layers": NUM_REWARD_LAYERS}),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a decoder that memory and time depend on.

    Attributes:
        num_layers: decoder layers.
        hidden: elements of a hidden state.
        inner: elements between the two halves of the feed-forward part.
        key_value: elements of one token's key in one layer; its value has as many.
        vocab: tokens.
    """

    num_layers: int
    hidden: int
    inner: int
    key_value: int
    vocab: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Shape:
        """The shape that a configuration describes.

        Raises:
            ModelError: it has no attention.
        """
        text: Any = config.get_text_config()
        num_heads = getattr(text, "num_attention_heads", None)
        if not num_heads:
            raise ModelError(
                f"a model of the type {config.model_type!r} has no attention heads; only decoders that keep keys and "
                "values can be planned and served, such as Qwen2's"
            )
        head_size = getattr(text, "head_dim", None) or text.hidden_size // num_heads
        return cls(
            num_layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            inner=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            key_value=head_size * (getattr(text, "num_key_value_heads", None) or num_heads),
            vocab=text.vocab_size,
        )


@dataclass(frozen=True, slots=True)
class CountedModel:
    """One model of a run.

    Attributes:
        name: as configured.
        architecture: where its configuration is from, in words.
        shape: of its decoder.
        num_parameters: all of them, tied ones once.
        num_bytes: of all parameters.
        trained_bytes: of those that are trained; 0: frozen.
        block_bytes: of the largest part that FSDP gathers at once: a decoder layer, or the embedding.
    """

    name: str
    architecture: str
    shape: Shape
    num_parameters: int
    num_bytes: int
    trained_bytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a run; None: the run has no such model.

    Attributes:
        policy: trained, with its adapter where there is one.
        critic: trained.
        reward: frozen; None where functions score.
        reference: frozen.
        reward_name: of the reward, whatever it is; None: nobody named one.
    """

    policy: CountedModel
    critic: CountedModel | None
    reward: CountedModel | None
    reference: CountedModel | None
    reward_name: str | None

    @property
    def scorers(self) -> list[CountedModel]:
        """What reads every response once, frozen."""
        return [model for model in (self.reward, self.reference) if model is not None]

    @property
    def trained(self) -> list[CountedModel]:
        """What the learner owns."""
        return [model for model in (self.policy, self.critic) if model is not None]


def count_models(train: TrainConfig, algorithm: AlgorithmBase) -> Models:
    """All models of a run, counted.

    Raises:
        OppoError: a name that is none, or a policy of which nothing is known.
    """
    dtype = getattr(torch, train.dtype)
    config, origin = known_config(train.model, "policy")
    policy = _count(train.model, origin, _make(config, "policy", dtype, train.actor_lora), is_trained=True)
    reward_name = train.reward or get_task(train.task).default_reward
    reward_config, reward_origin = config, "taken to be as large as the policy"
    reward = None
    if "reward" in algorithm.scorers and not is_function(reward_name):
        if reward_name is not None:
            reward_config, reward_origin = _config_or(reward_name, "reward", config)
        made = _make(reward_config, "reward", dtype)
        reward = _count(reward_name or "none is named", reward_origin, made, is_trained=False)
    critic = None
    if algorithm.needs_critic:
        name, critic_config, critic_origin = train.critic, config, origin
        if name is not None:
            critic_config, critic_origin = _config_or(name, "critic", config)
        elif reward is not None and _reads_ids(train, config, reward_config):
            name, critic_config, critic_origin = reward.name, reward_config, reward_origin
        made = _make(critic_config, "critic", dtype)
        critic = _count(name or train.model, critic_origin, made, is_trained=True)
    reference = None
    if "reference" in algorithm.scorers:
        made = _make(config, "policy", dtype)
        reference = _count(train.model, "the policy before training", made, is_trained=False)
    return Models(policy, critic, reward, reference, reward_name)


def is_function(reward: str | None) -> bool:
    """Whether a reward is ``module:function``."""
    return reward is not None and ":" in reward and not Path(reward).is_dir()


def known_config(name: str, role: Role) -> tuple[PreTrainedConfig, str]:
    """A model's configuration, and where it is from in words; no weights are touched.

    Raises:
        OppoError: a name that is none, a reward model that the alias has not, or nothing known of it here.
    """
    if name in _SHAPES and not (role == "reward" and ALIASES[name].reward is None):
        shape, changes = _SHAPES[name]
        has_own = role == "reward" or (role == "critic" and ALIASES[name].reward is not None)
        return embedded_config(shape, **(changes if has_own else {})), "comes with this package"
    path = resolve_model(name, role)
    if Path(path).is_dir():
        return load_settings(path).config, "its folder's config.json"
    # From the cache alone: a hub that cannot be reached is asked again and again, for half a minute.
    cached = try_to_load_from_cache(path, "config.json", cache_dir=constants.HF_HUB_CACHE)
    if not isinstance(cached, str):
        raise ModelError(
            f"nothing is known here of the {role} {path!r}: its config.json is not in the hub's cache; fetch it with: "
            f"hf download {path} config.json"
        )
    return load_settings(Path(cached).parent).config, "the hub's cache"


def embedded_config(name: str, **changes: Any) -> PreTrainedConfig:
    """A configuration that comes with this package."""
    values = load_shape(name) | changes
    return AutoConfig.for_model(values.pop("model_type"), **values)


def _config_or(name: str, role: Role, policy: PreTrainedConfig) -> tuple[PreTrainedConfig, str]:
    """The policy's for a hub id of which nothing is known here."""
    try:
        return known_config(name, role)
    except ModelError:
        if Path(name).is_dir():
            raise
        return policy, "not in the hub's cache: taken to be as large as the policy"


def _reads_ids(train: TrainConfig, policy: PreTrainedConfig, reward: PreTrainedConfig) -> bool:
    """Whether the critic can start from the reward model; without tokenizers, by the size of the vocabulary."""
    if train.reward_input != "auto":
        return train.reward_input == "ids"
    return Shape.of(policy).vocab == Shape.of(reward).vocab


def _make(
    config: PreTrainedConfig, role: Role, dtype: torch.dtype, lora: LoraSettings | None = None
) -> nn.Module:
    """A model without memory, as the run would make it."""
    auto_class: Any = AutoModelForCausalLM if role == "policy" else AutoModelForSequenceClassification
    config.num_labels = 1
    try:
        with torch.device("meta"):
            model = auto_class.from_config(config, dtype=dtype)
    except ValueError as error:
        raise ModelError(
            f"a model of the type {config.model_type!r} cannot be the {role}: {_first_line(error)}; pass a "
            "decoder such as Qwen2's"
        ) from error
    if lora is None:
        return model
    try:
        with torch.device("meta"):
            return add_adapter(model, lora)
    except ValueError as error:
        raise ConfigError(
            f"the adapter does not fit a model of the type {config.model_type!r}: {_first_line(error)}; set "
            "actor_lora.target_modules to names of its linear layers, or to all-linear"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")


def _count(name: str, architecture: str, model: Any, *, is_trained: bool) -> CountedModel:
    parameters = list(model.parameters())
    base: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model
    stacks = [part for part in base.modules() if isinstance(part, nn.ModuleList)]
    blocks = [base.get_input_embeddings(), *(max(stacks, key=len, default=()))]
    return CountedModel(
        name=name,
        architecture=architecture,
        shape=Shape.of(base.config),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_bytes=_num_bytes(parameters),
        trained_bytes=_num_bytes([p for p in parameters if p.requires_grad]) if is_trained else 0,
        block_bytes=max(_num_bytes(list(block.parameters())) for block in blocks),
    )


def _num_bytes(parameters: list[nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
