"""What every runner shares: the specification of one run, and the evaluation on the fixed held-out set.

Knows no runner. A run is one process: its thread count and its seed are set before any model is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from harness.schema import Evaluation, Step, TimelineSpan
from harness.workloads.loading import Workload
from oppo_kit.backends.function_scorer import FunctionScorer
from oppo_kit.backends.hf_generator import HFGenerator
from oppo_kit.backends.hf_scorer import HFRewardScorer
from oppo_kit.config import TrainConfig
from oppo_kit.protocols import CallPer, Scorer
from oppo_kit.telemetry.clock import MonotonicClock
from oppo_kit.types import Rollout, RolloutKey

# Evaluation noise never coincides with training noise, and is the same for every runner and seed.
EVAL_SEED = 715_827_883
# Rows decoded at once in an evaluation; beyond this the step time grows faster than the rows.
EVAL_BATCH = 256


class RunSpec(BaseModel):
    """One runner, one seed, one process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    runner: str
    seed: int
    pair: int = 0
    num_threads: int = Field(default=1, ge=1)
    cores: tuple[int, int] | None = Field(
        default=None, description="placement split: the actor's core and the scorers'; None: all have all"
    )
    train: TrainConfig
    eval_every: int = Field(default=0, ge=0, description="steps between evaluations; 0: none at all")
    num_eval_problems: int = Field(default=0, ge=0)
    num_warmup_steps: int = 0
    fault: str | None = Field(default=None, description="of ``harness.faults``; None: a run as it should be")
    untrained: Evaluation | None = Field(
        default=None,
        description="before training, by an earlier run; holds for a policy with the same parameters",
    )
    save_to: Path | None = Field(default=None, description="folder for the trained model in HF format")


class Evaluate(Protocol):
    """Measures a policy on the held-out set."""

    def __call__(
        self, policy: nn.Module, *, step: int, elapsed_train_s: float, responses_trained: int
    ) -> Evaluation:
        """Evaluate now; the policy is left as it was."""
        ...


OnStep = Callable[[Step], None]


class Outcome(NamedTuple):
    """What a runner measured."""

    steps: list[Step]
    evaluations: list[Evaluation]
    timeline: list[TimelineSpan]


RunFunction = Callable[[RunSpec, Workload, Evaluate, OnStep], Outcome]


class HeldOutEvaluator:
    """Samples one response per held-out prompt with fixed noise, without overcommit, and judges it.

    Every runner, seed and step meets the same prompts and the same noise, so that differences between evaluations
    are differences between policies.

    Args:
        untrained: an evaluation before training, repeated if the policy has the parameters that it was made with.
    """

    def __init__(self, workload: Workload, train: TrainConfig, untrained: Evaluation | None = None) -> None:
        self._workload = workload
        self._untrained = untrained
        self._temperature = train.sampling.temperature
        self._clock = MonotonicClock()
        self._scorer: Scorer = make_reward_scorer(workload)

    @torch.no_grad()
    def __call__(
        self, policy: nn.Module, *, step: int, elapsed_train_s: float, responses_trained: int
    ) -> Evaluation:
        """Accuracy by the task's own checker, mean score by the training reward, mean length."""
        start_s = self._clock.now_s()
        policy_sha256 = hash_of_parameters(policy) if step == 0 else None
        known = self._untrained
        if known is not None and step == 0 and known.policy_sha256 == policy_sha256:
            return known
        rollouts = self._sample(policy)
        scores = [score for score in self._scorer.score(rollouts) if isinstance(score, float)]
        verdicts = [verdict for rollout in rollouts if (verdict := self._check(rollout)) is not None]
        return Evaluation(
            step=step,
            elapsed_train_s=elapsed_train_s,
            responses_trained=responses_trained,
            accuracy=sum(verdicts) / len(verdicts) if verdicts else None,
            score_mean=sum(scores) / len(scores) if scores else None,
            length_mean=sum(len(rollout.token_ids) for rollout in rollouts) / len(rollouts),
            eval_s=self._clock.now_s() - start_s,
            policy_sha256=policy_sha256,
        )

    def _sample(self, policy: nn.Module) -> list[Rollout]:
        generator = HFGenerator(
            policy,
            temperature=self._temperature,
            stop_token_ids=self._workload.stop_token_ids,
            seed=EVAL_SEED,
        )
        prompts = self._workload.eval_prompts
        rollouts = {
            RolloutKey(prompt.draw_id, 0): Rollout(RolloutKey(prompt.draw_id, 0), prompt)
            for prompt in prompts
        }
        waiting = list(rollouts.values())
        while waiting:
            batch, waiting = waiting[:EVAL_BATCH], waiting[EVAL_BATCH:]
            generator.admit(batch)
            while generator.num_live:
                for chunk in generator.decode(64):
                    rollouts[chunk.key].append(chunk, base_tick=0)
        return list(rollouts.values())

    def _check(self, rollout: Rollout) -> bool | None:
        text = self._workload.tokenizer.decode(rollout.token_ids, skip_special_tokens=True)
        return self._workload.task.check(rollout.prompt.columns, str(text), rollout.finish_reason == "stop")


def hash_of_parameters(module: nn.Module) -> str:
    """SHA-256 of all parameters and buffers with their names, types and shapes."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def make_reward_scorer(workload: Workload) -> Scorer:
    """A scorer of its own for the workload's reward: its model, or its functions."""
    if workload.reward_path is not None:
        return HFRewardScorer(workload.make_reward(), rendering=workload.reward_rendering())
    return make_function_scorer(workload)


def make_function_scorer(workload: Workload, call_per: CallPer = "response") -> FunctionScorer:
    """The workload's reward functions; called directly, it hands them all responses at once whatever ``call_per``."""
    return FunctionScorer(
        workload.reward_functions,
        workload.tokenizer,
        prompt_column=workload.prompt_column,
        call_per=call_per,
    )
