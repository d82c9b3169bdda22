"""Reductions over the valid tokens only. A mask is given, never inferred from token ids."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Σ values·mask, where masked entries may hold anything, NaN included.

    Args:
        values: [...] any float.
        mask: the same shape, bool, True = counts.
    """
    return torch.where(mask, values, torch.zeros_like(values)).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the mask; 0 when nothing is valid, so that an all-masked batch gives loss 0 and not NaN."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the mask, 0 outside; the variance is unbiased.

    As TRL 1.12's ``masked_whiten``, which divides 0 by 0 with one valid entry; here the variance is then 0.

    Args:
        values: [R, T].
        mask: [R, T] bool.
        shift_mean: False keeps the mean and rescales only.
    """
    mean = masked_mean(values, mask)
    count = mask.sum()
    variance = masked_sum((values - mean) ** 2, mask) / (count - 1).clamp(min=1)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask, whitened, torch.zeros_like(whitened))
