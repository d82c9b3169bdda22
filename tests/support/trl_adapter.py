"""Our ops, composed with TRL 1.12's quirks, and a recorder of what the real ``PPOTrainer`` computes.

The quirks, none of which our PPO has: validity from ``ids != pad``; the score one past the last token; the
critic on the row as it was sampled, one position past its end included; one mean per micro-batch; temperature
+ 1e-7.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trl_tiny import EOS, PAD, TinyWorkload

from algorithms.ppo import PPOConfig, token_rewards
from harness.runners import trl as runner
from harness.runners import trl_ppo
from harness.runners.base import RunSpec
from oppo_kit.config import LearnerConfig, SamplingConfig, TrainConfig
from oppo_kit.ops.advantages import generalised_advantages
from oppo_kit.ops.kl import kl_estimate
from oppo_kit.ops.losses import clipped_surrogate, clipped_value_loss
from oppo_kit.ops.masking import masked_mean, masked_whiten

TEMPERATURE = 0.7
# Added to the logits that TRL takes for those of generation: ratios from 0.5 to 2 reach both clips.
NOISE_SCALE = 0.4


@dataclass
class TrlStep:
    """TRL's local variables and gradients at one optimizer step, in the rollout's row order."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    rewards: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor
    scores: Tensor
    policy_loss: float
    value_loss: float


@dataclass
class TrlRun:
    """One update of the real PPOTrainer on given responses."""

    config: PPOConfig
    query_responses: Tensor
    context_length: int
    generation_logits: Tensor
    steps: list[TrlStep]

    @property
    def responses(self) -> Tensor:
        return self.query_responses[:, self.context_length :]


def record_trl(responses: Sequence[Sequence[int]], algo_config: dict[str, Any], folder: Path) -> TrlRun:
    """Run one update of PPOTrainer, with these responses instead of sampled ones."""
    train = TrainConfig(
        batch_size=len(responses),
        num_steps=1,
        algo_config=algo_config,
        sampling=SamplingConfig(response_length=len(responses[0]), temperature=TEMPERATURE),
        # The second epoch's values leave their clip range. A higher rate is worse conditioned: at 0.02
        # gradients reach 32 and differ by 2.7e-5 in float32; in float64 by 5e-15, given TRL's advantages
        # (its Bessel factor is float32).
        learner=LearnerConfig(max_grad_norm=None, learning_rate=0.004, lr_scheduler_type="constant"),
    )
    workload: Any = TinyWorkload()
    config = trl_ppo.check_ppo(train, workload)
    module = runner.import_module("ppo")
    spec = RunSpec(runner="trl", seed=5, train=train)
    trainer = trl_ppo._build_trainer(module, spec, workload, config, str(folder))
    run = TrlRun(config, torch.empty(0), 0, torch.empty(0), [])

    def given_responses(model: nn.Module, queries: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        rows = torch.cat([queries, torch.tensor(responses)], dim=1)
        logits = response_logits(model, rows, queries.shape[1]) / (TEMPERATURE + 1e-7)
        logits += NOISE_SCALE * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
        run.query_responses, run.context_length, run.generation_logits = (
            rows,
            queries.shape[1],
            logits.detach().clone(),
        )
        return rows, logits

    def record_step(*_: Any) -> None:
        run.steps.append(_step_of(trainer.model, _locals_of_train()))

    trainer.optimizer.optimizer.register_step_pre_hook(record_step)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module, "batch_generation", given_responses)
        trainer.train()
    return run


def _locals_of_train() -> dict[str, Any]:
    frame = sys._getframe()
    while frame.f_code.co_name != "train" or not frame.f_code.co_filename.endswith("ppo_trainer.py"):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_locals


def _step_of(model: nn.Module, variables: dict[str, Any]) -> TrlStep:
    tensors = {
        name: variables[name].detach().clone()
        for name in ("rewards", "advantages", "returns", "values", "scores")
    }
    return TrlStep(
        weights=copy.deepcopy(model.state_dict()),
        gradients={name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        policy_loss=variables["pg_loss"].item(),
        value_loss=variables["vf_loss"].item(),
        **tensors,
    )


class Models:
    """Our side's policy, reference, critic and reward model, with a recorded step's weights."""

    def __init__(self, step: TrlStep) -> None:
        workload = TinyWorkload()
        self.policy, self.reference = workload.make_policy(), workload.make_policy()
        self.critic, self.initial_critic = workload.make_critic(), workload.make_critic()
        self.reward = workload.make_reward()
        _load(self.policy, step.weights, "policy.")
        _load(self.critic, step.weights, "value_model.")

    def gradients(self) -> dict[str, Tensor]:
        """By TRL's names, so that they can be compared one by one."""
        parts = {"policy.": self.policy, "value_model.": self.critic}
        return {
            prefix + name: parameter.grad
            for prefix, model in parts.items()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }


def _load(model: nn.Module, weights: dict[str, Tensor], prefix: str) -> None:
    model.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})


