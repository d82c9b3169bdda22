"""The whole contract between the engine and its parts. Read this first.

    prompts ─ admit ─► Generator ─ TokenChunk ─► engine ─ feed, submit ─► ScorerHandle ─ scores ─┐
                           ▲                                                                     ▼
                           └── load_weights(version) ── Learner.update ◄── Algorithm.prepare ◄── RolloutBatch

The engine calls from one thread, never two methods at once. Only a ScorerHandle may work elsewhere, behind futures.
"""

# pyright: reportReturnType=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from torch import Tensor

from oppo_kit.types import (
    Group,
    MicroBatch,
    PolicyOutputs,
    Prompt,
    Rollout,
    RolloutBatch,
    RolloutKey,
    Score,
    Span,
    StepReport,
    TokenChunk,
    TrainBatch,
)

State = dict[str, Any]
"""Tensors and primitives, nested in dicts and lists, so that ``torch.load(weights_only=True)`` reads it."""

CallPer = Literal["response", "group", "batch"]  # a call holds any ended ones, whole groups, a step's B

EventListener = Callable[[str, dict[str, Any]], None]
"""Called with a kind (``admitted``, ``decoded``, ``ended``, ``selected``, ``rejected``, ``updated``) and facts."""


class Clock(Protocol):
    """Monotonic seconds; a virtual one drives tests and simulations."""

    def now_s(self) -> float:
        """Seconds since some fixed moment."""


class PromptSource(Protocol):
    """An endless, deterministic sequence of prompts: draw n is the same prompt whenever it is asked for."""

    def draw(self, draw_id: int) -> Prompt:
        """The prompt of this draw; epochs wrap by themselves."""


class Generator(Protocol):
    """Samples tokens; the noise is a function of (seed, draw id, sample index, position), whatever else is live."""

    # Optional: ``policy_logprobs(batch) -> Tensor``, [R, T], where those of its chunks are only near the policy's.
    def admit(self, rollouts: Sequence[Rollout]) -> None:
        """Take rollouts to decode; tokens that they already have are context and are not sampled again."""

    def decode(self, max_tokens: int) -> list[TokenChunk]:
        """Advance every live rollout by up to ``max_tokens`` ticks: a chunk each, in any order; ended ones leave."""

    def set_shared(self, is_shared: bool) -> None:
        """Whether scorers work beside the next ``decode``, so that it should leave them cores."""

    def evict(self, keys: Sequence[RolloutKey]) -> None:
        """Forget live rollouts; the unknown are ignored."""

    def load_weights(self, version: int) -> None:
        """Take the learner's current weights; tokens sampled from now on carry ``version``."""


class Scorer(Protocol):
    """Scores ended rollouts: a reward model, a reference policy, a Python function."""

    name: str
    # Optional: ``call_per: CallPer``, else "response"; ``follows_weights: bool``, whether an update voids its scores.

    def score(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        """One score per rollout, in order; None abstains. A group is rejected without two scores, or its only one."""


@runtime_checkable
class StreamingScorer(Scorer, Protocol):
    """One that reads a response while it is decoded; its scores are those without ``feed``, to rounding."""

    def feed(self, rollouts: Sequence[Rollout]) -> None:
        """Prefill what is new of rollouts that have not ended; each holds all of its tokens so far."""

    def forget(self, keys: Sequence[RolloutKey] | None) -> None:
        """Drop what was prefilled of these rollouts, or of all; the unknown are ignored."""


class ScorerHandle(Protocol):
    """A scorer somewhere (see ``oppo_kit.placement``): the engine sees futures only."""

    name: str
    call_per: CallPer
    follows_weights: bool
    can_stream: bool

    @property
    def is_busy(self) -> bool:
        """Whether it computes, or is about to, on cores that decoding should leave it."""

    def submit(self, rollouts: Sequence[Rollout]) -> list[Future[Score | None]]:
        """Start scoring ended rollouts, one future each; a failure is the futures' exception."""

    def feed(self, rollouts: Sequence[Rollout]) -> None:
        """Hand on unfinished rollouts; returns at once. One that is not read yet is replaced by a later one."""

    def set_awaited(self, is_awaited: bool) -> None:
        """Whether the engine waits for scores, so that a scorer may use the cores that it leaves."""

    def forget(self, keys: Sequence[RolloutKey] | None) -> None:
        """See ``StreamingScorer``; when it returns, a scorer in this process is not at work on them."""

    def check(self) -> None:
        """Raise what a feed raised, or the death of the part, if there was one."""

    def take_spans(self) -> list[Span]:
        """What was done since the last call."""

    def close(self) -> None:
        """Release what the placement holds, also after a failure."""


class Algorithm(Protocol):
    """What is learned from a batch. Inherit ``oppo_kit.algorithm.AlgorithmBase``; see ``algorithms/README.md``."""

    name: ClassVar[str]
    group_size: int
    scorers: frozenset[str]  # which scores it needs: ``reward``, ``reference``
    needs_critic: bool  # there are values in the batch and the outputs
    needs_proximal: bool  # proximal log-probs follow the weights, else they are the behaviour log-probs
    needs_whole_groups: bool  # the loss compares rollouts: steps and micro-batches hold groups, side by side

    @property
    def num_epochs(self) -> int:
        """Passes over a batch."""

    @property
    def num_mini_batches(self) -> int:
        """Optimizer steps per pass."""

    def prepare(self, batch: RolloutBatch) -> TrainBatch:
        """Advantages, returns, pairs: all that needs the whole batch, without gradient."""

    def loss(self, micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Addends of the step's loss and of metrics: sums over rows or tokens divided by the step's totals."""

    def state_dict(self) -> State:
        """What a resumed run must know of it; empty unless it learns or counts."""

    def load_state_dict(self, state: State) -> None:
        """Go on from ``state_dict``."""

    # Hooks: after each decode call; when a group has ended; when B groups are scored, to be prepared; after ``update``.
    on_chunk: Callable[[Sequence[TokenChunk]], None]
    on_complete: Callable[[Group], None]
    on_batch: Callable[[RolloutBatch], None]
    on_update: Callable[[StepReport], None]


class Learner(Protocol):
    """Owns the models under training."""

    @property
    def policy(self) -> Any:
        """The policy under training, from which a generator takes its weights."""

    def compute_values(self, batch: RolloutBatch) -> Tensor:
        """[R, T] critic values under the weights about to be updated, zero past a row's end."""

    def update(self, batch: TrainBatch, algorithm: Algorithm) -> dict[str, float]:
        """All epochs and mini-batches of a step; NonFiniteError if loss or gradient is bad before a weight changed."""

    def state_dict(self) -> State:
        """Weights, optimizer, schedule: all that ``update`` changes."""

    def load_state_dict(self, state: State) -> None:
        """Go on from ``state_dict``."""

    def save_pretrained(self, folder: Path, tokenizer: Any = None) -> None:
        """The trained models in Hugging Face format."""


class Schedule(Protocol):
    """How many groups are in the air, and which are trained: the seam between the laws and the ideas."""

    name: str
    delta: int
    max_age: int

    def num_to_admit(self, num_held: int, batch_size: int, num_undrawn: int) -> int:
        """Groups to admit at the start of a step that holds ``num_held`` in flight or queued."""

    def select(self, groups: Sequence[Group], batch_size: int, version: int, step: int) -> list[Group] | None:
        """The B groups to train, by draw id, or None while the step must wait."""
