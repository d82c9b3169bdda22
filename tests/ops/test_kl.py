"""KL estimators by hand, and k3 never negative."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oppo_kit.ops.kl import kl_estimate

logprobs = st.floats(min_value=-30, max_value=0, width=32)


def test_both_estimators_by_hand() -> None:
    # p = 1/2, q = 1/4: k1 = log 2; k3 = q/p - 1 - log(q/p) = 1/2 - 1 + log 2.
    # p = 1/4, q = 1/2: k1 = -log 2; k3 = 2 - 1 - log 2.
    policy = torch.tensor([0.5, 0.25]).log()
    reference = torch.tensor([0.25, 0.5]).log()
    k1 = kl_estimate(policy, reference, "k1")
    k3 = kl_estimate(policy, reference, "k3")
    assert k1.tolist() == pytest.approx([math.log(2), -math.log(2)], abs=1e-6)
    assert k3.tolist() == pytest.approx([math.log(2) - 0.5, 1 - math.log(2)], abs=1e-6)


@given(st.lists(st.tuples(logprobs, logprobs), min_size=1, max_size=20))
def test_k3_is_never_negative(pairs: list[tuple[float, float]]) -> None:
    """trl#262: a KL that is negative token by token is a fault, up to float32 rounding."""
    policy, reference = torch.tensor(pairs).unbind(1)
    assert kl_estimate(policy, reference, "k3").min() >= -1e-6


@given(st.lists(logprobs, min_size=1, max_size=20))
def test_equal_policies_have_no_divergence(values: list[float]) -> None:
    same = torch.tensor(values)
    assert torch.equal(kl_estimate(same, same, "k1"), torch.zeros_like(same))
    assert torch.equal(kl_estimate(same, same, "k3"), torch.zeros_like(same))


def test_both_estimate_the_divergence_of_two_distributions() -> None:
    """Weighted by p, exactly: Σ p·k1 = Σ p·k3 = Σ p log(p/q)."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    divergence = 0.5 * math.log(2.5) + 0.2 * math.log(0.4)
    for estimator in ("k1", "k3"):
        assert float((p * kl_estimate(p.log(), q.log(), estimator)).sum()) == pytest.approx(
            divergence, abs=1e-6
        )
