"""What crosses a border between the parts: plain data, no behaviour beyond its own consistency.

Knows no model, no tokenizer, no algorithm. Everything here survives a checkpoint as tensors and primitives.

Glossary (one word per idea, everywhere):

- **prompt**: what the policy is asked, as token ids, with the data set's other columns.
- **response**: what the policy answers, as token ids; the stop token, when sampled, belongs to it.
- **rollout**: one response in the making or ended, with its behaviour log-probs and policy versions.
- **group**: all rollouts of one draw of a prompt; the unit of selection, never split. PPO's has one rollout.
- **draw**: one taking of a prompt from the data; ``draw_id`` is 0, 1, 2, …, never reused.
- **B** (``batch_size``): groups trained per step. **Δ** (``delta``): the overcommit, groups held beyond B.
- **in flight**: admitted and not ended. **queued**: ended and not yet trained. **deferred**: carried over an update.
- **chunk**: tokens of one rollout that are handed on at once: by the generator (``TokenChunk``, ``decode_tokens`` at
  most), or to the scorers (``chunk_tokens`` at least, the paper's chunk).
- **feed**: to give a scorer the chunk of a rollout that has not ended, to be prefilled.
- **tick**: one decode iteration over all live rows; ticks also count inside a chunk.
- **version**: number of weight updates so far; the version of a token is the one that sampled it.
- **age**: versions between a group's first token and its training.
- **score**: what a scorer says about one rollout: a scalar (reward) or one number a token (reference).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from oppo_kit.ops.padding import length_mask, pad_rows

FinishReason = Literal["stop", "length"]
Score = float | list[float]

EFFECTIVE_SAMPLE = "oppo/effective_sample_frac"
"""The learner's metric that the controller of Δ reads; see ``AccelerateLearner.update``."""


