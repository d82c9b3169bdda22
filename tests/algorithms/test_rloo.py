"""RLOO's prepare and loss against arithmetic in plain Python; tolerance 1e-6."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from group_batches import make_batch
from torch import Tensor

from algorithms.rloo import RLOO, RLOOConfig
from oppo_kit.config import parse_config
from oppo_kit.errors import ConfigError
from oppo_kit.types import MicroBatch, PolicyOutputs, RolloutBatch, TrainBatch

TOLERANCE = 1e-6

# Two groups of three; the second response was cut by its limit, the last has no reward.
BEHAVIOUR = [[-1.0, -2.0, -0.5], [-0.7], [-1.5, -0.2], [-0.9, -1.1, -0.4], [-2.0, -1.2], [-0.3]]
PROXIMAL = [[-0.6, -2.5, -0.5], [-0.7], [-0.5, -0.1], [-0.9, -1.1, -0.4], [-2.4, -1.2], [-0.3]]
REFERENCE = [[-1.4, -1.2, -0.5], [-0.2], [-1.5, -0.6], [-0.4, -1.6, -0.4], [-1.0, -1.0], [-0.9]]
POLICY = [[-0.9, -2.1, -0.8], [-0.6], [-1.2, -0.25], [-0.8, -1.0, -0.3], [-2.2, -1.15], [-0.35]]
REWARDS = [1.0, 4.0, 1.0, -2.0, 2.0, None]
IS_STOPPED = [True, False, True, True, True, True]
# k1 sums, log p - log q: 0.4 - 0.8 + 0, -0.5, 0 + 0.4, -0.5 + 0.5 + 0, -1.0 - 0.2.
KL = [-0.4, -0.5, 0.4, 0.0, -1.2]
# Others' means without KL: 2.5, 1, 2.5 and, with two scores in the group, 2, -2.
PLAIN_ADVANTAGES = [-1.5, 3.0, -1.5, -4.0, 4.0, 0.0]


def make_algorithm(**changes: Any) -> RLOO:
    return RLOO(parse_config(RLOOConfig, {"num_generations": 3} | changes))


def batch_of(**changes: Any) -> RolloutBatch:
    values: dict[str, Any] = {
        "group_size": 3,
        "reference": REFERENCE,
        "proximal": PROXIMAL,
        "is_stopped": IS_STOPPED,
    }
    return make_batch(BEHAVIOUR, REWARDS, **(values | changes))


def assert_near(actual: Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), atol=TOLERANCE, rtol=0)


def advantages_with_kl(beta: float) -> list[float]:
    penalised = [reward - beta * kl for reward, kl in zip([1.0, 4.0, 1.0, -2.0, 2.0], KL, strict=True)]
    first, second, third, fourth, fifth = penalised
    return [
        first - (second + third) / 2,
        second - (first + third) / 2,
        third - (first + second) / 2,
        fourth - fifth,
        fifth - fourth,
        0.0,
    ]


# --- prepare


def test_advantages_by_hand_with_and_without_the_kl() -> None:
    assert_near(make_algorithm(beta=0).prepare(batch_of()).tensors["advantages"], PLAIN_ADVANTAGES)
    assert_near(make_algorithm(beta=0.3).prepare(batch_of()).tensors["advantages"], advantages_with_kl(0.3))


def test_the_range_clips_scores_before_the_kl_is_subtracted() -> None:
    # Scores 1, 2, 1 and -1, 2 are left; with beta 1 a clip afterwards would show.
    penalised = [s - kl for s, kl in zip([1.0, 2.0, 1.0, -1.0, 2.0], KL, strict=True)]
    first, second, third, fourth, fifth = penalised
    algorithm = make_algorithm(beta=1.0, reward_clip_range=[-1.0, 2.0])
    train_batch = algorithm.prepare(batch_of())
    expected = [
        first - (second + third) / 2,
        second - (first + third) / 2,
        third - (first + second) / 2,
        fourth - fifth,
        fifth - fourth,
        0.0,
    ]
    assert_near(train_batch.tensors["advantages"], expected)
    assert train_batch.metrics["reward"] == pytest.approx(6.0 / 5)


def test_normalised_advantages_leave_out_the_response_without_a_score() -> None:
    present = PLAIN_ADVANTAGES[:5]
    mean = sum(present) / 5
    deviation = math.sqrt(sum((advantage - mean) ** 2 for advantage in present) / 4)
    expected = [(advantage - mean) / (deviation + 1e-4) for advantage in present] + [0.0]
    algorithm = make_algorithm(beta=0, normalize_advantages=True)
    assert_near(algorithm.prepare(batch_of()).tensors["advantages"], expected)


def advantages(rewards: list[float | None], group_size: int) -> Tensor:
    algorithm = make_algorithm(num_generations=group_size, beta=0)
    batch = make_batch([[-1.0]] * len(rewards), rewards, group_size=group_size)
    return algorithm.prepare(batch).tensors["advantages"]


def test_ties_constants_and_missing_rewards() -> None:
    tied = advantages([2.0, 2.0, 5.0], 3)
    assert_near(tied, [-1.5, -1.5, 3.0])
    assert_near(advantages([None, 3.0, 3.5], 3), [0.0, -0.5, 0.5])
    assert_near(advantages([None, None, 3.0], 3), [0.0, 0.0, 0.0])
    for reward in (0.1, 1e6 + 0.3, 1e30):
        assert not advantages([reward] * 7, 7).any(), reward


def test_the_metrics_have_trls_names() -> None:
    metrics = make_algorithm().prepare(batch_of()).metrics
    assert metrics["reward"] == pytest.approx(6.0 / 5)
    assert metrics["kl"] == pytest.approx((sum(KL) + 0.6) / 12, abs=TOLERANCE)
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 6)
    assert "kl" not in make_algorithm(beta=0).prepare(batch_of(reference=None)).metrics


# --- loss and gradient


def expected_loss(
    *,
    correction: str = "none",
    mask_truncated_completions: bool = False,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    weight_cap: float | None = 2.0,
) -> tuple[float, list[list[float]]]:
    """Loss and its gradient by the formulas, response by response, in Python's floats; beta is 0.3."""
    high = epsilon if epsilon_high is None else epsilon_high
    rows = [row for row in range(6) if IS_STOPPED[row] or not mask_truncated_completions]
    loss, gradient = 0.0, [[0.0] * 3 for _ in range(6)]
    for row in rows:
        anchor = BEHAVIOUR[row] if correction == "none" else PROXIMAL[row]
        ratio = math.exp(sum(POLICY[row]) - sum(anchor))
        weight = math.exp(sum(anchor) - sum(BEHAVIOUR[row]))
        weight = weight if weight_cap is None else min(weight, weight_cap)
        advantage = advantages_with_kl(0.3)[row]
        unclipped = -advantage * ratio
        clipped = -advantage * min(max(ratio, 1 - epsilon), 1 + high)
        loss += weight * max(unclipped, clipped) / len(rows)
        if unclipped >= clipped:
            for token in range(len(POLICY[row])):
                gradient[row][token] = weight * unclipped / len(rows)
    return loss, gradient


