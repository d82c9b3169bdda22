"""Proximal policy optimisation with a learned critic and a KL penalty in the reward.

Names and defaults are those of TRL 1.12's ``PPOConfig``. It never sees how the rollouts were made.

Deviations from TRL 1.12's ``PPOTrainer``:

- The score stands on the last token of the response, not one past it.
- Validity comes from explicit lengths, never from ``ids != pad``: pad == eos, a sampled pad token, an empty
  response are ordinary input. The stop token belongs to the response and is trained.
- The critic's values past the end are 0 and its loss covers the response's tokens only; TRL adds one position.
- Losses are means over all response tokens of an optimizer step, not means of micro-batch means.
- ``missing_eos_penalty`` looks at whether the response ended by its stop set, not for the tokenizer's EOS.
- ``correction`` is ours; TRL's responses are always fresh. The KL in the reward stays that of the behaviour policy.
- The learning rate stands in the learner's config, ``response_length`` and ``temperature`` in the sampling config.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from oppo_kit.algorithm import AlgorithmBase, AlgorithmConfig
from oppo_kit.ops.advantages import generalised_advantages
from oppo_kit.ops.corrections import WEIGHT_CAP, Correction, correct
from oppo_kit.ops.kl import KLEstimator, kl_estimate
from oppo_kit.ops.losses import clipped_surrogate, clipped_value_loss
from oppo_kit.ops.masking import masked_sum, masked_whiten
from oppo_kit.ops.rollout_metrics import objective_metrics
from oppo_kit.types import MicroBatch, PolicyOutputs, RolloutBatch, TrainBatch


class PPOConfig(AlgorithmConfig):
    """PPO's settings, named as in TRL's ``PPOConfig``."""

    num_epochs: int = Field(
        default=4, ge=1, alias="num_ppo_epochs", description="passes over a batch; 1 to 4"
    )
    num_mini_batches: int = Field(default=1, ge=1, description="optimizer steps per pass; 1 to 8, at most B")
    gamma: float = Field(default=1.0, ge=0, le=1, description="discount per token; 1 for language")
    lam: float = Field(
        default=0.95, ge=0, le=1, description="trace decay of the advantage estimator; 0.9 to 1"
    )
    kl_coef: float = Field(default=0.05, ge=0, description="weight of the KL penalty in the reward; 0 to 0.2")
    kl_estimator: KLEstimator = Field(default="k1", description="k1 (unbiased) or k3 (never negative)")
    cliprange: float = Field(default=0.2, gt=0, description="clip of the policy ratio; 0.1 to 0.3")
    cliprange_value: float = Field(default=0.2, gt=0, description="clip of the value change; about cliprange")
    vf_coef: float = Field(default=0.1, ge=0, description="weight of the value loss; 0.1 to 1")
    whiten_rewards: bool = Field(default=False, description="rescale token rewards to unit variance")
    missing_eos_penalty: float | None = Field(
        default=None,
        ge=0,
        description="subtracted from the score of a response that its limit cut; null: none",
    )
    correction: Correction = Field(
        default="none",
        description="for tokens of older policies; decoupled: clip near the newest, and weight",
    )
    weight_cap: float | None = Field(
        default=WEIGHT_CAP, ge=1, description="largest weight of decoupled; null: no limit; 2 to 5"
    )

    model_config = AlgorithmConfig.model_config | {"populate_by_name": True}


class PPO(AlgorithmBase):
    """One response a prompt, token-level advantages from a critic."""

    name = "ppo"
    config_class = PPOConfig
    group_size = 1
    scorers = frozenset({"reward", "reference"})
    needs_critic = True
    config: PPOConfig

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.needs_proximal = self.needs_proximal or config.correction == "decoupled"

    def prepare(self, batch: RolloutBatch) -> TrainBatch:
        """Token rewards, advantages and returns; see ``token_rewards`` and ``generalised_advantages``."""
        config = self.config
        mask = batch.response_mask
        values = _required(batch.values, "critic values")
        scores = batch.scores["reward"]
        if config.missing_eos_penalty is not None:
            scores = torch.where(batch.is_stopped, scores, scores - config.missing_eos_penalty)
        kl = kl_estimate(batch.behaviour_logprobs, batch.scores["reference"], config.kl_estimator)
        kl = torch.where(mask, kl, torch.zeros_like(kl))
        rewards = token_rewards(scores, kl, batch.response_lengths, kl_coef=config.kl_coef)
        if config.whiten_rewards:
            rewards = masked_whiten(rewards, mask, shift_mean=False)
        advantages, returns = generalised_advantages(
            rewards, values, mask, gamma=config.gamma, lam=config.lam
        )
        anchor = correct(batch, config.correction, weight_cap=config.weight_cap)
        return TrainBatch(
            rollouts=batch,
            tensors={
                "anchor_logprobs": anchor.logprobs,
                "correction_weights": anchor.weights,
                "advantages": masked_whiten(advantages, mask),
                "returns": returns,
                "old_values": values,
            },
            metrics={
                **objective_metrics(batch, scores, float(kl.sum(1).mean()), config.kl_coef),
                "val/num_eos_tokens": float(batch.is_stopped.sum()),
            },
        )

    def loss(self, micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Σ over tokens of (w · clipped surrogate + vf_coef · clipped value loss) / tokens of the step."""
        tensors, mask, config = micro_batch.tensors, micro_batch.mask, self.config
        policy_losses, is_clipped = clipped_surrogate(
            outputs.policy_logprobs,
            tensors["anchor_logprobs"],
            tensors["advantages"],
            cliprange=config.cliprange,
        )
        value_losses, is_value_clipped = clipped_value_loss(
            _required(outputs.values, "critic values"),
            tensors["old_values"],
            tensors["returns"],
            cliprange_value=config.cliprange_value,
        )

        def mean(values: Tensor) -> Tensor:
            return masked_sum(values, mask) / max(micro_batch.num_step_tokens, 1)

        policy_loss, value_loss = mean(tensors["correction_weights"] * policy_losses), mean(value_losses)
        with torch.no_grad():
            log_ratio = outputs.policy_logprobs - tensors["anchor_logprobs"]
            metrics = {
                "loss/policy_avg": policy_loss.detach(),
                "loss/value_avg": value_loss.detach(),
                "policy/approxkl_avg": mean(0.5 * log_ratio**2),
                "policy/clipfrac_avg": mean(is_clipped.float()),
                "policy/entropy_avg": mean(outputs.entropy),
                "val/clipfrac_avg": mean(is_value_clipped.float()),
                "val/ratio": mean(log_ratio.exp()),
            }
        return policy_loss + config.vf_coef * value_loss, metrics


def token_rewards(scores: Tensor, kl: Tensor, response_lengths: Tensor, *, kl_coef: float) -> Tensor:
    """r_t = -kl_coef · kl_t, plus the score on the last token; an empty response has no token to carry it.

    Args:
        scores: [R].
        kl: [R, T], 0 past a row's end.
        response_lengths: [R] int64.
        kl_coef: weight of the penalty.
    """
    rewards = -kl_coef * kl
    rows = torch.nonzero(response_lengths > 0).squeeze(1)
    rewards[rows, response_lengths[rows] - 1] += scores[rows]
    return rewards


def _required(value: Any, what: str) -> Any:
    if value is None:
        raise ValueError(f"PPO needs {what}; build the engine with a critic")
    return value