class RolloutKey(NamedTuple):
    """Names one rollout for its whole life: the draw and the index inside its group."""

    draw_id: int
    sample_index: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One draw of a prompt.

    Attributes:
        draw_id: 0, 1, 2, …; never reused, also across epochs and duplicates.
        token_ids: the tokens the policy is conditioned on; at least one.
        max_new_tokens: the response's token limit, counted over all steps that it takes.
        columns: the data set's columns (primitives), handed to function rewards unchanged.
    """

    draw_id: int
    token_ids: tuple[int, ...]
    max_new_tokens: int
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """What one ``decode`` call added to one rollout.

    Attributes:
        key: which rollout.
        token_ids: new tokens; empty only when the limit left no token to sample.
        behaviour_logprobs: natural log-probs of those tokens under the policy that sampled them, over the
            full vocabulary, at the sampling temperature.
        version: the policy version that sampled all of them.
        last_tick: tick inside this ``decode`` call (1-based) at which the last token was sampled.
        finish_reason: ``"stop"`` if the last token is a stop token, ``"length"`` at the limit, None if live.
        sampling_logprobs: log-probs of the tokens under the truncated distribution that they were drawn from;
            None without top-k, top-p or min-p. exp(behaviour - sampling) is the probability mass that was kept.
        prefix_logprobs: log-probs of all earlier tokens of the response under ``version``, when a carried response
            was prefilled again by a generator that records them; else None.
    """

    key: RolloutKey
    token_ids: list[int]
    behaviour_logprobs: list[float]
    version: int
    last_tick: int
    finish_reason: FinishReason | None
    sampling_logprobs: list[float] | None = None
    prefix_logprobs: list[float] | None = None


@dataclass(slots=True)
class Rollout:
    """One response in the making. The per-token lists always have the same length.

    Attributes:
        key: names it.
        prompt: what it answers.
        token_ids: the tokens so far.
        behaviour_logprobs: their log-probs under the policy that sampled them, over the full vocabulary.
        versions: that policy's version, by token.
        proximal_logprobs: their log-probs under the newest policy that has read them: as behaviour where nothing
            newer is recorded.
        sampling_logprobs: see ``TokenChunk``; as behaviour without truncation.
        finish_reason, end_tick: why it ended, and the global tick of its last token; None while live.
        scores: by scorer name; None where the scorer abstained.
    """

    key: RolloutKey
    prompt: Prompt
    token_ids: list[int] = field(default_factory=list)
    behaviour_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    proximal_logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    end_tick: int | None = None
    scores: dict[str, Score | None] = field(default_factory=dict)

    @property
    def is_ended(self) -> bool:
        """Whether the response has ended, by a stop token or by its limit."""
        return self.finish_reason is not None

    @property
    def remaining_tokens(self) -> int:
        """Tokens that may still be sampled: the limit less all tokens so far, whatever step they came from."""
        return self.prompt.max_new_tokens - len(self.token_ids)

    def snapshot(self) -> Rollout:
        """What a scorer reads of it, as it is now: prompt, tokens, why it ended."""
        return Rollout(
            self.key, self.prompt, token_ids=list(self.token_ids), finish_reason=self.finish_reason
        )

    def append(self, chunk: TokenChunk, *, base_tick: int) -> None:
        """Add a chunk; ``base_tick`` is the global tick before the decode call that made it."""
        self.token_ids.extend(chunk.token_ids)
        self.behaviour_logprobs.extend(chunk.behaviour_logprobs)
        self.versions.extend([chunk.version] * len(chunk.token_ids))
        if chunk.prefix_logprobs is not None:
            self.proximal_logprobs[:] = chunk.prefix_logprobs
        self.proximal_logprobs.extend(chunk.behaviour_logprobs)
        self.sampling_logprobs.extend(chunk.sampling_logprobs or chunk.behaviour_logprobs)
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
            self.end_tick = base_tick + chunk.last_tick


@dataclass(slots=True)
class Group:
    """All rollouts of one draw; trained, carried and rejected as a whole.

    Attributes:
        admitted_step, ended_step: the steps (0-based) that admitted it, and in which its last response ended, if any.
    """

    prompt: Prompt
    rollouts: list[Rollout]
    admitted_step: int
    ended_step: int | None = None

    @property
    def draw_id(self) -> int:
        """The draw that this group answers."""
        return self.prompt.draw_id

    @property
    def is_ended(self) -> bool:
        """Whether every response of the group has ended."""
        return all(rollout.is_ended for rollout in self.rollouts)

    @property
    def end_tick(self) -> int:
        """Global tick at which the last response ended; only of an ended group."""
        return max(rollout.end_tick or 0 for rollout in self.rollouts)

    @property
    def first_version(self) -> int | None:
        """Version of the oldest token, None before the first token."""
        return min((rollout.versions[0] for rollout in self.rollouts if rollout.versions), default=None)

    def age(self, version: int) -> int:
        """Versions between the first token and ``version``; 0 before the first token."""
        first = self.first_version
        return 0 if first is None else version - first


@dataclass(slots=True)
class RolloutBatch:
    """B scored groups, sorted by draw id, as rows: row r is rollout r % G of group r // G.

    Tensors are on the CPU; the learner moves what it needs. T is the longest response of the batch.

    Attributes:
        groups: the B groups.
        version: the policy version about to be updated.
        prompt_ids: R lists of prompt token ids.
        response_ids: [R, T] int64, zero past a row's end.
        response_lengths: [R] int64, in 0..T; the only source of validity.
        behaviour_logprobs: [R, T] float32, zero past a row's end.
        proximal_logprobs: [R, T] float32, zero past a row's end; see ``Rollout``.
        sampling_logprobs: [R, T] float32, zero past a row's end; see ``Rollout``.
        is_current: [R, T] bool, tokens that ``version`` sampled.
        is_stopped: [R] bool, True when the response ended by a stop token.
        scores: by scorer name: [R] for a scalar, [R, T] (zero past the end) for one number a token. A scalar is NaN
            where the scorer abstained; every group of several rollouts has two that are not.
        values: [R, T] critic values before the update, zero past the end; None without a critic.
    """

    groups: list[Group]
    version: int
    prompt_ids: list[list[int]]
    response_ids: Tensor
    response_lengths: Tensor
    behaviour_logprobs: Tensor
    proximal_logprobs: Tensor
    sampling_logprobs: Tensor
    is_current: Tensor
    is_stopped: Tensor
    scores: dict[str, Tensor]
    values: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """R = B × G."""
        return len(self.prompt_ids)

    @property
    def group_size(self) -> int:
        """G, rollouts per group."""
        return self.num_rows // len(self.groups)

    @property
    def response_mask(self) -> Tensor:
        """[R, T] bool, True on the tokens of the response."""
        return length_mask(self.response_lengths, self.response_ids.shape[1])

    @property
    def kept_mass_mean(self) -> float:
        """Mean over tokens of the probability that truncation left to draw from; 1 without truncation."""
        kept = (self.behaviour_logprobs - self.sampling_logprobs).exp()[self.response_mask]
        return float(kept.mean()) if kept.numel() else 1.0

    @classmethod
    def from_groups(cls, groups: Sequence[Group], version: int) -> RolloutBatch:
        """Lay out ended, scored groups as padded tensors, sorted by draw id."""
        ordered = sorted(groups, key=lambda group: group.draw_id)
        rollouts = [rollout for group in ordered for rollout in group.rollouts]
        num_tokens = max((len(rollout.token_ids) for rollout in rollouts), default=0)
        names = rollouts[0].scores if rollouts else {}

        def by_token(name: str) -> Tensor:
            return pad_rows([getattr(rollout, name) for rollout in rollouts], num_tokens, torch.float32)

        # Padded with -1, which no version is.
        versions = pad_rows([[v + 1 for v in r.versions] for r in rollouts], num_tokens, torch.int64) - 1
        return cls(
            groups=ordered,
            version=version,
            prompt_ids=[list(rollout.prompt.token_ids) for rollout in rollouts],
            response_ids=pad_rows([r.token_ids for r in rollouts], num_tokens, torch.int64),
            response_lengths=torch.tensor([len(r.token_ids) for r in rollouts], dtype=torch.int64),
            behaviour_logprobs=by_token("behaviour_logprobs"),
            proximal_logprobs=by_token("proximal_logprobs"),
            sampling_logprobs=by_token("sampling_logprobs"),
            is_current=versions == version,
            is_stopped=torch.tensor([r.finish_reason == "stop" for r in rollouts]),
            scores={name: _stack_scores([r.scores[name] for r in rollouts], num_tokens) for name in names},
        )


@dataclass(slots=True)
class TrainBatch:
    """What an algorithm makes of a RolloutBatch: the rows and the tensors that its loss needs.

    Attributes:
        rollouts: the batch it came from.
        tensors: by name, leading dimension R; [R, T] ones are cut to the micro-batch's longest row.
        metrics: plain numbers about the whole batch.
        loss_mask: [R, T] bool, the tokens of the responses that the loss reads; None: all of them.
        row_mask: [R] bool, the rows that count; None: those of which the loss reads any token, and the empty.
    """

    rollouts: RolloutBatch
    tensors: dict[str, Tensor]
    metrics: dict[str, float]
    loss_mask: Tensor | None = None
    row_mask: Tensor | None = None


@dataclass(slots=True)
class MicroBatch:
    """Some rows of one optimizer step. Sums over micro-batches must not depend on the split.

    Attributes:
        mask: [r, t] bool, the tokens that the loss reads: the response's, but what ``TrainBatch.loss_mask`` leaves out.
        tensors: the algorithm's own tensors, cut to these rows.
        num_step_tokens: tokens of the mask in the whole optimizer step (all micro-batches, all processes).
        num_step_rows: rows of the whole optimizer step that count; see ``TrainBatch.row_mask``.
        mean_step_tokens: ``num_step_tokens`` on average over the steps of a pass; None: there is one step.
    """

    mask: Tensor
    tensors: dict[str, Tensor]
    num_step_tokens: int
    num_step_rows: int
    mean_step_tokens: float | None = None


@dataclass(slots=True)
class PolicyOutputs:
    """What the models under training say about a micro-batch.

    Attributes:
        policy_logprobs: [r, t] log-probs of the response tokens at the sampling temperature, with gradient.
        entropy: [r, t] entropy of the policy in nats, no gradient.
        values: [r, t] critic values with gradient; None without a critic.
    """

    policy_logprobs: Tensor
    entropy: Tensor
    values: Tensor | None


class Span(NamedTuple):
    """What one part did between two moments of one clock.

    Attributes:
        lane: who did it: ``actor``, or the placement of a scorer.
        name: a stage of the step, or ``feed`` or ``score`` and the scorer's name.
        start_s, stop_s: monotonic seconds, the same clock in all processes of a machine.
        num_tokens: tokens that were read; 0 where nobody counts.
    """

    lane: str
    name: str
    start_s: float
    stop_s: float
    num_tokens: int = 0


@dataclass(slots=True)
class StepReport:
    """One engine step. ``drawn == trained + in_flight + queued + sum(rejected.values())``, always (groups).

    Times are seconds of the step's wall time; ``engine_s`` is what no part accounts for: the engine's own. ``score_s``
    is what the step waited for scores; ``score_busy_s`` what scorers worked, beside it or while it waited.
    ``score_at`` and ``chunk_tokens`` (0: no chunks) are what this step used. ``tokens_prefetched`` were read by scorers
    before their response had ended, ``tokens_scored`` after. ``spans`` is the step's timeline.
    """

    step: int
    version: int
    delta: int
    score_at: str
    chunk_tokens: int
    groups_trained: int
    responses_trained: int
    drawn: int
    trained: int
    in_flight: int
    queued: int
    rejected: dict[str, int]
    tokens_decoded: int
    tokens_trained: int
    step_s: float
    generate_s: float
    score_s: float
    train_s: float
    sync_s: float
    engine_s: float
    score_busy_s: float
    tokens_prefetched: int
    tokens_scored: int
    age_mean: float
    age_max: int
    num_deferred: int
    trained_lengths: list[int]
    reward_mean: float | None
    metrics: dict[str, float]
    spans: list[Span]


def _stack_scores(scores: Sequence[Score | None], num_tokens: int) -> Tensor:
    if isinstance(scores[0], list):
        return pad_rows([s for s in scores if isinstance(s, list)], num_tokens, torch.float32)
    return torch.tensor([math.nan if score is None else score for score in scores], dtype=torch.float32)