def compute_loss(
    algorithm: RLOO, train_batch: TrainBatch, rows: list[int], *, garbage: float = 0.0
) -> tuple[float, dict[str, float], Tensor]:
    """What the learner does with these rows of a step of all six."""
    valid = train_batch.rollouts.response_mask
    mask = valid if train_batch.loss_mask is None else train_batch.loss_mask
    policy = torch.full(valid.shape, garbage)
    policy[valid] = torch.tensor([logprob for row in POLICY for logprob in row])
    policy = policy[rows].requires_grad_()
    loss, metrics = algorithm.loss(
        MicroBatch(
            mask[rows],
            {name: tensor[rows] for name, tensor in train_batch.tensors.items()},
            int(mask.sum()),
            int(mask.any(1).sum()),
        ),
        PolicyOutputs(policy, torch.where(valid, 1.0, garbage)[rows], None),
    )
    loss.backward()
    assert policy.grad is not None
    return float(loss.detach()), {name: float(value) for name, value in metrics.items()}, policy.grad


SETTINGS = [
    {"correction": correction, "mask_truncated_completions": is_masked, "weight_cap": cap}
    for correction, is_masked, cap in product(("none", "decoupled"), (False, True), (1.5, 2.0, None))
] + [{"epsilon": 0.5, "epsilon_high": 0.05}, {"epsilon": 0.05, "epsilon_high": 0.5}]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_loss_and_gradient_by_the_formulas_and_for_every_split(settings: dict[str, Any]) -> None:
    algorithm = make_algorithm(beta=0.3, **settings)
    train_batch = algorithm.prepare(batch_of())
    expected, expected_gradient = expected_loss(**settings)
    loss, metrics, gradient = compute_loss(algorithm, train_batch, list(range(6)))
    assert loss == pytest.approx(expected, abs=TOLERANCE)
    assert_near(gradient, expected_gradient)
    parts = [compute_loss(algorithm, train_batch, rows) for rows in ([4, 0], [1], [3, 2, 5])]
    assert sum(part[0] for part in parts) == pytest.approx(loss, abs=TOLERANCE)
    for name, value in metrics.items():
        assert sum(part[1][name] for part in parts) == pytest.approx(value, abs=TOLERANCE), name
    assert_near(torch.cat([part[2] for part in parts])[[1, 2, 4, 3, 0, 5]], gradient.tolist())


