"""REINFORCE leave-one-out: a response's baseline is the mean reward of the others of its group.

Sources: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al. 2024, arXiv 2402.14740.
Names and defaults are those of TRL 1.16's ``RLOOConfig``. It never sees how the rollouts were made.

A response is one action here, so ratio, clip and correction are of whole responses:

    r = π(y) / π_anchor(y),  loss = w · max(-A r, -A clip(r, 1 - ε, 1 + ε_high)),  each π(y) a product over tokens.

``none``: the anchor is the behaviour policy, w = 1. ``decoupled``: the anchor is the newest policy that has read y, and
w = min(π_proximal(y) / π_behaviour(y), cap). Without cap and clip w · r = π(y) / π_behaviour(y), so the expectation is
that of the current policy, whichever policies sampled the parts of y; a fresh response has w = 1. As w is a product
over all carried tokens, the cap is reached sooner than per token.

Deviations from TRL 1.16's ``RLOOTrainer``:

- B (``batch_size``) counts prompts.
- The ratio, and the KL in the reward, use the log-probs recorded while sampling; TRL recomputes them.
- The loss is a mean over the responses of an optimizer step, whatever the micro-batches.
- With ``mask_truncated_completions`` a truncated response leaves the loss's denominator too; TRL counts it there with
  ratio 1, and drops its KL from its reward.
- Statistics of rewards are taken in float64. ``frac_reward_zero_std`` looks at the scores, before KL and clip;
  ``clip_ratio/low_min`` and ``high_max`` are left out, since they are no sums over micro-batches.
- ``correction`` is ours. Left out: weights of several rewards (``FunctionScorer`` sums them), a reference that follows
  the policy.
"""

from __future__ import annotations

import torch
from pydantic import Field, field_validator
from torch import Tensor

from oppo_kit.algorithm import AlgorithmBase, AlgorithmConfig, NumGenerations
from oppo_kit.ops.corrections import WEIGHT_CAP, Correction, correct
from oppo_kit.ops.groups import batch_std, leave_one_out_mean
from oppo_kit.ops.kl import kl_estimate
from oppo_kit.ops.losses import clipped_ratio_loss
from oppo_kit.ops.masking import masked_mean, masked_sum
from oppo_kit.ops.ratios import summed_log_ratios
from oppo_kit.ops.rollout_metrics import completion_metrics, reward_metrics
from oppo_kit.types import MicroBatch, PolicyOutputs, RolloutBatch, TrainBatch

# As TRL's: what a deviation must be well above to count, so that rounding is not blown up to advantages.
STD_EPSILON = 1e-4


class RLOOConfig(AlgorithmConfig):
    """RLOO's settings, named as in TRL's ``RLOOConfig``."""

    num_generations: NumGenerations = Field(
        default=2, description="G, responses per prompt; 2 to 8, at least 2"
    )
    num_epochs: int = Field(
        default=1, ge=1, alias="num_iterations", description="passes over a batch; 1 to 4"
    )
    beta: float = Field(
        default=0.05,
        ge=0,
        description="weight of the KL (k1) in the reward; 0 needs no reference; 0 to 0.1",
    )
    epsilon: float = Field(default=0.2, gt=0, le=1, description="clip of the ratio below 1; 0.1 to 0.3")
    epsilon_high: float | None = Field(default=None, gt=0, description="clip above 1; null: as epsilon")
    reward_clip_range: tuple[float, float] | None = Field(
        default=None, description="scores are clipped to it, before the KL is subtracted; null: not"
    )
    normalize_advantages: bool = Field(
        default=False, description="shift and rescale a batch's advantages to mean 0 and variance 1"
    )
    mask_truncated_completions: bool = Field(
        default=False, description="leave responses that their limit cut out of the loss"
    )
    correction: Correction = Field(
        default="none",
        description="for tokens of older policies; decoupled: clip near the newest, and weight",
    )
    weight_cap: float | None = Field(
        default=WEIGHT_CAP, ge=1, description="largest weight of decoupled; null: no limit; 2 to 5"
    )

    model_config = AlgorithmConfig.model_config | {"populate_by_name": True}

    @field_validator("reward_clip_range")
    @classmethod
    def _is_a_range(cls, bounds: tuple[float, float] | None) -> tuple[float, float] | None:
        if bounds is not None and bounds[0] >= bounds[1]:
            raise ValueError("the first number must be below the second; give [least, largest] or null")
        return bounds


class RLOO(AlgorithmBase):
    """G responses a prompt, each one's baseline made of the others, no critic."""

    name = "rloo"
    config_class = RLOOConfig
    config: RLOOConfig

    def __init__(self, config: RLOOConfig) -> None:
        super().__init__(config)
        self.group_size = config.num_generations
        self.scorers = frozenset({"reward", "reference"} if config.beta else {"reward"})
        self.needs_proximal = self.needs_proximal or config.correction == "decoupled"
        self._epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high

    def prepare(self, batch: RolloutBatch) -> TrainBatch:
        """A_i = R_i - mean of the others' R, R = clip(score) - beta · Σ kl; 0 for a response without a score."""
        config = self.config
        scores = rewards = batch.scores["reward"].double()
        metrics = reward_metrics(scores, self.group_size) | completion_metrics(batch)
        if config.reward_clip_range is not None:
            rewards = rewards.clamp(*config.reward_clip_range)
        if config.beta:
            kl = kl_estimate(batch.behaviour_logprobs, batch.scores["reference"], "k1").double()
            rewards = rewards - config.beta * summed_log_ratios(kl, batch.response_mask)
            metrics["kl"] = float(masked_mean(kl, batch.response_mask))
        advantages = rewards - leave_one_out_mean(rewards, self.group_size)
        if config.normalize_advantages:
            advantages = (advantages - advantages.nanmean()) / (batch_std(advantages) + STD_EPSILON)
        anchor = correct(batch, config.correction, weight_cap=config.weight_cap, log_ratios=summed_log_ratios)
        is_masked = config.mask_truncated_completions
        return TrainBatch(
            rollouts=batch,
            tensors={
                "advantages": advantages.nan_to_num(nan=0.0).float(),
                "anchor_logprobs": anchor.logprobs,
                "correction_weights": anchor.weights,
            },
            metrics=metrics,
            loss_mask=batch.response_mask & batch.is_stopped[:, None] if is_masked else None,
        )

    def loss(self, micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Σ over responses of w · max(-A r, -A clip(r)) / responses of the step."""
        tensors, mask = micro_batch.tensors, micro_batch.mask
        ratios = summed_log_ratios(outputs.policy_logprobs - tensors["anchor_logprobs"], mask).exp()
        losses, is_low, is_high = clipped_ratio_loss(
            ratios,
            tensors["advantages"],
            epsilon_low=self.config.epsilon,
            epsilon_high=self._epsilon_high,
        )
        is_read = mask.any(1)

        def mean(values: Tensor) -> Tensor:
            return masked_sum(values, is_read) / max(micro_batch.num_step_rows, 1)

        with torch.no_grad():
            metrics = {
                "entropy": masked_sum(outputs.entropy, mask) / max(micro_batch.num_step_tokens, 1),
                "clip_ratio/low_mean": mean(is_low.float()),
                "clip_ratio/high_mean": mean(is_high.float()),
                "clip_ratio/region_mean": mean((is_low | is_high).float()),
            }
        return mean(tensors["correction_weights"] * losses), metrics
