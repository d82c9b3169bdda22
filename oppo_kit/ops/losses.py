"""Per-token losses of proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347, eq. 7 and 9).

They return one number a token; the caller masks and normalises, so that the split into micro-batches cannot matter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def clipped_ratio_loss(
    ratios: Tensor,
    advantages: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    ratio_limit: float = math.inf,
) -> tuple[Tensor, Tensor, Tensor]:
    """max(-A min(r, limit), -A clip(r, 1 - low, 1 + high)).

    Two ranges: DAPO's clip-higher (Yu et al. 2025, arXiv 2503.14476, eq. 10). The limit, which holds where A < 0 and
    the clip does not: two-sided clipping (INTELLECT-2, 2025, arXiv 2505.07291).

    Args:
        ratios: [...] of the policy to what it is held near, with gradient.
        advantages: broadcasts to the same shape.
        epsilon_low: 0 to 1.
        epsilon_high: at least 0.
        ratio_limit: above 1 + high.

    Returns:
        the loss [...], and where the clip holds below, and above, [...] bool.
    """
    clipped = ratios.clamp(1.0 - epsilon_low, 1.0 + epsilon_high)
    losses = torch.maximum(-advantages * ratios.clamp(max=ratio_limit), -advantages * clipped)
    is_low = (ratios < 1.0 - epsilon_low) & (advantages < 0)
    is_high = (ratios > 1.0 + epsilon_high) & (advantages > 0)
    return losses, is_low, is_high


def clipped_surrogate(
    policy_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, *, cliprange: float
) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - c, 1 + c)) with r = exp(log pi - log pi_anchor).

    Args:
        policy_logprobs: [r, t], with gradient.
        anchor_logprobs: [r, t], of the policy that it is held near: the one that sampled, unless corrected.
        advantages: [r, t].
        cliprange: c > 0.

    Returns:
        the loss [r, t] and where the clip holds [r, t] bool.
    """
    ratios = torch.exp(policy_logprobs - anchor_logprobs)
    losses, is_low, is_high = clipped_ratio_loss(
        ratios, advantages, epsilon_low=cliprange, epsilon_high=cliprange
    )
    return losses, is_low | is_high


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange_value: float
) -> tuple[Tensor, Tensor]:
    """max((V - R)², (clip(V, V_old ± c) - R)²) / 2.

    Args:
        values: [r, t], with gradient.
        old_values: [r, t], before the update.
        returns: [r, t].
        cliprange_value: c > 0.

    Returns:
        the loss [r, t] and whether the clipped branch is the larger one [r, t] bool.
    """
    clipped_values = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    unclipped = (values - returns) ** 2
    clipped = (clipped_values - returns) ** 2
    return 0.5 * torch.maximum(unclipped, clipped), clipped > unclipped