def test_the_settings_above_reach_every_branch() -> None:
    ratios = [math.exp(sum(p) - sum(b)) for p, b in zip(POLICY, BEHAVIOUR, strict=True)]
    advantages = advantages_with_kl(0.3)
    pairs = list(zip(ratios, advantages, strict=True))
    assert any(ratio < 0.8 and advantage < 0 for ratio, advantage in pairs)
    assert any(1.05 < ratio < 1.2 and advantage > 0 for ratio, advantage in pairs)
    assert any(ratio > 1.2 and advantage < 0 for ratio, advantage in pairs)
    weights = [math.exp(sum(p) - sum(b)) for p, b in zip(PROXIMAL, BEHAVIOUR, strict=True)]
    assert max(weights) > 2.0
    assert min(weights) < 1.0


def test_uncapped_and_unclipped_the_decoupled_weight_restores_the_ratio_to_the_behaviour_policy() -> None:
    wide = {"epsilon": 1.0, "epsilon_high": 100.0, "weight_cap": None, "beta": 0}
    results = []
    for correction in ("none", "decoupled"):
        algorithm = make_algorithm(correction=correction, **wide)
        results.append(compute_loss(algorithm, algorithm.prepare(batch_of()), list(range(6))))
    assert results[0][0] == pytest.approx(results[1][0], abs=TOLERANCE)
    assert_near(results[0][2], results[1][2].tolist())


def test_the_clip_metrics_are_shares_of_responses() -> None:
    algorithm = make_algorithm(beta=0.3)
    _, metrics, _ = compute_loss(algorithm, algorithm.prepare(batch_of()), list(range(6)))
    pairs = [
        (math.exp(sum(p) - sum(b)), a)
        for p, b, a in zip(POLICY, BEHAVIOUR, advantages_with_kl(0.3), strict=True)
    ]
    low = sum(ratio < 0.8 and advantage < 0 for ratio, advantage in pairs) / 6
    high = sum(ratio > 1.2 and advantage > 0 for ratio, advantage in pairs) / 6
    assert (metrics["clip_ratio/low_mean"], metrics["clip_ratio/high_mean"]) == pytest.approx((low, high))
    assert metrics["clip_ratio/region_mean"] == pytest.approx(low + high)
    assert low > 0
    assert metrics["entropy"] == pytest.approx(1.0)


@pytest.mark.parametrize("garbage", [math.nan, 1e9, -1e9])
def test_what_stands_past_a_rows_end_reaches_neither_loss_nor_gradient(garbage: float) -> None:
    algorithm = make_algorithm()
    train_batch = algorithm.prepare(batch_of())
    clean = compute_loss(algorithm, train_batch, list(range(6)))
    spoiled = compute_loss(algorithm, train_batch, list(range(6)), garbage=garbage)
    assert spoiled[:2] == clean[:2]
    assert torch.equal(spoiled[2], clean[2])


def test_where_all_responses_are_truncated_and_masked_the_loss_is_zero() -> None:
    algorithm = make_algorithm(mask_truncated_completions=True)
    train_batch = algorithm.prepare(batch_of(is_stopped=[False] * 6))
    loss, metrics, gradient = compute_loss(algorithm, train_batch, list(range(6)))
    assert loss == 0.0
    assert set(metrics.values()) == {0.0}
    assert not gradient.any()


# --- settings


def test_the_names_and_defaults_are_trls() -> None:
    config = RLOOConfig()
    assert parse_config(RLOOConfig, {"num_iterations": 2}).num_epochs == 2
    assert (config.num_generations, config.num_epochs, config.num_mini_batches) == (2, 1, 1)
    assert (config.beta, config.epsilon, config.epsilon_high) == (0.05, 0.2, None)
    assert (config.reward_clip_range, config.normalize_advantages) == (None, False)
    assert config.mask_truncated_completions is False
    assert (config.correction, config.weight_cap) == ("none", 2.0)


def test_the_settings_say_what_the_engine_must_provide() -> None:
    default, plain = make_algorithm(correction="decoupled"), make_algorithm(beta=0, num_generations=5)
    assert (default.group_size, default.scorers, default.needs_proximal) == (3, {"reward", "reference"}, True)
    assert (plain.group_size, plain.scorers, plain.needs_proximal) == (5, {"reward"}, False)


@pytest.mark.parametrize("bounds", [[1.0, -1.0], [2.0, 2.0]])
def test_a_range_that_is_none_is_refused(bounds: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"reward_clip_range = .*the first number must be below the second"):
        make_algorithm(reward_clip_range=bounds)
