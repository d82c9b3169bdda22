"""What an algorithm inherits: its config and no-op hooks.

An algorithm is one class with a pydantic config. It never sees the generator, the schedule or the learner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from torch import Tensor

from oppo_kit.protocols import State
from oppo_kit.types import (
    Group,
    MicroBatch,
    PolicyOutputs,
    RolloutBatch,
    StepReport,
    TokenChunk,
    TrainBatch,
)


def _at_least_two(num_generations: int) -> int:
    if num_generations < 2:
        raise ValueError(
            "a response is compared with the others of its prompt, and without any its advantage would always be 0; "
            "take 2 or more, 4 to 16 usually, or an algorithm with a critic, such as ppo"
        )
    return num_generations


NumGenerations = Annotated[int, AfterValidator(_at_least_two)]
"""G of an algorithm that compares the responses to one prompt."""


class AlgorithmConfig(BaseModel):
    """Settings that every algorithm has; frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_epochs: int = Field(default=1, ge=1, description="passes over a batch; 1 to 4")
    num_mini_batches: int = Field(default=1, ge=1, description="optimizer steps per pass; 1 to 8, at most B")


class AlgorithmBase(ABC):
    """Inherit, set the attributes, write ``prepare`` and ``loss``; override hooks as needed.

    Attributes but ``name`` and ``config_class`` may be set in ``__init__``, from the config; what they mean stands in
    ``oppo_kit.protocols.Algorithm``. The engine calls all methods from one thread; what one raises ends the step.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    group_size: int = 1
    scorers: frozenset[str] = frozenset({"reward"})
    needs_critic: bool = False
    needs_proximal: bool = False
    needs_whole_groups: bool = False

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    @property
    def num_epochs(self) -> int:
        """Passes over a batch."""
        return self.config.num_epochs

    @property
    def num_mini_batches(self) -> int:
        """Optimizer steps per pass."""
        return self.config.num_mini_batches

    @abstractmethod
    def prepare(self, batch: RolloutBatch) -> TrainBatch:
        """Advantages, returns, pairs: all that needs the whole batch, without gradient."""

    @abstractmethod
    def loss(self, micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's addend of the step's loss and of metrics; see ``oppo_kit.protocols.Algorithm``."""

    def state_dict(self) -> State:
        """What a resumed run must know of this object: tensors and primitives; nothing, unless it learns or counts."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Go on from ``state_dict``."""

    def on_chunk(self, chunks: Sequence[TokenChunk]) -> None:
        """After every decode call, with a chunk for each live response; their tokens are taken already."""

    def on_complete(self, group: Group) -> None:
        """A group has ended: once per group, before it is scored, trained or rejected; to be read, not changed."""

    def on_batch(self, batch: RolloutBatch) -> None:
        """B groups are selected and scored, before ``prepare``; again if the engine collects again before it steps."""

    def on_update(self, report: StepReport) -> None:
        """After a step, weights handed over or the batch left out; what is added to ``report.metrics`` is logged."""
