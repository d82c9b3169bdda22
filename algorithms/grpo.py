"""Group relative policy optimisation: a response's advantage is its reward against those of its group.

Sources: Shao et al. 2024, arXiv 2402.03300 (GRPO); Yu et al. 2025, arXiv 2503.14476 (DAPO: clip-higher, means over
tokens, truncated responses left out); Liu et al. 2025, arXiv 2503.20783 (Dr. GRPO). Names and defaults are those of
TRL 1.16's ``GRPOConfig``. It never sees how the rollouts were made.

Deviations from TRL 1.16's ``GRPOTrainer``:

- B (``batch_size``) counts prompts.
- The ratio is taken against the log-probs recorded while sampling; TRL recomputes them, or takes 1.
- ``grpo`` and ``dr_grpo`` are means over the responses of an optimizer step, so they do not depend on the
  micro-batches, whose means TRL averages. ``dapo`` divides by the tokens of the batch over its optimizer steps, as TRL.
- With ``mask_truncated_completions`` a truncated response leaves the denominators too; in TRL's ``grpo`` and
  ``dr_grpo`` it stays in them. Its reward counts in the statistics of its group, as in TRL.
- Statistics of rewards are taken in float64, so that equal rewards of any size have advantage 0 exactly.
- ``frac_reward_zero_std`` always looks at groups; ``clip_ratio/*`` are means over tokens, also of sequence ratios;
  their extremes (``low_min``, ``high_max``) are left out, since they are no sums over micro-batches.
- ``correction`` is ours; TRL corrects for a mismatch of engines only.
- Left out: the loss types bnpo, cispo, sapo, luspo and vespo, entropy bonus and quantile, off-policy mask, weights and
  separate statistics of several rewards (``FunctionScorer`` sums them), a reference that follows the policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from oppo_kit.algorithm import AlgorithmBase, AlgorithmConfig, NumGenerations
from oppo_kit.ops.corrections import WEIGHT_CAP, Correction, correct
from oppo_kit.ops.groups import batch_std, group_mean, group_std
from oppo_kit.ops.kl import kl_estimate
from oppo_kit.ops.losses import clipped_ratio_loss
from oppo_kit.ops.masking import masked_sum
from oppo_kit.ops.ratios import mean_log_ratios, token_log_ratios
from oppo_kit.ops.rollout_metrics import completion_metrics, reward_metrics
from oppo_kit.protocols import State
from oppo_kit.types import MicroBatch, PolicyOutputs, RolloutBatch, TrainBatch

# As TRL's: what a deviation must be well above to count, so that rounding is not blown up to rewards.
STD_EPSILON = 1e-4


class GRPOConfig(AlgorithmConfig):
    """GRPO's settings, named as in TRL's ``GRPOConfig``."""

    num_generations: NumGenerations = Field(
        default=8, description="G, responses per prompt; 4 to 16, at least 2"
    )
    num_epochs: int = Field(
        default=1, ge=1, alias="num_iterations", description="passes over a batch; 1 to 4"
    )
    loss_type: Literal["grpo", "dr_grpo", "dapo"] = Field(
        default="dapo",
        description="mean over a response's tokens, then over responses; sum over tokens by the response limit, then "
        "over responses; mean over all tokens",
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group",
        description="standard deviation that advantages are divided by; true: group, false: none",
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        default="token", description="a ratio per token, or the geometric mean of a response's"
    )
    epsilon: float = Field(default=0.2, gt=0, le=1, description="clip of the ratio below 1; 0.1 to 0.3")
    epsilon_high: float | None = Field(
        default=None, gt=0, description="clip above 1; null: as epsilon, 0.28 in DAPO"
    )
    delta: float | None = Field(
        default=None,
        gt=1,
        description="limit of the ratio where the advantage is negative; null: none; 2 to 10",
    )
    beta: float = Field(
        default=0.0, ge=0, description="weight of the KL (k3) in the loss; 0 needs no reference; 0 to 0.05"
    )
    use_bias_correction_kl: bool = Field(
        default=True, description="multiply the KL by the ratio, so that its gradient is unbiased"
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

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _accept_booleans(cls, value: object) -> object:
        return {True: "group", False: "none"}[value] if isinstance(value, bool) else value


class GRPO(AlgorithmBase):
    """G responses a prompt, one advantage a response, no critic."""

    name = "grpo"
    config_class = GRPOConfig
    config: GRPOConfig

    def __init__(self, config: GRPOConfig) -> None:
        super().__init__(config)
        self.group_size = config.num_generations
        self.scorers = frozenset({"reward", "reference"} if config.beta else {"reward"})
        self.needs_proximal = self.needs_proximal or config.correction == "decoupled"
        self._mean = _MEANS[config.loss_type]
        self._deviation = _DEVIATIONS[config.scale_rewards]
        self._log_ratios = _LOG_RATIOS[config.importance_sampling_level]
        self._epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        self._ratio_limit = math.inf if config.delta is None else config.delta
        self._response_limit = 0

    def prepare(self, batch: RolloutBatch) -> TrainBatch:
        """A_i = (r_i - mean r) / (std r + 1e-4), in the group; 0 for a response without a reward."""
        config = self.config
        scores = batch.scores["reward"].double()
        deviations = scores - group_mean(scores, self.group_size)
        advantages = deviations / self._deviation(scores, self.group_size)
        anchor = correct(batch, config.correction, weight_cap=config.weight_cap, log_ratios=self._log_ratios)
        self._response_limit = max(
            [self._response_limit, *(group.prompt.max_new_tokens for group in batch.groups)]
        )
        tensors = {
            "advantages": advantages.nan_to_num(nan=0.0).float(),
            "anchor_logprobs": anchor.logprobs,
            "correction_weights": anchor.weights,
            "response_limits": torch.full((batch.num_rows,), float(self._response_limit)),
        }
        if config.beta:
            tensors["reference_logprobs"] = batch.scores["reference"]
        is_masked = config.mask_truncated_completions
        return TrainBatch(
            rollouts=batch,
            tensors=tensors,
            metrics=reward_metrics(scores, self.group_size) | completion_metrics(batch),
            loss_mask=batch.response_mask & batch.is_stopped[:, None] if is_masked else None,
        )

    def loss(self, micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean of w · max(-A r, -A clip(r)) + beta · KL, w and r as ``correct`` says."""
        mask, tensors, config = micro_batch.mask, micro_batch.tensors, self.config
        log_ratios = outputs.policy_logprobs - tensors["anchor_logprobs"]
        ratios = self._log_ratios(log_ratios, mask).exp()
        policy_losses, is_low, is_high = clipped_ratio_loss(
            ratios,
            tensors["advantages"][:, None],
            epsilon_low=config.epsilon,
            epsilon_high=self._epsilon_high,
            ratio_limit=self._ratio_limit,
        )
        values = {
            "entropy": outputs.entropy,
            "clip_ratio/low_mean": is_low.float(),
            "clip_ratio/high_mean": is_high.float(),
            "clip_ratio/region_mean": (is_low | is_high).float(),
        }
        losses = tensors["correction_weights"] * policy_losses
        if config.beta:
            values["kl"] = self._kl(micro_batch, outputs, ratios)
            losses = losses + config.beta * values["kl"]
        with torch.no_grad():
            metrics = {name: _mean_of_tokens(value, micro_batch) for name, value in values.items()}
        return self._mean(losses, micro_batch), metrics

    def _kl(self, micro_batch: MicroBatch, outputs: PolicyOutputs, ratios: Tensor) -> Tensor:
        """[r, t] k3, times w · r, gradient included, as in DeepSeek-V3.2 (2025, arXiv 2512.02556)."""
        tensors, mask = micro_batch.tensors, micro_batch.mask
        log_ratios = token_log_ratios(tensors["reference_logprobs"] - outputs.policy_logprobs, mask)
        kl = kl_estimate(torch.zeros_like(log_ratios), log_ratios, "k3")
        return kl * tensors["correction_weights"] * ratios if self.config.use_bias_correction_kl else kl

    def state_dict(self) -> State:
        """The longest response limit so far, which ``dr_grpo`` divides by."""
        return {"response_limit": self._response_limit}

    def load_state_dict(self, state: State) -> None:
        """Go on from ``state_dict``."""
        self._response_limit = state["response_limit"]


