"""Log-ratios by token and by response."""

from __future__ import annotations

import math

import pytest
import torch

from oppo_kit.ops.ratios import mean_log_ratios, summed_log_ratios, token_log_ratios

MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])


@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf])
def test_the_three_of_them_by_hand_whatever_stands_outside_the_mask(garbage: float) -> None:
    log_ratios = torch.where(MASK, torch.tensor([[0.3, -0.6, 0.9], [0.5, 0.0, 0.0], [0.0] * 3]), garbage)
    log_ratios.requires_grad_()
    tokens = token_log_ratios(log_ratios, MASK)
    torch.testing.assert_close(tokens, torch.tensor([[0.3, -0.6, 0.9], [0.5, 0.0, 0.0], [0.0] * 3]))
    means = mean_log_ratios(log_ratios, MASK)
    torch.testing.assert_close(means, torch.tensor([[0.2] * 3, [0.5] * 3, [0.0] * 3]))
    sums = summed_log_ratios(log_ratios, MASK)
    torch.testing.assert_close(sums, torch.tensor([0.6, 0.5, 0.0]))
    (means[:, 0].sum() + sums.sum()).backward()
    assert log_ratios.grad is not None
    torch.testing.assert_close(log_ratios.grad, torch.tensor([[4 / 3] * 3, [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
