"""GRPO's prepare and loss against arithmetic in plain Python; tolerance 1e-6."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from group_batches import make_batch
from torch import Tensor

from algorithms.grpo import GRPO, GRPOConfig
from oppo_kit.config import parse_config
from oppo_kit.errors import ConfigError
from oppo_kit.registry import create_algorithm
from oppo_kit.types import MicroBatch, PolicyOutputs, RolloutBatch, TrainBatch

TOLERANCE = 1e-6

# Two groups of three; the fourth response was cut by its limit, the last has no reward.
BEHAVIOUR = [[-1.0, -2.0, -0.5], [-0.7], [-1.5, -0.2], [-0.9, -1.1, -0.4], [-2.0, -1.2], [-0.3]]
PROXIMAL = [[-0.6, -2.5, -0.5], [-0.7], [-0.4, -0.2], [-0.9, -1.1, -0.4], [-2.0, -1.2], [-0.3]]
REFERENCE = [[-1.4, -1.2, -0.5], [-0.2], [-1.5, -0.6], [-0.4, -1.6, -0.4], [-1.0, -1.0], [-0.9]]
POLICY = [[-0.9, -1.4, -0.8], [-0.9], [-1.0, -0.25], [-0.5, -1.4, -0.4], [-2.3, -1.0], [-0.35]]
REWARDS = [1.0, 4.0, 1.0, -2.0, 2.0, None]
IS_STOPPED = [True, True, True, False, True, True]
# Group means 2 and 0, deviations sqrt(3) and sqrt(8).
DEVIATIONS = [-1.0, 2.0, -1.0, -2.0, 2.0, 0.0]
STD = [math.sqrt(3)] * 3 + [math.sqrt(8)] * 3


def make_algorithm(**changes: Any) -> GRPO:
    return GRPO(parse_config(GRPOConfig, {"num_generations": 3} | changes))


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


# --- prepare


def advantages(rewards: list[float | None], *, group_size: int = 3, **changes: Any) -> Tensor:
    batch = make_batch([[-1.0]] * len(rewards), rewards, group_size=group_size)
    algorithm = make_algorithm(num_generations=group_size, **changes)
    return algorithm.prepare(batch).tensors["advantages"]


def test_advantages_by_hand_for_every_scale() -> None:
    expected = [d / (s + 1e-4) for d, s in zip(DEVIATIONS, STD, strict=True)]
    assert_near(advantages(REWARDS), expected)
    assert_near(advantages(REWARDS, scale_rewards="none"), DEVIATIONS)
    present = [reward for reward in REWARDS if reward is not None]
    mean = sum(present) / 5
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in present) / 4)
    assert_near(advantages(REWARDS, scale_rewards="batch"), [d / (deviation + 1e-4) for d in DEVIATIONS])


def test_a_response_without_a_reward_has_advantage_zero_and_moves_no_other() -> None:
    """With it as a 0 the mean of the second group would be 0 too, so the rewards here are others."""
    with_none = advantages([5.0, 7.0, None], scale_rewards="none")
    assert_near(with_none, [-1.0, 1.0, 0.0])
    assert_near(advantages([None, None, 3.0]), [0.0, 0.0, 0.0])
    assert_near(
        advantages([None, None, None, 1.0, 2.0, 3.0], scale_rewards="none"), [0.0] * 3 + [-1.0, 0.0, 1.0]
    )


def test_ties_share_an_advantage_and_constant_rewards_have_none_whatever_their_size() -> None:
    tied = advantages([2.0, 2.0, 5.0])
    assert tied[0] == tied[1] < 0 < tied[2]
    for reward in (0.1, -3.7, 1e6 + 0.3, 1e30):
        for scale in ("group", "batch", "none"):
            assert not advantages([reward] * 7, group_size=7, scale_rewards=scale).any(), (reward, scale)


def test_the_metrics_have_trls_names() -> None:
    metrics = make_algorithm().prepare(batch_of()).metrics
    assert metrics["reward"] == pytest.approx(6.0 / 5)
    assert metrics["frac_reward_zero_std"] == 0.0
    assert metrics["completions/mean_length"] == pytest.approx(2.0)
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 6)


# --- loss and gradient


def expected_loss(
    *,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    correction: str = "none",
    mask_truncated_completions: bool = False,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    limit: int = 8,
) -> tuple[float, list[list[float]]]:
    """Loss and its gradient by the formulas, row by row, in Python's floats."""
    high = epsilon if epsilon_high is None else epsilon_high
    rows = [row for row in range(6) if IS_STOPPED[row] or not mask_truncated_completions]
    num_tokens = sum(len(POLICY[row]) for row in rows)
    loss, gradient = 0.0, [[0.0] * 3 for _ in range(6)]
    for row in rows:
        length, advantage = len(POLICY[row]), DEVIATIONS[row] / (STD[row] + 1e-4)
        anchor = BEHAVIOUR[row] if correction == "none" else PROXIMAL[row]
        log_ratios = [p - a for p, a in zip(POLICY[row], anchor, strict=True)]
        log_weights = [a - b for a, b in zip(anchor, BEHAVIOUR[row], strict=True)]
        if importance_sampling_level == "sequence":
            log_ratios, log_weights = (
                [sum(log_ratios) / length] * length,
                [sum(log_weights) / length] * length,
            )
        share = {
            "dapo": 1 / num_tokens,
            "grpo": 1 / (len(rows) * length),
            "dr_grpo": 1 / (len(rows) * limit),
        }[loss_type]
        for token in range(length):
            ratio, weight = math.exp(log_ratios[token]), min(math.exp(log_weights[token]), 2.0)
            by_ratio = 0.0  # d loss / d ratio
            bound = ratio if delta is None else min(ratio, delta)
            clipped = min(max(ratio, 1 - epsilon), 1 + high)
            loss += share * weight * max(-advantage * bound, -advantage * clipped)
            if -advantage * bound >= -advantage * clipped and bound == ratio:
                by_ratio += share * weight * -advantage
            difference = REFERENCE[row][token] - POLICY[row][token]
            k3 = math.exp(difference) - 1 - difference
            factor = weight * ratio if use_bias_correction_kl else 1.0
            loss += beta * share * factor * k3
            gradient[row][token] += beta * share * factor * (1 - math.exp(difference))
            if use_bias_correction_kl:
                by_ratio += beta * share * weight * k3
            for other in range(length):
                if importance_sampling_level == "sequence":
                    gradient[row][other] += by_ratio * ratio / length
                elif other == token:
                    gradient[row][token] += by_ratio * ratio
    return loss, gradient


