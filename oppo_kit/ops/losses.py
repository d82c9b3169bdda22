"""Per-token losses of proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347, eq. 7 and 9).

They return one number a token; the caller masks and normalises, so that the split into micro-batches cannot matter.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(
    policy_logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, *, cliprange: float
) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - c, 1 + c)) with r = exp(log pi - log pi_behaviour).

    Args:
        policy_logprobs: [r, t], with gradient.
        behaviour_logprobs: [r, t], of the policy that sampled the tokens.
        advantages: [r, t].
        cliprange: c > 0.

    Returns:
        the loss [r, t] and whether the clipped branch is the larger one [r, t] bool.
    """
    ratio = torch.exp(policy_logprobs - behaviour_logprobs)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - cliprange, 1.0 + cliprange)
    return torch.maximum(unclipped, clipped), clipped > unclipped


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
