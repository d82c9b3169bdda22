"""Measures a run of TRL's GRPO, RLOO or OnlineDPO trainer from outside: timers around its methods, a callback.

It imports no TRL: the trainer is handed in. ``generate_s`` is the call of ``generate`` with what TRL does around it;
``score_s`` the reward and the reference's forward passes; ``train_s`` all the rest of the step, TRL's own housekeeping
included. Evaluation is in no step. What a drop-in trainer logs under ``oppo/``, decoding before and beside that call
included, is taken from there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from harness.runners.trl_recorder import Recorder, finite_logs
from harness.schema import Step

if TYPE_CHECKING:
    from harness.runners.base import Evaluate, OnStep, RunSpec


_OVERLAP_METRICS = (
    "generate_s",
    "tokens_decoded",
    "delta",
    "in_flight",
    "queued",
    "age_mean",
    "age_max",
    "num_deferred",
)


@dataclass
class LogProbs:
    """Sum over the tokens of so many rows."""

    total: float = 0.0
    num_rows: int = 0

    def add(self, logprobs: Tensor, mask: Tensor) -> None:
        """[r, t] log-probs, and which of them are there."""
        self.total += float(torch.where(mask.bool(), logprobs.detach().float(), 0.0).sum())
        self.num_rows += len(logprobs)


@dataclass
class GroupMeter:
    """Seconds of the parts of the current step, and what they returned."""

    clock: Callable[[], float]
    num_rows: int
    generate_s: float = 0.0
    score_s: float = 0.0
    lengths: list[int] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    policy: LogProbs = field(default_factory=LogProbs)
    reference: LogProbs = field(default_factory=LogProbs)

    def reset(self) -> None:
        """Forget the last step."""
        self.generate_s = self.score_s = 0.0
        self.lengths, self.scores = [], []
        self.policy, self.reference = LogProbs(), LogProbs()

    def count(self, logprobs: Tensor, mask: Tensor, *, is_reference: bool) -> None:
        """Keep the first log-probs of every row, which are those of the weights before the update."""
        found = self.reference if is_reference else self.policy
        if found.num_rows < self.num_rows:
            found.add(logprobs, mask)

    @property
    def kl(self) -> float | None:
        """Mean over rows of log(policy / reference) of a response; None without a reference."""
        if not self.reference.num_rows:
            return None
        return self.policy.total / self.policy.num_rows - self.reference.total / self.reference.num_rows


def time_groups(trainer: Any, meter: GroupMeter) -> None:
    """Put timers around the methods of a GRPO or RLOO trainer."""
    generate, score = trainer._generate_single_turn, trainer._calculate_rewards
    find_logprobs = trainer._get_per_token_logps_and_entropies

    def timed_generate(*args: Any, **kwargs: Any) -> Any:
        started_s = meter.clock()
        found = generate(*args, **kwargs)
        meter.generate_s += meter.clock() - started_s
        # GRPO's also has log-probs.
        meter.lengths += map(len, found[0] if isinstance(found, tuple) else found)
        return found

    def timed_logprobs(
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        started_s = meter.clock()
        found = find_logprobs(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        is_reference = _is_reference(model, trainer.ref_model)
        if is_reference:
            meter.score_s += meter.clock() - started_s
        meter.count(found[0], attention_mask[:, -logits_to_keep:], is_reference=is_reference)
        return found

    trainer._generate_single_turn, trainer._get_per_token_logps_and_entropies = timed_generate, timed_logprobs
    trainer._calculate_rewards = _timed_score(score, meter)


def time_pairs(trainer: Any, meter: GroupMeter) -> None:
    """The same for an OnlineDPO trainer."""
    generate, score, find_logprobs = (
        trainer._generate,
        trainer._calculate_rewards_from_functions,
        trainer._forward,
    )

    def timed_generate(*args: Any, **kwargs: Any) -> Any:
        started_s = meter.clock()
        found = generate(*args, **kwargs)
        meter.generate_s += meter.clock() - started_s
        meter.lengths += found[3].sum(1).tolist()
        return found

    def timed_logprobs(
        model: nn.Module,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        *args: Any,
    ) -> Any:
        started_s = meter.clock()
        found = find_logprobs(model, prompt_ids, prompt_mask, completion_ids, completion_mask, *args)
        is_reference = _is_reference(model, trainer.ref_model)
        if is_reference:
            meter.score_s += meter.clock() - started_s
        meter.count(found, completion_mask, is_reference=is_reference)
        return found

    trainer._generate, trainer._forward = timed_generate, timed_logprobs
    trainer._calculate_rewards_from_functions = _timed_score(score, meter)


def _timed_score(score: Callable[..., Tensor], meter: GroupMeter) -> Callable[..., Tensor]:
    def timed_score(*args: Any, **kwargs: Any) -> Tensor:
        started_s = meter.clock()
        found = score(*args, **kwargs)
        meter.score_s += meter.clock() - started_s
        meter.scores.append(found.detach().clone().flatten())
        return found

    return timed_score


def _is_reference(model: nn.Module, reference: nn.Module | None) -> bool:
    """Whether this pass is the reference's: with an adapter, TRL passes the policy with the adapter switched off."""
    return model is reference or any(
        getattr(part, "disable_adapters", False) is True for part in model.modules()
    )


