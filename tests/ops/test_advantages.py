"""Generalised advantages on hand-computed rows."""

from __future__ import annotations

import math

import torch

from oppo_kit.ops.advantages import generalised_advantages

NAN = math.nan
TOLERANCE = 1e-6


def test_three_tokens_by_hand() -> None:
    # gamma 0.9, lam 0.8, so gamma·lam = 0.72; rewards 0.1, -0.2, 1; values 0.5, 0.4, 0.3.
    # delta_2 = 1 + 0 - 0.3 = 0.7                      A_2 = 0.7
    # delta_1 = -0.2 + 0.9·0.3 - 0.4 = -0.33           A_1 = -0.33 + 0.72·0.7 = 0.174
    # delta_0 = 0.1 + 0.9·0.4 - 0.5 = -0.04            A_0 = -0.04 + 0.72·0.174 = 0.08528
    advantages, returns = generalised_advantages(
        torch.tensor([[0.1, -0.2, 1.0]]),
        torch.tensor([[0.5, 0.4, 0.3]]),
        torch.ones(1, 3, dtype=torch.bool),
        gamma=0.9,
        lam=0.8,
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.08528, 0.174, 0.7]]), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(returns, torch.tensor([[0.58528, 0.574, 1.0]]), atol=TOLERANCE, rtol=0)


def test_a_row_ends_where_its_mask_ends_whatever_stands_behind() -> None:
    """trl#5303: the same numbers as without padding; an empty row is zeros."""
    advantages, returns = generalised_advantages(
        torch.tensor([[0.1, -0.2, 1.0, NAN, 1e9], [NAN] * 5]),
        torch.tensor([[0.5, 0.4, 0.3, 1e9, NAN], [NAN] * 5]),
        torch.tensor([[True, True, True, False, False], [False] * 5]),
        gamma=0.9,
        lam=0.8,
    )
    zeros = [0.0] * 5
    expected_advantages = torch.tensor([[0.08528, 0.174, 0.7, 0.0, 0.0], zeros])
    expected_returns = torch.tensor([[0.58528, 0.574, 1.0, 0.0, 0.0], zeros])
    torch.testing.assert_close(advantages, expected_advantages, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(returns, expected_returns, atol=TOLERANCE, rtol=0)


def test_lam_zero_is_the_one_step_error_and_lam_one_the_return_less_the_value() -> None:
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.5, 0.25, 0.125]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    one_step, _ = generalised_advantages(rewards, values, mask, gamma=0.5, lam=0.0)
    # 1 + 0.125 - 0.5;  2 + 0.0625 - 0.25;  4 - 0.125
    torch.testing.assert_close(one_step, torch.tensor([[0.625, 1.8125, 3.875]]))
    _, returns = generalised_advantages(rewards, values, mask, gamma=0.5, lam=1.0)
    # 1 + 2/2 + 4/4;  2 + 4/2;  4
    torch.testing.assert_close(returns, torch.tensor([[3.0, 4.0, 4.0]]))


def test_no_tokens_at_all() -> None:
    empty = torch.zeros(2, 0)
    advantages, returns = generalised_advantages(empty, empty, empty.bool(), gamma=1.0, lam=1.0)
    assert advantages.shape == returns.shape == (2, 0)
