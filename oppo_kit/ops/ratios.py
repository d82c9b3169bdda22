"""Log-ratios of two policies, by token and by response.

A response's product of token ratios is its importance ratio; their geometric mean is that of group sequence policy
optimisation (Zheng et al. 2025, arXiv 2507.18071, eq. 7), which does not grow with the length.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_log_ratios(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """[r, t] as they are, 0 outside the mask, where they may hold anything.

    Args:
        log_ratios: [r, t] log p - log q of the tokens.
        mask: [r, t] bool.
    """
    return torch.where(mask, log_ratios, torch.zeros_like(log_ratios))


def mean_log_ratios(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """[r, t] each row's mean over its mask, at every token; 0 for a row without any. Args: ``token_log_ratios``."""
    means = summed_log_ratios(log_ratios, mask) / mask.sum(1).clamp(min=1)
    return means[:, None].expand_as(log_ratios)


def summed_log_ratios(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """[r] each row's sum over its mask. Args: ``token_log_ratios``."""
    return token_log_ratios(log_ratios, mask).sum(1)
