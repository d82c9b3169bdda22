"""Statistics inside the groups of a batch. A response whose score is NaN has none, and counts nowhere.

Rows are laid out as in ``RolloutBatch``: row r is response r % G of group r // G.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_mean(scores: Tensor, group_size: int) -> Tensor:
    """[R] each row's group mean over the scores that are there; NaN where none is.

    Args:
        scores: [R], NaN where there is none.
        group_size: G.
    """
    return scores.view(-1, group_size).nanmean(1).repeat_interleave(group_size)


def group_std(scores: Tensor, group_size: int) -> Tensor:
    """[R] each row's unbiased group standard deviation; NaN where fewer than two scores are there."""
    return _nanstd(scores.view(-1, group_size), 1).repeat_interleave(group_size)


def batch_std(scores: Tensor) -> Tensor:
    """Unbiased standard deviation over all scores that are there; NaN with fewer than two."""
    return _nanstd(scores, 0)


def leave_one_out_mean(scores: Tensor, group_size: int) -> Tensor:
    """[R] mean of the other scores of each row's group; NaN where there is no other, or none of its own.

    Source: Kool, van Hoof, Welling, "Buy 4 REINFORCE samples, get a baseline for free!", 2019.
    """
    grouped = scores.view(-1, group_size)
    num_scored = (~grouped.isnan()).sum(1, keepdim=True)
    return ((grouped.nansum(1, keepdim=True) - grouped) / (num_scored - 1)).view(-1)


def _nanstd(values: Tensor, dim: int) -> Tensor:
    num_scored = (~values.isnan()).sum(dim)
    deviations = values - values.nanmean(dim, keepdim=True)
    return torch.sqrt(deviations.square().nansum(dim) / (num_scored - 1).clamp(min=0))
