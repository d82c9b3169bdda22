"""How the loss of a response treats that other policies than the current one have sampled it.

Source of ``decoupled``: Hilton, Cobbe, Schulman, "Batch size-invariance for policy optimization", 2021
(arXiv 2110.00641), with the weight truncated as in truncated importance sampling (Ionides 2008).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from oppo_kit.ops.ratios import token_log_ratios
from oppo_kit.types import RolloutBatch

Correction = Literal["none", "decoupled"]

# A token may count twice at most, as is usual where language models are trained on what another policy sampled: the
# mean stays nearly unbiased, and one token or response cannot dominate a step.
WEIGHT_CAP = 2.0


class Anchor(NamedTuple):
    """What the policy's ratio is taken against, and what a token's loss is multiplied by.

    Attributes:
        logprobs: [R, T] of the policy in the ratio's denominator; zero past a row's end.
        weights: [R, T], or [R] for whole responses, without gradient, at least 0; one past a row's end.
    """

    logprobs: Tensor
    weights: Tensor


def correct(
    batch: RolloutBatch,
    correction: Correction,
    *,
    weight_cap: float | None,
    log_ratios: Callable[[Tensor, Tensor], Tensor] = token_log_ratios,
) -> Anchor:
    """The anchor of a batch.

    ``none``: r = π / π_behaviour, weight 1. ``decoupled``: r = π / π_proximal, which the clip then holds near the
    weights before the update, however old a token is, and w = min(π_proximal / π_behaviour, cap). A fresh token's
    π_proximal is its π_behaviour, so without staleness both are the same.

    Args:
        batch: with the proximal log-probs of carried tokens, which an algorithm asks for by ``needs_proximal``.
        correction: ``none`` or ``decoupled``.
        weight_cap: largest weight; None: no limit.
        log_ratios: what one weight covers, which must be what one ratio of the loss covers; see
            ``oppo_kit.ops.ratios``.
    """
    behaviour, mask = batch.behaviour_logprobs, batch.response_mask
    if correction == "none":
        return Anchor(behaviour, torch.ones_like(log_ratios(behaviour, mask)))
    weights = log_ratios(batch.proximal_logprobs - behaviour, mask).exp()
    return Anchor(batch.proximal_logprobs, weights if weight_cap is None else weights.clamp(max=weight_cap))