class GroupRecorder(Recorder):
    """Makes a Step of all optimizer steps that train one generation batch.

    A step ends when TRL has logged its last optimizer step, for averaging its own metrics belongs to it.
    """

    def __init__(
        self,
        spec: RunSpec,
        evaluate: Evaluate,
        on_step: OnStep,
        meter: GroupMeter,
        *,
        num_updates: int,
    ) -> None:
        """``num_updates``: optimizer steps per generation batch."""
        super().__init__(spec, evaluate, on_step)
        self._meter = meter
        self._num_updates = num_updates
        self._logs: list[dict[str, float | None]] = []
        self._started_s = 0.0

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        """Evaluate the untrained policy and start the first step."""
        self._evaluate_untrained(kwargs["model"])
        self._start_step()

    def on_log(self, *_: Any, **kwargs: Any) -> None:
        """Keep what TRL says about an optimizer step; after the last one of a batch, read the clock first."""
        stop_s = self._meter.clock()
        if "train_runtime" in kwargs["logs"]:  # the summary at the end of training
            return
        self._logs.append(finite_logs(kwargs["logs"]))
        if len(self._logs) == self._num_updates:
            self._finish(self._make_step(stop_s - self._started_s), kwargs["model"])
            self._start_step()

    def _start_step(self) -> None:
        self._meter.reset()
        self._logs = []
        self._started_s = self._meter.clock()

    def _make_step(self, step_s: float) -> Step:
        meter, batch_size = self._meter, self._spec.train.batch_size
        num_trained = (len(self.steps) + 1) * batch_size
        scores = torch.cat(meter.scores).float()
        reward_mean = float(scores.nanmean())
        metrics = _means(self._logs)
        overlap = {
            name: value for name in _OVERLAP_METRICS if (value := metrics.get(f"oppo/{name}")) is not None
        }
        generate_s = meter.generate_s + overlap.get("generate_s", 0.0)
        in_flight, queued = int(overlap.get("in_flight", 0)), int(overlap.get("queued", 0))
        return Step(
            step=len(self.steps),
            step_s=step_s,
            generate_s=generate_s,
            score_s=meter.score_s,
            train_s=step_s - generate_s - meter.score_s,
            tokens_decoded=int(overlap.get("tokens_decoded", sum(meter.lengths))),
            tokens_trained=sum(meter.lengths),
            responses_trained=len(meter.lengths),
            reward_mean=None if math.isnan(reward_mean) else reward_mean,
            kl=meter.kl,
            delta=int(overlap.get("delta", 0)),
            chunk_tokens=0,
            age_mean=overlap.get("age_mean", 0.0),
            age_max=int(overlap.get("age_max", 0)),
            num_deferred=int(overlap.get("num_deferred", 0)),
            drawn=num_trained + in_flight + queued,
            trained=num_trained,
            in_flight=in_flight,
            queued=queued,
            trained_lengths=list(meter.lengths),
            metrics=metrics,
        )


def _means(logs: list[dict[str, float | None]]) -> dict[str, float | None]:
    """By name, over the optimizer steps that have a number."""
    names = dict.fromkeys(itertools.chain.from_iterable(logs))
    found = {name: [value for one in logs if (value := one.get(name)) is not None] for name in names}
    return {name: sum(values) / len(values) if values else None for name, values in found.items()}
