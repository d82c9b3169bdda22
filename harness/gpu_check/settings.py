"""What the check runs: two models, their sizes, and the one training configuration of all runners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from harness.gpu_check.lengths import FULL_LENGTHS, SMALL_LENGTHS, ResponseLengths
from oppo_kit.config import TrainConfig
from oppo_kit.errors import UnknownNameError

Size = Literal["small", "full"]

RUNNERS = ("trl", "sequential", "overcommit", "both")
# The first step compiles kernels, fills the allocator's pools and, overcommitted, decodes Δ responses for later.
NUM_WARMUP_STEPS = 1
# Fewer would be no measurement.
MIN_MEASURED_STEPS = 2


@dataclass(frozen=True, slots=True)
class CheckModel:
    """One policy with its critic and reward model, in both sizes.

    Attributes:
        name: as ``--models`` has it.
        title: for people.
        is_lora: adapters are trained instead of all weights.
        time_weight: its runs' part of the time, relative to the other models'.
        policy: name of the embedded configuration, by size.
        critic: likewise, of critic and reward model; they take the policy's vocabulary.
    """

    name: str
    title: str
    is_lora: bool
    time_weight: float
    policy: dict[Size, str]
    critic: dict[Size, str]


MODELS = {
    model.name: model
    for model in (
        CheckModel(
            "3b",
            "Qwen2.5-3B, all weights",
            is_lora=False,
            time_weight=1.0,
            policy={"full": "qwen2.5-3b", "small": "small-3b"},
            critic={"full": "qwen2.5-0.5b", "small": "small-0.5b"},
        ),
        # An adapter adds five small kernels to every linear layer, which doubles the time of a decoding tick.
        CheckModel(
            "7b",
            "Qwen2.5-7B, LoRA",
            is_lora=True,
            time_weight=1.8,
            policy={"full": "qwen2.5-7b", "small": "small-7b"},
            critic={"full": "qwen2.5-0.5b", "small": "small-0.5b"},
        ),
    )
}


@dataclass(frozen=True, slots=True)
class CheckSize:
    """How much of it.

    Attributes:
        batch_size: B.
        delta: Δ of the overcommitted runner.
        decode_tokens: between two looks at the responses.
        num_prompt_tokens: of every prompt.
        num_mini_batches: optimizer steps of a batch; what one of them holds must fit into memory unsplit.
        lengths: of the responses.
        dtype: of all weights, gradients and optimizer states.
        max_steps: at most, however much time there is.
    """

    batch_size: int
    delta: int
    decode_tokens: int
    num_prompt_tokens: int
    num_mini_batches: int
    lengths: ResponseLengths
    dtype: Literal["float32", "bfloat16"]
    max_steps: int


SIZES: dict[Size, CheckSize] = {
    "full": CheckSize(
        batch_size=32,
        delta=16,
        decode_tokens=16,
        num_prompt_tokens=128,
        num_mini_batches=4,
        lengths=FULL_LENGTHS,
        dtype="bfloat16",
        max_steps=40,
    ),
    "small": CheckSize(
        batch_size=4,
        delta=2,
        decode_tokens=4,
        num_prompt_tokens=6,
        num_mini_batches=2,
        lengths=SMALL_LENGTHS,
        dtype="float32",
        max_steps=4,
    ),
}


def get_model(name: str) -> CheckModel:
    """The model of this name.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in MODELS:
        raise UnknownNameError("model", name, MODELS)
    return MODELS[name]


def train_config(model: CheckModel, size: CheckSize) -> TrainConfig:
    """The configuration that every runner gets; ``sequential`` leaves the overlap out by itself."""
    values: dict[str, Any] = {
        "algo": "ppo",
        "algo_config": {"num_ppo_epochs": 1, "num_mini_batches": size.num_mini_batches},
        "dtype": size.dtype,
        "actor_lora": {} if model.is_lora else None,
        "batch_size": size.batch_size,
        "num_steps": size.max_steps,
        # Random weights: no token means the end, the limits of the prompts do.
        "sampling": {
            "temperature": 1.0,
            "response_length": size.lengths.longest,
            "stop_token_ids": (),
        },
        # What the last runner streams by; too few steps for a controller to try anything.
        "overlap": {
            "delta": size.delta,
            "delta_control": "fixed",
            "max_age": 2,
            "decode_tokens": size.decode_tokens,
            "score_at": "chunk",
            "chunk_tokens": 4 * size.decode_tokens,
            "placement": "thread",
        },
        "learner": {"learning_rate": 1e-6, "lr_scheduler_type": "constant", "max_grad_norm": None},
    }
    return TrainConfig.model_validate(values)
