"""Measures a run of TRL's PPOTrainer from outside: timers around module globals, a callback between steps.

It imports no TRL: the module and the trainer are handed in. ``Recorder`` is what the callbacks of all trainers share.

``generate_s`` is ``batch_generation``; ``score_s`` the reference, critic and reward forward passes of the
rollout; ``train_s`` all the rest of the step, TRL's own housekeeping included. Evaluation is in no step.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from harness.schema import Evaluation, Step

if TYPE_CHECKING:
    from harness.runners.base import Evaluate, OnStep, RunSpec


@dataclass
class Meter:
    """Seconds of the parts of the current step, and what they returned."""

    clock: Callable[[], float]
    generate_s: float = 0.0
    score_s: float = 0.0
    responses: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)

    def reset(self) -> None:
        """Forget the last step."""
        self.generate_s = self.score_s = 0.0
        self.responses.clear()
        self.scores.clear()


@contextlib.contextmanager
def timed(module: Any, trainer: Any, meter: Meter) -> Iterator[None]:
    """Timers around TRL's generation and around the forward passes of its rollout, for a while."""
    batch_generation, get_reward, forward = module.batch_generation, module.get_reward, module.forward
    # With an adapter, TRL switches it off in the policy, and passes that; training passes policy and critic in one.
    reference = trainer.model.policy if trainer.ref_model is None else trainer.ref_model

    def timed_generation(model: nn.Module, queries: Tensor, *args: Any, **kwargs: Any) -> Any:
        started_s = meter.clock()
        query_responses, logits = batch_generation(model, queries, *args, **kwargs)
        meter.generate_s += meter.clock() - started_s
        meter.responses.append(query_responses[:, queries.shape[1] :])
        return query_responses, logits

    def timed_reward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        started_s = meter.clock()
        outputs = get_reward(model, *args, **kwargs)
        meter.score_s += meter.clock() - started_s
        if model is trainer.reward_model:
            meter.scores.append(outputs[1])
        return outputs

    def timed_forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        started_s = meter.clock()
        outputs = forward(model, *args, **kwargs)
        if model is reference:
            meter.score_s += meter.clock() - started_s
        return outputs

    module.batch_generation, module.get_reward, module.forward = timed_generation, timed_reward, timed_forward
    try:
        yield
    finally:
        module.batch_generation, module.get_reward, module.forward = batch_generation, get_reward, forward


class Recorder(TrainerCallback):
    """Keeps the steps that a subclass makes of TRL's, and evaluates between them."""

    def __init__(self, spec: RunSpec, evaluate: Evaluate, on_step: OnStep) -> None:
        self.steps: list[Step] = []
        self.evaluations: list[Evaluation] = []
        self._spec = spec
        self._evaluate = evaluate
        self._on_step = on_step

    def _evaluate_untrained(self, policy: nn.Module) -> None:
        if self._spec.eval_every:
            self._evaluate_policy(policy)

    def _finish(self, step: Step, policy: nn.Module) -> None:
        """Tell a step that is over, and evaluate where it is time to."""
        self.steps.append(step)
        self._on_step(step)
        num_steps, eval_every = len(self.steps), self._spec.eval_every
        if eval_every and (num_steps % eval_every == 0 or num_steps == self._spec.train.num_steps):
            self._evaluate_policy(policy)

    def _evaluate_policy(self, policy: nn.Module) -> None:
        """Evaluate, and leave modes and random states as they were: how often changes no training."""
        modes = [(part, part.training) for part in policy.modules()]
        python_state, numpy_state = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(), torch.no_grad():
                evaluation = self._evaluate(
                    policy,
                    step=len(self.steps),
                    elapsed_train_s=sum(step.step_s for step in self.steps),
                    responses_trained=sum(step.responses_trained for step in self.steps),
                )
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            for part, mode in modes:
                part.training = mode
        self.evaluations.append(evaluation)


class PPORecorder(Recorder):
    """Makes a Step of every step of TRL's PPO."""

    pad_token_id: int
    can_sample_pad: bool = True

    def __init__(
        self,
        spec: RunSpec,
        stop_token_ids: tuple[int, ...],
        evaluate: Evaluate,
        on_step: OnStep,
        meter: Meter,
    ) -> None:
        super().__init__(spec, evaluate, on_step)
        self._stop_token_ids = stop_token_ids
        self._meter = meter
        self._logs: dict[str, float | None] = {}
        self._started_s = 0.0

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        """Evaluate the untrained policy and start the first step."""
        self._evaluate_untrained(kwargs["model"].policy)
        self._start_step()

    def on_log(self, *_: Any, **kwargs: Any) -> None:
        """Keep what TRL says about the step."""
        self._logs = finite_logs(kwargs["logs"])

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        """Read the clock first; all that follows is outside the step."""
        self._finish(self._make_step(self._meter.clock() - self._started_s), kwargs["model"].policy)
        self._start_step()

    def _start_step(self) -> None:
        self._meter.reset()
        self._started_s = self._meter.clock()

    def _make_step(self, step_s: float) -> Step:
        meter, batch_size = self._meter, self._spec.train.batch_size
        sampled, trained = row_lengths(
            torch.cat(meter.responses),
            self._stop_token_ids,
            self.pad_token_id,
            can_sample_pad=self.can_sample_pad,
        )
        num_trained = (len(self.steps) + 1) * batch_size
        return Step(
            step=len(self.steps),
            step_s=step_s,
            generate_s=meter.generate_s,
            score_s=meter.score_s,
            train_s=step_s - meter.generate_s - meter.score_s,
            tokens_decoded=sum(sampled),
            tokens_trained=sum(trained),
            responses_trained=batch_size,
            reward_mean=float(torch.cat(meter.scores).float().mean()),
            kl=self._logs.get("objective/kl"),
            delta=0,
            chunk_tokens=0,
            drawn=num_trained,
            trained=num_trained,
            in_flight=0,
            queued=0,
            trained_lengths=trained,
            metrics=self._logs,
        )


def finite_logs(logs: dict[str, float | None]) -> dict[str, float | None]:
    """What TRL logged, with None for what is not finite."""
    return {
        name: float(value) if value is not None and math.isfinite(value) else None
        for name, value in logs.items()
    }


def row_lengths(
    responses: Tensor, stop_token_ids: tuple[int, ...], pad_token_id: int, *, can_sample_pad: bool = True
) -> tuple[list[int], list[int]]:
    """Tokens that each row sampled, and those of them that TRL trains.

    A row ends with its first stop token, else at the full width. TRL also ends it before the first pad
    token, even when the policy sampled that one.

    Args:
        responses: [R, T] token ids.
        stop_token_ids: tokens that end a response.
        pad_token_id: TRL's marker of invalid positions.
        can_sample_pad: False where the policy never samples it, so that it always marks the row's end.
    """
    width = responses.shape[1]

    def first(hits: Tensor) -> Tensor:
        return torch.where(hits.any(1), hits.int().argmax(1), width)

    stops = torch.tensor(stop_token_ids, dtype=responses.dtype, device=responses.device)
    sampled = (first(torch.isin(responses, stops)) + 1).clamp(max=width)
    trained = torch.minimum(sampled, first(responses == pad_token_id))
    return (sampled if can_sample_pad else trained).tolist(), trained.tolist()
