"""Padding and masks, by hand."""

from __future__ import annotations

import torch

from oppo_kit.ops.padding import length_mask, pad_rows


def test_a_mask_is_true_before_the_length() -> None:
    assert length_mask(torch.tensor([0, 2]), 3).tolist() == [[False, False, False], [True, True, False]]


def test_rows_are_padded_on_the_right_with_zeros() -> None:
    assert pad_rows([[1], [], [2, 3]], 2, torch.int64).tolist() == [[1, 0], [0, 0], [2, 3]]
