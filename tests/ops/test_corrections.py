"""What a ratio is taken against and what a loss is weighted by; tolerance 1e-6."""

from __future__ import annotations

import math

import torch
from group_batches import make_batch
from torch import Tensor

from oppo_kit.ops.corrections import correct
from oppo_kit.ops.ratios import mean_log_ratios, summed_log_ratios
from oppo_kit.types import RolloutBatch

# Row 0: its first two tokens were sampled by an older policy. Row 1 is fresh.
BEHAVIOUR = [[-1.0, -2.0, -0.5], [-0.7]]
PROXIMAL = [[-0.6, -2.5, -0.5], [-0.7]]
E1, E2 = math.exp(0.4), math.exp(-0.5)


def batch() -> RolloutBatch:
    return make_batch(BEHAVIOUR, [0.0, 1.0], group_size=2, proximal=PROXIMAL)


def assert_near(actual: Tensor, expected: list[list[float]] | list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), atol=1e-6, rtol=0)


def test_none_anchors_at_the_behaviour_policy_with_weight_one() -> None:
    anchor = correct(batch(), "none", weight_cap=2.0)
    assert_near(anchor.logprobs, [BEHAVIOUR[0], [-0.7, 0.0, 0.0]])
    assert_near(anchor.weights, [[1.0] * 3, [1.0] * 3])


def test_decoupled_anchors_at_the_proximal_policy_and_weighs_by_its_ratio() -> None:
    anchor = correct(batch(), "decoupled", weight_cap=2.0)
    assert_near(anchor.logprobs, [PROXIMAL[0], [-0.7, 0.0, 0.0]])
    assert_near(anchor.weights, [[E1, E2, 1.0], [1.0] * 3])
    assert not anchor.weights.requires_grad


def test_the_cap_bounds_weights_from_above_only_and_none_is_no_bound() -> None:
    assert_near(correct(batch(), "decoupled", weight_cap=1.2).weights, [[1.2, E2, 1.0], [1.0] * 3])
    assert_near(correct(batch(), "decoupled", weight_cap=None).weights, [[E1, E2, 1.0], [1.0] * 3])


def test_a_response_may_have_one_weight_capped_as_a_whole() -> None:
    product = math.exp(0.4 - 0.5)
    anchor = correct(batch(), "decoupled", weight_cap=2.0, log_ratios=summed_log_ratios)
    assert_near(anchor.weights, [product, 1.0])
    mean = math.exp((0.4 - 0.5) / 3)
    anchor = correct(batch(), "decoupled", weight_cap=2.0, log_ratios=mean_log_ratios)
    assert_near(anchor.weights, [[mean] * 3, [1.0] * 3])
    assert_near(correct(batch(), "none", weight_cap=2.0, log_ratios=summed_log_ratios).weights, [1.0, 1.0])


def test_without_staleness_decoupled_is_none() -> None:
    fresh = make_batch(BEHAVIOUR, [0.0, 1.0], group_size=2)
    for one, other in zip(
        correct(fresh, "none", weight_cap=2.0), correct(fresh, "decoupled", weight_cap=2.0), strict=True
    ):
        assert torch.equal(one, other)


def test_a_weight_that_overflows_is_the_cap() -> None:
    stale = make_batch([[-200.0, -1.0]], [0.0], group_size=1, proximal=[[-1.0, -1.0]])
    assert_near(correct(stale, "decoupled", weight_cap=2.0).weights, [[2.0, 1.0]])
