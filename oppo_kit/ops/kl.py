"""Per-token estimators of KL(policy ‖ reference) from samples of the policy.

Source: J. Schulman, "Approximating KL divergence", 2020 (http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

KLEstimator = Literal["k1", "k3"]


def kl_estimate(policy_logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """k1 = log(p / q), unbiased, any sign;  k3 = q/p - 1 - log(q / p), unbiased, never negative.

    Args:
        policy_logprobs: [...] log p of tokens sampled from p.
        reference_logprobs: the same shape, log q of those tokens.
        estimator: ``k1`` or ``k3``.
    """
    log_ratio = reference_logprobs - policy_logprobs
    if estimator == "k1":
        return -log_ratio
    return log_ratio.exp() - 1 - log_ratio
