"""Clipped losses by hand: every branch and its gradient."""

from __future__ import annotations

import pytest
import torch

from oppo_kit.ops.losses import clipped_ratio_loss, clipped_surrogate, clipped_value_loss

TOLERANCE = 1e-6


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_clipped"),
    [
        # -A·r while the ratio is inside 0.8 … 1.2; d/dlogprob = -A·r.
        (1.1, 2.0, -2.2, -2.2, False),
        (0.9, -2.0, 1.8, 1.8, False),
        # A good token already more likely by 20 %: -2·1.2, nothing to gain.
        (1.5, 2.0, -2.4, 0.0, True),
        # A good token that became unlikely: max(-2·0.5, -2·0.8) keeps its gradient.
        (0.5, 2.0, -1.0, -1.0, False),
        # A bad token already less likely by 20 %: 2·0.8, nothing to gain.
        (0.5, -2.0, 1.6, 0.0, True),
        # A bad token that became likely: max(2·1.5, 2·1.2) keeps its gradient.
        (1.5, -2.0, 3.0, 3.0, False),
    ],
)
def test_the_surrogate_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float, is_clipped: bool
) -> None:
    behaviour = torch.tensor(-1.5)
    policy = (behaviour + torch.tensor(ratio).log()).requires_grad_()
    value, clipped = clipped_surrogate(policy, behaviour, torch.tensor(advantage), cliprange=0.2)
    value.backward()
    assert policy.grad is not None
    assert float(value.detach()) == pytest.approx(loss, abs=TOLERANCE)
    assert float(policy.grad) == pytest.approx(gradient, abs=TOLERANCE)
    assert bool(clipped) is is_clipped


def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient() -> None:
    """Both branches tie; whatever splits the tie, d/dlogprob is -A."""
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    losses, clipped = clipped_surrogate(policy, policy.detach(), torch.tensor([3.0, -0.5]), cliprange=0.2)
    losses.sum().backward()
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad, torch.tensor([-3.0, 0.5]))
    assert not clipped.any()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_low", "is_high"),
    [
        # Inside 0.8 … 1.3: -A·r, whatever the sign.
        (1.25, 2.0, -2.5, -2.0, False, False),
        (1.25, -2.0, 2.5, 2.0, False, False),
        # Above 1.3: held for a good token, not for a bad one until the limit 4, from where nothing pushes.
        (1.5, 2.0, -2.6, 0.0, False, True),
        (1.5, -2.0, 3.0, 2.0, False, False),
        (5.0, -2.0, 8.0, 0.0, False, False),
        (5.0, 2.0, -2.6, 0.0, False, True),
        # Below 0.8: held for a bad token only.
        (0.5, -2.0, 1.6, 0.0, True, False),
        (0.5, 2.0, -1.0, -2.0, False, False),
        # An advantage of 0 is never clipped, and teaches nothing.
        (5.0, 0.0, 0.0, 0.0, False, False),
        (0.5, 0.0, 0.0, 0.0, False, False),
    ],
)
def test_two_epsilons_and_the_limit_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float, is_low: bool, is_high: bool
) -> None:
    ratios = torch.tensor(ratio, requires_grad=True)
    value, low, high = clipped_ratio_loss(
        ratios, torch.tensor(advantage), epsilon_low=0.2, epsilon_high=0.3, ratio_limit=4.0
    )
    value.backward()
    assert ratios.grad is not None
    assert float(value.detach()) == pytest.approx(loss, abs=TOLERANCE)
    assert float(ratios.grad) == pytest.approx(gradient, abs=TOLERANCE)
    assert (bool(low), bool(high)) == (is_low, is_high)


@pytest.mark.parametrize(
    ("value", "target", "loss", "gradient", "is_clipped"),
    [
        # Inside the range: (1.1 - 2)² / 2, gradient V - R.
        (1.1, 2.0, 0.405, -0.9, False),
        # Moved 0.5 towards the target, 0.2 allowed: (1.2 - 2)² / 2 > (1.5 - 2)² / 2, no gradient.
        (1.5, 2.0, 0.32, 0.0, True),
        # Moved 0.5 away: (0.5 - 2)² / 2 > (0.8 - 2)² / 2 keeps its gradient.
        (0.5, 2.0, 1.125, -1.5, False),
        # Moved down towards a target below: 0.8 is allowed, (0.8 - 0)² / 2.
        (0.5, 0.0, 0.32, 0.0, True),
    ],
)
def test_the_value_loss_by_hand(
    value: float, target: float, loss: float, gradient: float, is_clipped: bool
) -> None:
    values = torch.tensor(value, requires_grad=True)
    result, clipped = clipped_value_loss(values, torch.tensor(1.0), torch.tensor(target), cliprange_value=0.2)
    result.backward()
    assert values.grad is not None
    assert float(result.detach()) == pytest.approx(loss, abs=TOLERANCE)
    assert float(values.grad) == pytest.approx(gradient, abs=TOLERANCE)
    assert bool(clipped) is is_clipped
