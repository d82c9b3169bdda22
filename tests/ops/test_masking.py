"""Masked reductions on hand-computed arrays; masked entries hold garbage."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from oppo_kit.ops.masking import masked_mean, masked_sum, masked_whiten

NAN, INF = math.nan, math.inf
TOLERANCE = 1e-6


def values_and_mask() -> tuple[Tensor, Tensor]:
    values = torch.tensor([[1.0, 2.0, NAN], [6.0, INF, 1e9]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    return values, mask


def test_a_sum_and_a_mean_see_the_valid_entries_only() -> None:
    values, mask = values_and_mask()
    assert float(masked_sum(values, mask)) == 9.0
    assert float(masked_mean(values, mask)) == 3.0


def test_the_gradient_of_a_masked_entry_is_zero_even_where_it_is_not_finite() -> None:
    values, mask = values_and_mask()
    values.requires_grad_()
    masked_mean(values, mask).backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([[1 / 3, 1 / 3, 0.0], [1 / 3, 0.0, 0.0]]))


def test_nothing_valid_gives_zero_and_not_nan() -> None:
    """trl#6369: the denominator counts what the numerator counts."""
    values = torch.full((2, 3), NAN)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    assert float(masked_sum(values, mask)) == 0.0
    assert float(masked_mean(values, mask)) == 0.0
    assert torch.equal(masked_whiten(values, mask), torch.zeros(2, 3))
    assert float(masked_mean(torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.bool))) == 0.0


def test_whitening_by_hand() -> None:
    # 1, 2, 6: mean 3, deviations -2, -1, 3, unbiased variance (4 + 1 + 9) / 2 = 7.
    values, mask = values_and_mask()
    expected = torch.tensor([[-2.0, -1.0, 0.0], [3.0, 0.0, 0.0]]) / math.sqrt(7)
    torch.testing.assert_close(masked_whiten(values, mask), expected, atol=TOLERANCE, rtol=0)


def test_whitening_without_a_shift_keeps_the_mean() -> None:
    # The whitened values above, plus the mean 3 where valid; 0 elsewhere.
    values, mask = values_and_mask()
    scale = 1 / math.sqrt(7)
    expected = torch.tensor([[3 - 2 * scale, 3 - scale, 0.0], [3 + 3 * scale, 0.0, 0.0]])
    torch.testing.assert_close(
        masked_whiten(values, mask, shift_mean=False), expected, atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize(("shift_mean", "expected"), [(True, 0.0), (False, 5.0)])
def test_one_valid_entry_has_no_variance_and_stays_finite(shift_mean: bool, expected: float) -> None:
    whitened = masked_whiten(torch.tensor([[5.0, NAN]]), torch.tensor([[True, False]]), shift_mean=shift_mean)
    torch.testing.assert_close(whitened, torch.tensor([[expected, 0.0]]))
