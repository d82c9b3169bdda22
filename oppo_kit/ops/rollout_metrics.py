"""Numbers about a batch, under the names of TRL's trainers."""

from __future__ import annotations

import torch
from torch import Tensor

from oppo_kit.ops.groups import batch_std, group_std
from oppo_kit.types import RolloutBatch


def reward_metrics(scores: Tensor, group_size: int) -> dict[str, float]:
    """Mean and deviation over all scores, and the share of groups that teach nothing, their scores being equal.

    Args:
        scores: [R], NaN where there is none.
        group_size: G.
    """
    deviations = group_std(scores, group_size)
    return {
        "reward": float(scores.nanmean()),
        "reward_std": float(batch_std(scores)),
        "frac_reward_zero_std": float(torch.isclose(deviations, deviations.new_zeros(())).double().mean()),
    }


def objective_metrics(
    batch: RolloutBatch, scores: Tensor, sequence_kl: float, kl_coef: float
) -> dict[str, float]:
    """What PPO and online DPO raise: scores less the pull to the reference, and the entropy of a response.

    Args:
        batch: for the log-probs of sampling.
        scores: [R], finite.
        sequence_kl: mean over responses of the sum over tokens.
        kl_coef: weight of the pull.
    """
    score = float(scores.mean())
    return {
        "objective/kl": sequence_kl,
        "objective/entropy": float(-batch.behaviour_logprobs.sum(1).mean()),
        "objective/non_score_reward": -kl_coef * sequence_kl,
        "objective/rlhf_reward": -kl_coef * sequence_kl + score,
        "objective/scores": score,
    }


def completion_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Lengths of the responses, and of those that ended by a stop token (0 where none did)."""
    lengths = batch.response_lengths
    metrics = _lengths("completions/{}_length", lengths)
    metrics["completions/clipped_ratio"] = float((~batch.is_stopped).float().mean())
    return metrics | _lengths("completions/{}_terminated_length", lengths[batch.is_stopped])


def _lengths(name: str, lengths: Tensor) -> dict[str, float]:
    numbers = lengths.float() if lengths.numel() else torch.zeros(1)
    return {
        name.format("mean"): float(numbers.mean()),
        name.format("min"): float(numbers.min()),
        name.format("max"): float(numbers.max()),
    }
