"""Models of embedded shapes with random weights, made where they are used: nothing is read, copied or downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from harness.gpu_check.lengths import RandomPrompts
from harness.gpu_check.settings import CheckModel, CheckSize, Size
from harness.workloads.loading import Workload
from oppo_kit.errors import ConfigError

_CONFIGS = Path(__file__).parents[1] / "assets" / "gpu"
# Every runner, and every call, makes the same weights.
_SEEDS = {"policy": 1, "critic": 2, "reward": 3}
_PAD = 0


def load_shape(name: str) -> dict[str, Any]:
    """The numbers of an embedded configuration."""
    return json.loads((_CONFIGS / f"{name}.json").read_text())


class RandomWorkload(Workload):
    """The workload of the check on one device."""

    def __init__(self, model: CheckModel, size_name: Size, size: CheckSize, device: torch.device) -> None:
        policy_shape = load_shape(model.policy[size_name])
        vocab_size = policy_shape["vocab_size"]
        self._policy_shape = policy_shape
        self._critic_shape = load_shape(model.critic[size_name]) | {"vocab_size": vocab_size}
        self._device = device
        untouched: Any = None  # nothing is evaluated, so no task is asked
        prompts: Any = RandomPrompts(size.num_prompt_tokens, vocab_size, size.lengths)
        super().__init__(
            task=untouched,
            tokenizer=_make_tokenizer(),
            prompts=prompts,
            eval_prompts=[],
            stop_token_ids=(),
            policy_path=model.policy[size_name],
            reward_path=model.critic[size_name],
            critic_path=model.critic[size_name],
            dtype=getattr(torch, size.dtype),
        )

    def make_policy(self) -> PreTrainedModel:
        """A causal language model; the same weights at every call."""
        return self._make("policy", AutoModelForCausalLM, _config(self._policy_shape))

    def make_reward(self) -> PreTrainedModel:
        """A sequence classifier with one label, likewise."""
        return self._make("reward", AutoModelForSequenceClassification, _config(self._critic_shape))

    def make_critic(self) -> PreTrainedModel:
        """The same shape, other weights."""
        return self._make("critic", AutoModelForSequenceClassification, _config(self._critic_shape))

    def _make(self, role: str, auto_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), self._device:
            torch.manual_seed(_SEEDS[role])
            return auto_class.from_config(config, dtype=self.dtype).eval()


def require_gpu(size_name: Size) -> None:
    """Ask for a GPU without opening it: a parent that holds one would disturb its children.

    Raises:
        ConfigError: the full size without one.
    """
    if size_name == "full" and not torch.cuda.is_available():
        raise ConfigError(
            "--size full needs an NVIDIA GPU with about 110 GiB of memory, and PyTorch "
            f"{torch.__version__} finds none here; try the same code on the CPU with --size small"
        )


def open_device(size_name: Size) -> torch.device:
    """The first GPU; for the small size without one the CPU.

    Raises:
        ConfigError: the full size without a GPU, or with one that lacks bfloat16.
    """
    require_gpu(size_name)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if size_name == "full" and not torch.cuda.is_bf16_supported():
        raise ConfigError(
            f"--size full computes in bfloat16, which {torch.cuda.get_device_name(0)} does not support; use "
            "a GPU of the Ampere generation or later, or --size small"
        )
    return torch.device("cuda", 0)


def policy_sum(policy: torch.nn.Module) -> float:
    """The sum of all weights: equal for equal models, however they are trained."""
    return float(sum(float(weight.detach().sum(dtype=torch.float64)) for weight in policy.parameters()))


def _config(shape: dict[str, Any]) -> PreTrainedConfig:
    values = {name: value for name, value in shape.items() if name != "model_type"}
    config = AutoConfig.for_model(shape["model_type"], **values, pad_token_id=_PAD)
    config.num_labels = 1
    return config


def _make_tokenizer() -> PreTrainedTokenizerFast:
    """Names the padding, and an EOS that TRL counts; no text is ever read or written."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": _PAD, "<eos>": 1}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
