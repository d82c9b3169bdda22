"""PPO's prepare and loss against arithmetic done by hand in this file; tolerance 1e-6."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from algorithms.ppo import PPO, PPOConfig, token_rewards
from oppo_kit.types import MicroBatch, PolicyOutputs, RolloutBatch, TrainBatch

NAN = math.nan
TOLERANCE = 1e-6

# Three responses of 3, 1 and 0 tokens. Row 0 is the worked example of this file; row 1 was cut by its limit.
LENGTHS = [3, 1, 0]
BEHAVIOUR = [[-1.0, -2.0, -0.5], [-0.7, 0.0, 0.0], [0.0, 0.0, 0.0]]
REFERENCE = [[-1.5, -1.0, -0.5], [-0.9, 0.0, 0.0], [0.0, 0.0, 0.0]]
VALUES = [[0.5, 0.4, 0.3], [0.2, 0.0, 0.0], [0.0, 0.0, 0.0]]
SCORES = [1.0, -2.0, 5.0]
# k1 with kl_coef 0.1: -0.1·(log p - log q) = -0.05, 0.1, 0 and -0.02; the score joins the last token.
REWARDS = [[-0.05, 0.1, 1.0], [-2.02, 0.0, 0.0], [0.0, 0.0, 0.0]]
# gamma 0.9, lam 0.8, gamma·lam 0.72, row 0 from the back:
#   delta_2 = 1.0 - 0.3 = 0.7                      A_2 = 0.7
#   delta_1 = 0.1 + 0.9·0.3 - 0.4 = -0.03          A_1 = -0.03 + 0.72·0.7 = 0.474
#   delta_0 = -0.05 + 0.9·0.4 - 0.5 = -0.19        A_0 = -0.19 + 0.72·0.474 = 0.15128
# row 1: A_0 = -2.02 - 0.2 = -2.22
ADVANTAGES = [0.15128, 0.474, 0.7, -2.22]
RETURNS = [[0.65128, 0.874, 1.0], [-2.02, 0.0, 0.0], [0.0, 0.0, 0.0]]


def make_config(**changes: Any) -> PPOConfig:
    return PPOConfig.model_validate({"gamma": 0.9, "lam": 0.8, "kl_coef": 0.1} | changes)


def make_batch(**changes: Any) -> RolloutBatch:
    values: dict[str, Any] = {
        "groups": [],
        "version": 0,
        "prompt_ids": [[1]] * 3,
        "response_ids": torch.zeros(3, 3, dtype=torch.int64),
        "response_lengths": torch.tensor(LENGTHS),
        "behaviour_logprobs": torch.tensor(BEHAVIOUR),
        "proximal_logprobs": torch.tensor(BEHAVIOUR),
        "sampling_logprobs": torch.tensor(BEHAVIOUR),
        "is_current": torch.ones(3, 3, dtype=torch.bool),
        "is_stopped": torch.tensor([True, False, True]),
        "scores": {"reward": torch.tensor(SCORES), "reference": torch.tensor(REFERENCE)},
        "values": torch.tensor(VALUES),
    }
    return RolloutBatch(**(values | changes))


def whiten(numbers: list[float]) -> list[float]:
    mean = sum(numbers) / len(numbers)
    variance = sum((n - mean) ** 2 for n in numbers) / (len(numbers) - 1)
    return [(n - mean) / math.sqrt(variance + 1e-8) for n in numbers]


def prepare(batch: RolloutBatch | None = None, **changes: Any) -> TrainBatch:
    return PPO(make_config(**changes)).prepare(batch or make_batch())


def assert_near(actual: Tensor, expected: list[list[float]] | list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), atol=TOLERANCE, rtol=0)


# --- prepare


def test_the_score_stands_on_the_last_token_and_an_empty_response_carries_none() -> None:
    """trl#3750: TRL puts it one past the end."""
    kl = torch.tensor([[0.5, -1.0, 0.0], [0.2, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert_near(token_rewards(torch.tensor(SCORES), kl, torch.tensor(LENGTHS), kl_coef=0.1), REWARDS)


def test_advantages_and_returns_by_hand() -> None:
    tensors = prepare().tensors
    expected = whiten(ADVANTAGES)
    assert_near(tensors["advantages"], [expected[:3], [expected[3], 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert_near(tensors["returns"], RETURNS)
    assert_near(tensors["old_values"], VALUES)
    assert_near(tensors["anchor_logprobs"], BEHAVIOUR)
    assert_near(tensors["correction_weights"], [[1.0] * 3] * 3)


def test_the_k3_penalty_by_hand() -> None:
    # With gamma 0 the return of a token is its reward: -0.1·(q/p - 1 - log(q/p)) with
    # log(q/p) = -0.5, 1, 0 and -0.2.
    def k3(log_ratio: float) -> float:
        return math.exp(log_ratio) - 1 - log_ratio

    returns = prepare(kl_estimator="k3", gamma=0.0).tensors["returns"]
    assert_near(returns[0], [-0.1 * k3(-0.5), -0.1 * k3(1.0), 1.0])
    assert_near(returns[1], [-0.1 * k3(-0.2) - 2.0, 0.0, 0.0])


def test_whitened_rewards_keep_their_mean_and_have_unit_variance() -> None:
    # With gamma 0 the return of a token is its (whitened) reward.
    rewards = [*REWARDS[0], REWARDS[1][0]]
    mean = sum(rewards) / 4
    expected = [mean + w for w in whiten(rewards)]
    returns = prepare(whiten_rewards=True, gamma=0.0).tensors["returns"]
    assert_near(returns, [expected[:3], [expected[3], 0.0, 0.0], [0.0, 0.0, 0.0]])


def test_the_missing_eos_penalty_follows_how_the_response_ended() -> None:
    """trl#3750: not whether some token equals the tokenizer's EOS. Only row 1 was cut: -2.02 - 0.5."""
    train_batch = prepare(missing_eos_penalty=0.5)
    assert_near(train_batch.tensors["returns"], [RETURNS[0], [-2.52, 0.0, 0.0], RETURNS[2]])
    assert train_batch.metrics["objective/scores"] == pytest.approx((1.0 - 2.5 + 5.0) / 3)
    assert train_batch.metrics["val/num_eos_tokens"] == 2


def test_the_batch_metrics_by_hand() -> None:
    """trl#2022: entropy and KL sum over the response's tokens, so padding cannot turn them negative."""
    metrics = prepare().metrics
    # k1 sums: 0.5 - 1 + 0, 0.2, 0; entropy sums: 3.5, 0.7, 0.
    assert metrics["objective/kl"] == pytest.approx(-0.3 / 3, abs=TOLERANCE)
    assert metrics["objective/entropy"] == pytest.approx(4.2 / 3, abs=TOLERANCE)
    assert metrics["objective/non_score_reward"] == pytest.approx(0.03 / 3, abs=TOLERANCE)
    assert metrics["objective/rlhf_reward"] == pytest.approx((4.0 + 0.03) / 3, abs=TOLERANCE)


def test_decoupled_changes_the_anchor_and_the_weights_and_nothing_else() -> None:
    """Row 0's first two tokens are of an older policy: weights e^0.4 and min(e^0.9, 2)."""
    proximal = [[-0.6, -1.1, -0.5], [-0.7, 0.0, 0.0], [0.0, 0.0, 0.0]]
    batch = make_batch(proximal_logprobs=torch.tensor(proximal))
    plain, decoupled = prepare(batch), prepare(batch, correction="decoupled")
    assert_near(decoupled.tensors["anchor_logprobs"], proximal)
    weights = [[math.exp(0.4), 2.0, 1.0], [1.0] * 3, [1.0] * 3]
    assert_near(decoupled.tensors["correction_weights"], weights)
    assert_near(
        prepare(batch, correction="decoupled", weight_cap=None).tensors["correction_weights"],
        [[math.exp(0.4), math.exp(0.9), 1.0], [1.0] * 3, [1.0] * 3],
    )
    for name in ("advantages", "returns", "old_values"):
        assert torch.equal(decoupled.tensors[name], plain.tensors[name]), name
    assert decoupled.metrics == plain.metrics


def test_an_empty_response_changes_no_other_row() -> None:
    two_rows = make_batch(
        response_lengths=torch.tensor(LENGTHS[:2]),
        behaviour_logprobs=torch.tensor(BEHAVIOUR[:2]),
        is_stopped=torch.tensor([True, False]),
        scores={"reward": torch.tensor(SCORES[:2]), "reference": torch.tensor(REFERENCE[:2])},
        values=torch.tensor(VALUES[:2]),
        response_ids=torch.zeros(2, 3, dtype=torch.int64),
        prompt_ids=[[1]] * 2,
    )
    without, with_empty = prepare(two_rows).tensors, prepare().tensors
    for name, tensor in without.items():
        assert torch.equal(tensor, with_empty[name][:2]), name


@pytest.mark.parametrize("garbage", [NAN, math.inf, 1e9])
@pytest.mark.parametrize("whiten_rewards", [False, True])
@pytest.mark.parametrize("kl_estimator", ["k1", "k3"])
def test_what_stands_past_a_rows_end_does_not_matter(
    garbage: float, whiten_rewards: bool, kl_estimator: str
) -> None:
    """trl#5303: validity is a length, so no value and no token id behind the end can be seen."""
    settings = {"whiten_rewards": whiten_rewards, "kl_estimator": kl_estimator}
    clean = make_batch()

    def spoil(tensor: Tensor) -> Tensor:
        return torch.where(clean.response_mask, tensor, garbage)

    spoiled = make_batch(
        response_ids=torch.where(clean.response_mask, clean.response_ids, 12345),
        scores={"reward": clean.scores["reward"], "reference": spoil(clean.scores["reference"])},
        values=spoil(torch.tensor(VALUES)),
    )
    expected, actual = prepare(clean, **settings), prepare(spoiled, **settings)
    for name in ("advantages", "returns"):
        assert torch.equal(actual.tensors[name], expected.tensors[name]), name
    assert actual.metrics == expected.metrics


# --- loss

# One optimizer step of two rows, 3 and 1 tokens; all behaviour log-probs are -1: ratio = exp(log-prob + 1).
MASK = torch.tensor([[True, True, True], [True, False, False]])
RATIOS = [[1.1, 1.5, 0.5], [1.5, 1.0, 1.0]]
LOSS_TENSORS = {
    "anchor_logprobs": torch.full((2, 3), -1.0),
    "correction_weights": torch.ones(2, 3),
    "advantages": torch.tensor([[2.0, 2.0, -1.0], [-1.0, 0.0, 0.0]]),
    "returns": torch.tensor([[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]),
    "old_values": torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]),
}
CURRENT_VALUES = [[1.1, 1.5, 0.5], [1.2, 0.0, 0.0]]
# Policy: -2·1.1, clipped -2·1.2, clipped 1·0.8, 1·1.5.
POLICY_LOSSES = [-2.2, -2.4, 0.8, 1.5]
# Value, halved squares: (1.1 - 2)², clipped (1.2 - 2)², (0.5 - 2)², 1.2².
VALUE_LOSSES = [0.405, 0.32, 1.125, 0.72]


def compute_loss(
    rows: list[int], *, garbage: float = 0.0, mask: Tensor = MASK, **changes: Any
) -> tuple[float, dict[str, float], Tensor, Tensor]:
    """Loss, metrics and the gradients with respect to log-probs and values, of some rows of the step."""

    def cut(tensor: Tensor) -> Tensor:
        return torch.where(mask, tensor, garbage)[rows]

    logprobs = cut(torch.tensor(RATIOS).log() - 1.0).requires_grad_()
    values = cut(torch.tensor(CURRENT_VALUES)).requires_grad_()
    loss, metrics = PPO(make_config(**({"vf_coef": 0.5} | changes))).loss(
        MicroBatch(
            mask[rows], {name: cut(t) for name, t in LOSS_TENSORS.items()}, int(mask.sum()), len(mask)
        ),
        PolicyOutputs(logprobs, cut(torch.ones(2, 3)), values),
    )
    loss.backward()
    assert logprobs.grad is not None
    assert values.grad is not None
    return float(loss.detach()), {k: float(v) for k, v in metrics.items()}, logprobs.grad, values.grad


def test_the_loss_and_its_gradient_by_hand() -> None:
    loss, metrics, logprob_gradient, value_gradient = compute_loss([0, 1])
    policy_loss, value_loss = sum(POLICY_LOSSES) / 4, sum(VALUE_LOSSES) / 4
    assert loss == pytest.approx(policy_loss + 0.5 * value_loss, abs=TOLERANCE)
    # -A·r where unclipped, over 4 tokens.
    assert_near(logprob_gradient, [[-2.2 / 4, 0.0, 0.0], [1.5 / 4, 0.0, 0.0]])
    # vf_coef·(V - R) where unclipped, over 4 tokens.
    assert_near(value_gradient, [[0.5 * -0.9 / 4, 0.0, 0.5 * -1.5 / 4], [0.5 * 1.2 / 4, 0.0, 0.0]])
    assert metrics["loss/policy_avg"] == pytest.approx(policy_loss, abs=TOLERANCE)
    assert metrics["loss/value_avg"] == pytest.approx(value_loss, abs=TOLERANCE)
    assert metrics["policy/clipfrac_avg"] == pytest.approx(2 / 4)
    assert metrics["val/clipfrac_avg"] == pytest.approx(1 / 4)
    assert metrics["val/ratio"] == pytest.approx((1.1 + 1.5 + 0.5 + 1.5) / 4, abs=TOLERANCE)
    assert metrics["policy/entropy_avg"] == pytest.approx(1.0)
    squares = sum(math.log(ratio) ** 2 for ratio in (1.1, 1.5, 0.5, 1.5))
    assert metrics["policy/approxkl_avg"] == pytest.approx(0.5 * squares / 4, abs=TOLERANCE)


def test_correction_weights_multiply_the_policy_loss_and_leave_the_critic_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = torch.tensor([[0.5, 2.0, 1.5], [0.25, 1.0, 1.0]])
    monkeypatch.setitem(LOSS_TENSORS, "correction_weights", weights)
    loss, metrics, logprob_gradient, value_gradient = compute_loss([0, 1])
    policy_loss = (0.5 * -2.2 + 2.0 * -2.4 + 1.5 * 0.8 + 0.25 * 1.5) / 4
    assert loss == pytest.approx(policy_loss + 0.5 * sum(VALUE_LOSSES) / 4, abs=TOLERANCE)
    assert metrics["loss/policy_avg"] == pytest.approx(policy_loss, abs=TOLERANCE)
    assert_near(logprob_gradient, [[0.5 * -2.2 / 4, 0.0, 0.0], [0.25 * 1.5 / 4, 0.0, 0.0]])
    assert_near(value_gradient, [[0.5 * -0.9 / 4, 0.0, 0.5 * -1.5 / 4], [0.5 * 1.2 / 4, 0.0, 0.0]])


def test_the_clip_ranges_are_the_configured_ones() -> None:
    # No clip at all: 1·0.5 for the third token, -2·1.5 for the second, and (1.5 - 2)² / 2 for its value.
    loss, metrics, _, _ = compute_loss([0, 1], cliprange=0.9, cliprange_value=0.9)
    assert loss == pytest.approx(
        (-2.2 - 3.0 + 0.5 + 1.5) / 4 + 0.5 * (0.405 + 0.125 + 1.125 + 0.72) / 4, abs=TOLERANCE
    )
    assert metrics["policy/clipfrac_avg"] == metrics["val/clipfrac_avg"] == 0.0


def test_loss_gradient_and_metrics_do_not_depend_on_the_split_into_micro_batches() -> None:
    whole_loss, whole_metrics, logprob_gradient, value_gradient = compute_loss([0, 1])
    first, second = compute_loss([0]), compute_loss([1])
    assert first[0] + second[0] == pytest.approx(whole_loss, abs=TOLERANCE)
    for name, value in whole_metrics.items():
        assert first[1][name] + second[1][name] == pytest.approx(value, abs=TOLERANCE), name
    assert_near(torch.cat([first[2], second[2]]), logprob_gradient.tolist())
    assert_near(torch.cat([first[3], second[3]]), value_gradient.tolist())


@pytest.mark.parametrize("garbage", [NAN, 1e9, -1e9])
def test_masked_positions_reach_neither_the_loss_nor_the_metrics(garbage: float) -> None:
    """trl#2022, trl#5303: no sentinel of the padding is ever summed."""
    clean_loss, clean_metrics, *_ = compute_loss([0, 1])
    loss, metrics, *_ = compute_loss([0, 1], garbage=garbage)
    assert loss == clean_loss
    assert metrics == clean_metrics


def test_a_batch_without_a_valid_token_has_loss_zero_and_no_gradient() -> None:
    """trl#6369: 0 and not NaN."""
    loss, metrics, logprob_gradient, value_gradient = compute_loss([0, 1], mask=torch.zeros_like(MASK))
    assert loss == 0.0
    assert set(metrics.values()) == {0.0}
    assert not logprob_gradient.any()
    assert not value_gradient.any()


def test_preparing_a_batch_of_empty_responses_gives_zeros() -> None:
    train_batch = prepare(make_batch(response_lengths=torch.zeros(3, dtype=torch.int64)))
    assert not train_batch.tensors["advantages"].any()
    assert not train_batch.tensors["returns"].any()


def test_at_zero_staleness_the_ratio_is_one_and_k1_of_the_start_is_zero() -> None:
    """trl#262: at step 0 policy and reference are the same model, so KL is 0."""
    batch = make_batch(scores={"reward": torch.tensor(SCORES), "reference": torch.tensor(BEHAVIOUR)})
    assert prepare(batch).metrics["objective/kl"] == 0.0


# --- settings


def test_the_names_and_defaults_are_trls() -> None:
    config = PPOConfig()
    assert PPOConfig.model_validate({"num_ppo_epochs": 2}).num_epochs == 2
    assert (config.num_epochs, config.num_mini_batches, config.gamma, config.lam) == (4, 1, 1.0, 0.95)
    assert (config.kl_coef, config.kl_estimator, config.cliprange, config.cliprange_value) == (
        0.05,
        "k1",
        0.2,
        0.2,
    )
    assert (config.vf_coef, config.whiten_rewards, config.missing_eos_penalty) == (0.1, False, None)
    assert (config.correction, config.weight_cap) == ("none", 2.0)


def test_only_decoupled_asks_for_proximal_logprobs() -> None:
    assert not PPO(make_config()).needs_proximal
    assert PPO(make_config(correction="decoupled")).needs_proximal


@pytest.mark.parametrize(
    ("name", "value"), [("gamma", 1.1), ("lam", -0.1), ("cliprange", 0.0), ("kl_estimator", "k2")]
)
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=name):
        PPOConfig.model_validate({name: value})


def test_a_batch_without_critic_values_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="PPO needs critic values; build the engine with a critic"):
        prepare(make_batch(values=None))
