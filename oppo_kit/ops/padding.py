"""Rows of unequal length as one tensor: right-padded with zeros, and the mask that says where a row ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def length_mask(lengths: Tensor, num_tokens: int) -> Tensor:
    """[R] lengths to an [R, num_tokens] bool mask, True before the length."""
    return torch.arange(num_tokens, device=lengths.device)[None, :] < lengths[:, None]


def pad_rows(rows: Sequence[Sequence[float]], num_tokens: int, dtype: torch.dtype) -> Tensor:
    """Right-pad rows with zeros to [len(rows), num_tokens]."""
    padded = torch.zeros(len(rows), num_tokens, dtype=dtype)
    for index, row in enumerate(rows):
        if row:
            padded[index, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded
