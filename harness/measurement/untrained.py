"""For measurements without training: the parts of an engine that decodes and scores, and reward models of any cost."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from harness.measurement.streaming_report import RewardModel
from oppo_kit.algorithm import AlgorithmBase, AlgorithmConfig
from oppo_kit.config import OverlapConfig
from oppo_kit.protocols import Generator, PromptSource
from oppo_kit.types import (
    MicroBatch,
    PolicyOutputs,
    Prompt,
    Rollout,
    RolloutBatch,
    RolloutKey,
    TokenChunk,
    TrainBatch,
)

# Modes look at the responses equally often, and a chunk is a multiple of it.
_DECODE_TOKENS = 8


class Response(NamedTuple):
    """What a mode made of one draw."""

    token_ids: tuple[int, ...]
    score: float


def choose_layers(cost: float, policy: nn.Module) -> RewardModel:
    """A classifier of the policy's layers, with ``cost`` times its parameters in matrix products, nearly.

    The policy multiplies by its layers and its output head for each token, the classifier by its layers only.
    """
    model: Any = policy
    head = model.get_output_embeddings()
    in_layers = sum(
        part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear) and part is not head
    )
    per_layer = in_layers / model.config.num_hidden_layers
    of_policy = in_layers + head.weight.numel()
    num_layers = max(1, round(cost * of_policy / per_layer))
    return RewardModel(cost=cost, num_layers=num_layers, achieved_cost=num_layers * per_layer / of_policy)


def make_reward(policy: nn.Module, num_layers: int) -> nn.Module:
    """A sequence classifier of the policy's architecture and width with random weights, the same every time."""
    config: Any = copy.deepcopy(policy.config)
    config.num_hidden_layers = num_layers
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )


def overlap_of(mode: str, delta: int) -> OverlapConfig:
    """The engine's settings of ``batch``, ``sample`` or ``chunk n``."""
    score_at, _, chunk_tokens = mode.partition(" ")
    chunk = {"chunk_tokens": int(chunk_tokens)} if chunk_tokens else {}
    return OverlapConfig.model_validate(
        {
            "schedule": "oppo",
            "delta": delta,
            "delta_control": "fixed",
            "decode_tokens": _DECODE_TOKENS,
            "score_at": score_at,
            "placement": "process",
            **chunk,
        }
    )


class FixedWeights:
    """A generator whose weights stay: an update costs nothing, and responses that go on are not prefilled again."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._version = 0

    def admit(self, rollouts: Sequence[Rollout]) -> None:
        """Hand on."""
        self._generator.admit(rollouts)

    def decode(self, max_tokens: int) -> list[TokenChunk]:
        """Under the version that the engine believes in."""
        return [replace(chunk, version=self._version) for chunk in self._generator.decode(max_tokens)]

    def set_shared(self, is_shared: bool) -> None:
        """As the generator inside."""
        self._generator.set_shared(is_shared)

    def evict(self, keys: Sequence[RolloutKey]) -> None:
        """Hand on."""
        self._generator.evict(keys)

    def load_weights(self, version: int) -> None:
        """Only remember the version."""
        self._version = version


class PromptsFrom:
    """The draws from some draw on, counted from 0."""

    def __init__(self, prompts: PromptSource, first_draw: int) -> None:
        self._prompts = prompts
        self._first_draw = first_draw

    def draw(self, draw_id: int) -> Prompt:
        """The prompt of another draw, under this id."""
        return replace(self._prompts.draw(self._first_draw + draw_id), draw_id=draw_id)


class NoTraining(AlgorithmBase):
    """Remembers every response with its score."""

    name: ClassVar[str] = "none"

    def __init__(self) -> None:
        super().__init__(AlgorithmConfig())
        self.responses: dict[int, Response] = {}
        self.num_tokens = 0

    def prepare(self, batch: RolloutBatch) -> TrainBatch:
        """Nothing."""
        return TrainBatch(batch, {}, {})

    def loss(self, micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: ARG002
        """Never asked for."""
        return torch.zeros(()), {}

    def on_batch(self, batch: RolloutBatch) -> None:
        """Keep the responses."""
        for group, score in zip(batch.groups, batch.scores["reward"].tolist(), strict=True):
            token_ids = group.rollouts[0].token_ids
            self.responses[group.draw_id] = Response(tuple(token_ids), score)
            self.num_tokens += len(group.prompt.token_ids) + len(token_ids)


class NoLearner:
    """Every update is done at once."""

    policy = None

    def compute_values(self, batch: RolloutBatch) -> Tensor:
        """Zeros."""
        return torch.zeros_like(batch.behaviour_logprobs)

    def update(self, batch: TrainBatch, algorithm: Any) -> dict[str, float]:  # noqa: ARG002
        """Nothing."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""

    def save_pretrained(self, folder: Path, tokenizer: Any = None) -> None:
        """Nothing."""