def _inputs(rows: Tensor) -> dict[str, Any]:
    mask = rows != PAD
    return {
        "input_ids": rows.masked_fill(~mask, 0),
        "attention_mask": mask,
        "position_ids": mask.cumsum(1) - mask.long(),
    }


def response_logits(policy: nn.Module, rows: Tensor, context_length: int) -> Tensor:
    """[R, T, V] logits that predict the response tokens."""
    return policy(**_inputs(rows)).logits[:, context_length - 1 : -1]


def token_logprobs(policy: nn.Module, rows: Tensor, context_length: int) -> Tensor:
    """[R, T] log-probs of the response tokens."""
    logits = response_logits(policy, rows, context_length) / (TEMPERATURE + 1e-7)
    return logits.log_softmax(-1).gather(-1, rows[:, context_length:, None]).squeeze(-1)


def row_scores(classifier: Any, rows: Tensor) -> Tensor:
    """[R, P + T] the classifier's head at every position."""
    return classifier.score(classifier.model(**_inputs(rows)).last_hidden_state).squeeze(-1)


def response_values(critic: Any, rows: Tensor, context_length: int) -> Tensor:
    """[R, T] value of the state in which each response token is chosen."""
    return row_scores(critic, rows)[:, context_length - 1 : -1]


@dataclass
class AdaptedBatch:
    """What TRL prepares before its epochs, by our ops."""

    mask: Tensor
    value_mask: Tensor
    behaviour_logprobs: Tensor
    scores: Tensor
    rewards: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def adapted_prepare(run: TrlRun, models: Models) -> AdaptedBatch:
    """Rewards, advantages and returns as TRL defines them, composed of our ops."""
    config, context_length, width = run.config, run.context_length, run.responses.shape[1]
    places = torch.arange(width)[None, :]
    is_stop = run.responses == EOS
    truncated = run.responses.masked_fill(is_stop.cumsum(1) - is_stop.long() > 0, PAD)
    is_pad = truncated == PAD
    lengths = torch.where(is_pad.any(1), is_pad.int().argmax(1), width)
    mask, value_mask = places < lengths[:, None], places <= lengths[:, None]

    truncated_rows = torch.cat([run.query_responses[:, :context_length], truncated], dim=1)
    ends = context_length + lengths - 1
    scores = row_scores(models.reward, truncated_rows).gather(1, ends[:, None]).squeeze(1)
    if config.missing_eos_penalty is not None:
        scores = torch.where((truncated == EOS).any(1), scores, scores - config.missing_eos_penalty)
    behaviour_logprobs = (
        run.generation_logits.log_softmax(-1).gather(-1, run.responses[..., None]).squeeze(-1)
    )
    reference_logprobs = token_logprobs(models.reference, run.query_responses, context_length)
    kl = torch.where(mask, kl_estimate(behaviour_logprobs, reference_logprobs, config.kl_estimator), 0.0)
    score_ends = torch.where(lengths < width, lengths + 1, lengths)
    rewards = token_rewards(scores, kl, score_ends, kl_coef=config.kl_coef)
    if config.whiten_rewards:
        rewards = masked_whiten(rewards, value_mask, shift_mean=False)
    values = response_values(models.initial_critic, run.query_responses, context_length)
    values = torch.where(value_mask, values, 0.0)
    everywhere = torch.ones_like(mask)
    advantages, returns = generalised_advantages(
        rewards, values, everywhere, gamma=config.gamma, lam=config.lam
    )
    advantages = masked_whiten(advantages, mask)
    return AdaptedBatch(mask, value_mask, behaviour_logprobs, scores, rewards, values, advantages, returns)


def adapted_losses(run: TrlRun, batch: AdaptedBatch, models: Models) -> tuple[Tensor, Tensor]:
    """Policy loss and value loss of one micro-batch, with gradient."""
    config = run.config
    logprobs = token_logprobs(models.policy, run.query_responses, run.context_length)
    policy_losses, _ = clipped_surrogate(
        logprobs, batch.behaviour_logprobs, batch.advantages, cliprange=config.cliprange
    )
    values = response_values(models.critic, run.query_responses, run.context_length)
    value_losses, _ = clipped_value_loss(
        values, batch.values, batch.returns, cliprange_value=config.cliprange_value
    )
    return masked_mean(policy_losses, batch.mask), masked_mean(value_losses, batch.value_mask)