def _mean_of_tokens(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    return masked_sum(values, micro_batch.mask) / max(micro_batch.num_step_tokens, 1)


def _mean_of_mean_tokens(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Mean over all tokens, of which each weighs the same in every optimizer step of the batch."""
    num_tokens = micro_batch.mean_step_tokens or micro_batch.num_step_tokens
    return masked_sum(values, micro_batch.mask) / max(num_tokens, 1)


def _mean_of_means(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    sums = torch.where(micro_batch.mask, values, torch.zeros_like(values)).sum(1)
    means = sums / micro_batch.mask.sum(1).clamp(min=1)
    return means.sum() / max(micro_batch.num_step_rows, 1)


def _mean_by_limit(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    sums = torch.where(micro_batch.mask, values, torch.zeros_like(values)).sum(1)
    return (sums / micro_batch.tensors["response_limits"]).sum() / max(micro_batch.num_step_rows, 1)


def _by_group(scores: Tensor, group_size: int) -> Tensor:
    return group_std(scores, group_size) + STD_EPSILON


def _by_batch(scores: Tensor, _group_size: int) -> Tensor:
    return batch_std(scores) + STD_EPSILON


def _by_one(scores: Tensor, _group_size: int) -> Tensor:
    return torch.ones_like(scores)


_MEANS: dict[str, Callable[[Tensor, MicroBatch], Tensor]] = {
    "grpo": _mean_of_means,
    "dr_grpo": _mean_by_limit,
    "dapo": _mean_of_mean_tokens,
}
_DEVIATIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "group": _by_group,
    "batch": _by_batch,
    "none": _by_one,
}
_LOG_RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": token_log_ratios,
    "sequence": mean_log_ratios,
}