def compute_loss(
    algorithm: GRPO, train_batch: TrainBatch, rows: list[int], *, garbage: float = 0.0
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
    {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "beta": beta,
        "correction": correction,
        "mask_truncated_completions": is_masked,
    }
    for loss_type, level, beta, correction, is_masked in product(
        ("dapo", "grpo", "dr_grpo"), ("token", "sequence"), (0.0, 0.3), ("none", "decoupled"), (False, True)
    )
] + [
    {"epsilon": 0.1, "epsilon_high": 0.4},
    {"epsilon": 0.05, "epsilon_high": 0.06, "importance_sampling_level": "sequence"},
    {"epsilon_high": 0.3, "delta": 1.31},
    {"beta": 0.3, "use_bias_correction_kl": False, "correction": "decoupled"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_loss_and_gradient_by_the_formulas_and_for_every_split(settings: dict[str, Any]) -> None:
    algorithm = make_algorithm(**settings)
    train_batch = algorithm.prepare(batch_of())
    expected, expected_gradient = expected_loss(**settings)
    loss, metrics, gradient = compute_loss(algorithm, train_batch, list(range(6)))
    assert loss == pytest.approx(expected, abs=TOLERANCE)
    assert_near(gradient, expected_gradient)
    parts = [compute_loss(algorithm, train_batch, rows) for rows in ([4, 0], [3], [1, 2, 5])]
    assert sum(part[0] for part in parts) == pytest.approx(loss, abs=TOLERANCE)
    for name, value in metrics.items():
        assert sum(part[1][name] for part in parts) == pytest.approx(value, abs=TOLERANCE), name
    split = torch.cat([part[2] for part in parts])[[1, 3, 4, 2, 0, 5]]
    assert_near(split, gradient.tolist())


def test_the_settings_above_reach_every_branch() -> None:
    """Otherwise the comparison would say nothing about clips, the limit and the cap."""
    tokens = [
        (math.exp(p - b), DEVIATIONS[row])
        for row in range(6)
        for p, b in zip(POLICY[row], BEHAVIOUR[row], strict=True)
    ]
    assert any(ratio < 0.8 and advantage < 0 for ratio, advantage in tokens)
    assert any(ratio < 0.8 and advantage > 0 for ratio, advantage in tokens)
    assert any(1.2 < ratio < 1.4 and advantage > 0 for ratio, advantage in tokens)
    assert any(ratio > 1.31 and advantage < 0 for ratio, advantage in tokens)
    weights = [
        math.exp(p - b) for row in range(6) for p, b in zip(PROXIMAL[row], BEHAVIOUR[row], strict=True)
    ]
    assert max(weights) > 2.0
    assert min(weights) < 1.0
    assert expected_loss(epsilon_high=0.3, delta=1.31) != expected_loss(epsilon_high=0.3)


def test_one_token_by_hand() -> None:
    """Rewards 0 and 2: A = ∓1 / (sqrt(2) + 1e-4); ratio e^0.1; two tokens in the step."""
    algorithm = make_algorithm(num_generations=2)
    batch = algorithm.prepare(make_batch([[-1.0], [-1.0]], [0.0, 2.0], group_size=2))
    policy = torch.tensor([[-0.9], [-0.9]], requires_grad=True)
    loss, _ = algorithm.loss(
        MicroBatch(batch.rollouts.response_mask, batch.tensors, 2, 2),
        PolicyOutputs(policy, torch.zeros(2, 1), None),
    )
    loss.backward()
    assert policy.grad is not None
    unit = math.exp(0.1) / (math.sqrt(2) + 1e-4) / 2
    assert float(loss.detach()) == pytest.approx(0.0, abs=TOLERANCE)
    assert_near(policy.grad, [[unit], [-unit]])


@pytest.mark.parametrize(("loss_type", "share"), [("dapo", 2 / 5), ("grpo", 1.0), ("dr_grpo", 1.0)])
def test_a_token_weighs_as_much_in_every_optimizer_step_by_dapo(loss_type: str, share: float) -> None:
    """A step of two tokens in a batch whose steps have five on average."""
    algorithm = make_algorithm(num_generations=2, loss_type=loss_type)
    batch = algorithm.prepare(make_batch([[-1.0], [-1.0]], [0.0, 2.0], group_size=2))

    def gradient(mean_step_tokens: float | None) -> Tensor:
        policy = torch.tensor([[-0.9], [-0.9]], requires_grad=True)
        micro_batch = MicroBatch(batch.rollouts.response_mask, batch.tensors, 2, 2, mean_step_tokens)
        algorithm.loss(micro_batch, PolicyOutputs(policy, torch.zeros(2, 1), None))[0].backward()
        assert policy.grad is not None
        return policy.grad

    torch.testing.assert_close(gradient(5.0), share * gradient(None), atol=1e-7, rtol=0)
    torch.testing.assert_close(gradient(2.0), gradient(None), atol=0, rtol=0)


def test_the_clip_metrics_are_shares_of_tokens() -> None:
    algorithm = make_algorithm()
    _, metrics, _ = compute_loss(algorithm, algorithm.prepare(batch_of()), list(range(6)))
    tokens = [
        (math.exp(p - b), DEVIATIONS[row])
        for row in range(6)
        for p, b in zip(POLICY[row], BEHAVIOUR[row], strict=True)
    ]
    low = sum(ratio < 0.8 and advantage < 0 for ratio, advantage in tokens) / 12
    high = sum(ratio > 1.2 and advantage > 0 for ratio, advantage in tokens) / 12
    assert metrics["clip_ratio/low_mean"] == pytest.approx(low)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(high)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(low + high)
    assert metrics["entropy"] == pytest.approx(1.0)
    assert low > 0
    assert high > 0
    assert "kl" not in metrics


def test_the_kl_metric_is_k3_a_token() -> None:
    algorithm = make_algorithm(beta=0.1, use_bias_correction_kl=False)
    _, metrics, _ = compute_loss(algorithm, algorithm.prepare(batch_of()), list(range(6)))
    differences = [q - p for r, ps in zip(REFERENCE, POLICY, strict=True) for q, p in zip(r, ps, strict=True)]
    k3 = sum(math.exp(difference) - 1 - difference for difference in differences) / 12
    assert metrics["kl"] == pytest.approx(k3, abs=TOLERANCE)


@pytest.mark.parametrize("garbage", [math.nan, 1e9, -1e9])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_what_stands_past_a_rows_end_reaches_neither_loss_nor_gradient(garbage: float, level: str) -> None:
    algorithm = make_algorithm(beta=0.2, importance_sampling_level=level)
    train_batch = algorithm.prepare(batch_of())
    clean = compute_loss(algorithm, train_batch, list(range(6)))
    spoiled = compute_loss(algorithm, train_batch, list(range(6)), garbage=garbage)
    assert spoiled[:2] == clean[:2]
    assert torch.equal(spoiled[2], clean[2])


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_where_all_responses_are_truncated_and_masked_the_loss_is_zero(loss_type: str) -> None:
    algorithm = make_algorithm(mask_truncated_completions=True, loss_type=loss_type, beta=0.1)
    train_batch = algorithm.prepare(batch_of(is_stopped=[False] * 6))
    loss, metrics, gradient = compute_loss(algorithm, train_batch, list(range(6)))
    assert loss == 0.0
    assert set(metrics.values()) == {0.0}
    assert not gradient.any()


def test_an_empty_response_counts_as_a_response_with_loss_zero() -> None:
    algorithm = make_algorithm(num_generations=2, loss_type="grpo", scale_rewards="none")
    batch = algorithm.prepare(make_batch([[-1.0, -1.0], []], [2.0, 0.0], group_size=2))
    policy = torch.full((2, 2), -1.0, requires_grad=True)
    loss, _ = algorithm.loss(
        MicroBatch(batch.rollouts.response_mask, batch.tensors, 2, 2),
        PolicyOutputs(policy, torch.zeros(2, 2), None),
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-0.5)
    assert policy.grad is not None
    assert_near(policy.grad, [[-0.25, -0.25], [0.0, 0.0]])


def test_dr_grpo_divides_by_the_longest_limit_of_the_run_also_after_a_resume() -> None:
    algorithm = make_algorithm(loss_type="dr_grpo")
    limits = algorithm.prepare(batch_of(limits=[8, 20])).tensors["response_limits"]
    assert_near(limits, [20.0] * 6)
    resumed = make_algorithm(loss_type="dr_grpo")
    resumed.load_state_dict(algorithm.state_dict())
    for same in (algorithm, resumed):
        assert_near(same.prepare(batch_of()).tensors["response_limits"], [20.0] * 6)


# --- settings


def test_the_names_and_defaults_are_trls() -> None:
    config = GRPOConfig()
    assert parse_config(GRPOConfig, {"num_iterations": 2}).num_epochs == 2
    assert (config.num_generations, config.num_epochs, config.num_mini_batches) == (8, 1, 1)
    assert (config.loss_type, config.scale_rewards, config.importance_sampling_level) == (
        "dapo",
        "group",
        "token",
    )
    assert (config.epsilon, config.epsilon_high, config.delta) == (0.2, None, None)
    assert (config.beta, config.use_bias_correction_kl, config.mask_truncated_completions) == (
        0.0,
        True,
        False,
    )
    assert (config.correction, config.weight_cap) == ("none", 2.0)


def test_scale_rewards_takes_trls_booleans() -> None:
    assert parse_config(GRPOConfig, {"scale_rewards": True}).scale_rewards == "group"
    assert parse_config(GRPOConfig, {"scale_rewards": False}).scale_rewards == "none"


def test_the_settings_say_what_the_engine_must_provide() -> None:
    plain, full = make_algorithm(), make_algorithm(beta=0.1, correction="decoupled", num_generations=5)
    assert (plain.group_size, plain.scorers, plain.needs_proximal) == (3, {"reward"}, False)
    assert (full.group_size, full.scorers, full.needs_proximal) == (5, {"reward", "reference"}, True)
    assert "reference_logprobs" not in plain.prepare(batch_of(reference=None)).tensors


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_group_of_one_is_refused_with_the_reason_and_what_to_take(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"num_generations = 1: a response is compared with the others of its prompt.* take 2 or more",
    ):
        create_algorithm(name, {"num_generations": 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [("loss_type", "bnpo"), ("scale_rewards", "std"), ("epsilon", 0.0), ("delta", 0.5), ("weight_cap", 0.9)],
)
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        make_algorithm(**{name: value})
