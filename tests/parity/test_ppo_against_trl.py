"""Loss and gradient of PPO against the real TRL 1.12 ``PPOTrainer``, on the same responses, in float32.

``tests/support/trl_adapter.py`` composes our ops with TRL's quirks; our PPO has no switch for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trl_adapter import (
    Models,
    TrlRun,
    adapted_losses,
    adapted_prepare,
    record_trl,
    response_values,
    row_scores,
    token_logprobs,
)
from trl_tiny import EOS, PAD, require_trl

from algorithms.ppo import PPO
from oppo_kit.ops.padding import length_mask
from oppo_kit.types import MicroBatch, PolicyOutputs, RolloutBatch

TOLERANCE = 1e-5

# Stop at once; early; one before the limit; at it; never (twice); a sampled pad inside and at the start.
MIXED_ROWS = [
    [EOS, PAD, PAD, PAD, PAD, PAD, PAD, PAD],
    [5, 9, EOS, PAD, PAD, PAD, PAD, PAD],
    [7, 7, 3, 12, 4, 11, EOS, PAD],
    [15, 14, 13, 3, 4, 5, 6, EOS],
    [8, 3, 8, 3, 8, 3, 8, 3],
    [6, 5, 4, 3, 1, 15, 14, 13],
    [9, 10, PAD, 4, 6, EOS, PAD, PAD],
    [PAD, 10, 11, 4, EOS, PAD, PAD, PAD],
]
FULL_ROWS = [[3 + (row * 7 + place * (row + 2)) % 13 for place in range(8)] for row in range(8)]

PLAIN = {"num_ppo_epochs": 2, "vf_coef": 0.5, "gamma": 0.97, "lam": 0.9}
K3_WHITENED = PLAIN | {
    "kl_estimator": "k3",
    "kl_coef": 0.2,
    "whiten_rewards": True,
    "missing_eos_penalty": 1.5,
}


@pytest.fixture(scope="module", params=[PLAIN, K3_WHITENED], ids=["k1", "k3-whitened-penalty"])
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrlRun:
    require_trl()
    return record_trl(MIXED_ROWS, request.param, tmp_path_factory.mktemp("trl"))


@pytest.fixture(scope="module", params=[PLAIN, K3_WHITENED], ids=["k1", "k3-whitened-penalty"])
def full(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrlRun:
    require_trl()
    return record_trl(FULL_ROWS, request.param, tmp_path_factory.mktemp("trl"))


def assert_equal(ours: Tensor, theirs: Tensor, what: str) -> None:
    torch.testing.assert_close(
        ours, theirs, atol=TOLERANCE, rtol=TOLERANCE, msg=lambda text: f"{what}: {text}"
    )


def assert_gradients_equal(models: Models, theirs: dict[str, Tensor]) -> None:
    ours = models.gradients()
    assert ours.keys() == theirs.keys()
    assert len(ours) > 40
    for name, gradient in theirs.items():
        assert_equal(ours[name], gradient, name)
    assert max(float(g.abs().max()) for g in theirs.values()) > 0.1, "not a comparison of zeros"


def test_with_trls_quirks_our_ops_give_its_rewards_advantages_and_returns(mixed: TrlRun) -> None:
    step = mixed.steps[0]
    batch = adapted_prepare(mixed, Models(step))
    assert_equal(batch.scores, step.scores, "scores")
    assert_equal(batch.rewards, step.rewards, "rewards")
    assert_equal(batch.values, step.values, "values")
    assert_equal(batch.returns, step.returns, "returns")
    assert_equal(batch.advantages, step.advantages, "advantages")


@pytest.mark.parametrize("epoch", [0, 1])
def test_with_trls_quirks_our_ops_give_its_losses_and_every_gradient(mixed: TrlRun, epoch: int) -> None:
    step = mixed.steps[epoch]
    models = Models(step)
    batch = adapted_prepare(mixed, models)
    policy_loss, value_loss = adapted_losses(mixed, batch, models)
    (policy_loss + mixed.config.vf_coef * value_loss).backward()
    assert float(policy_loss) == pytest.approx(step.policy_loss, abs=TOLERANCE)
    assert float(value_loss) == pytest.approx(step.value_loss, abs=TOLERANCE, rel=TOLERANCE)
    assert_gradients_equal(models, step.gradients)


def test_the_recorded_steps_reach_both_clips(mixed: TrlRun) -> None:
    """Otherwise the comparison would say nothing about the clipped branches."""
    models = Models(mixed.steps[1])
    batch = adapted_prepare(mixed, models)
    with torch.no_grad():
        logprobs = token_logprobs(models.policy, mixed.query_responses, mixed.context_length)
        values = response_values(models.critic, mixed.query_responses, mixed.context_length)
    ratio = (logprobs - batch.behaviour_logprobs).exp()[batch.mask]
    assert (ratio > 1.2).any()
    assert (ratio < 0.8).any()
    assert ((values - batch.values).abs() > 0.2)[batch.value_mask].any()


# --- our PPO itself


def our_batch(run: TrlRun, models: Models) -> RolloutBatch:
    """The recorded responses as the engine would hand them over: explicit lengths, no padding."""
    context_length, width = run.context_length, run.responses.shape[1]
    is_stop = run.responses == EOS
    lengths = torch.where(is_stop.any(1), is_stop.int().argmax(1) + 1, width)
    mask = length_mask(lengths, width)
    logprobs = run.generation_logits.log_softmax(-1).gather(-1, run.responses[..., None]).squeeze(-1)

    def cut(values: Tensor) -> Tensor:
        return torch.where(mask, values, 0.0)

    with torch.no_grad():
        ends = context_length + lengths - 1
        return RolloutBatch(
            groups=[],
            version=0,
            prompt_ids=[
                [token for token in row if token != PAD]
                for row in run.query_responses[:, :context_length].tolist()
            ],
            response_ids=run.responses,
            response_lengths=lengths,
            behaviour_logprobs=cut(logprobs),
            proximal_logprobs=cut(logprobs),
            sampling_logprobs=cut(logprobs),
            is_current=mask,
            is_stopped=is_stop.any(1),
            scores={
                "reward": row_scores(models.reward, run.query_responses).gather(1, ends[:, None]).squeeze(1),
                "reference": cut(token_logprobs(models.reference, run.query_responses, context_length)),
            },
            values=cut(response_values(models.initial_critic, run.query_responses, context_length)),
        )


@pytest.mark.parametrize("epoch", [0, 1])
def test_ppo_gives_trls_loss_and_gradient_when_every_response_fills_the_limit(
    full: TrlRun, epoch: int
) -> None:
    """Then none of TRL's quirks can show, and ``ppo.py`` as it is must agree."""
    step = full.steps[epoch]
    models = Models(step)
    algorithm = PPO(full.config)
    train_batch = algorithm.prepare(our_batch(full, models))
    assert_equal(train_batch.tensors["advantages"], step.advantages, "advantages")
    assert_equal(train_batch.tensors["returns"], step.returns, "returns")
    mask = train_batch.rollouts.response_mask
    logprobs = token_logprobs(models.policy, full.query_responses, full.context_length)
    values = response_values(models.critic, full.query_responses, full.context_length)
    loss, metrics = algorithm.loss(
        MicroBatch(mask, train_batch.tensors, int(mask.sum()), len(mask)),
        PolicyOutputs(logprobs, torch.zeros_like(logprobs), values),
    )
    loss.backward()
    assert float(metrics["loss/policy_avg"]) == pytest.approx(step.policy_loss, abs=TOLERANCE)
    assert float(metrics["loss/value_avg"]) == pytest.approx(step.value_loss, abs=TOLERANCE, rel=TOLERANCE)
    assert_gradients_equal(models, step.gradients)


def test_ppo_pays_the_score_on_the_stop_token_and_trl_one_later(tmp_path: Path) -> None:
    """trl#3750. With gamma = lam = 1 and critic values of 0 the same score would reach every token anyway."""
    require_trl()
    config: dict[str, Any] = {"num_ppo_epochs": 1, "gamma": 0.5, "lam": 0.5}
    run = record_trl(MIXED_ROWS[:6], config, tmp_path)
    step = run.steps[0]
    batch = our_batch(run, Models(step))
    ours = PPO(run.config).prepare(batch).tensors
    kl_rewards = -run.config.kl_coef * (batch.behaviour_logprobs - batch.scores["reference"])
    for row, length in enumerate(batch.response_lengths.tolist()):
        paid = (step.rewards - kl_rewards)[row]
        place = length if length < 8 else length - 1
        assert float(paid[place]) == pytest.approx(float(step.scores[row]), abs=TOLERANCE)
        last_return = float(ours["returns"][row, length - 1])
        expected = float(step.scores[row] + kl_rewards[row, length - 1])
        assert last_return == pytest.approx(expected, abs=TOLERANCE)
        if length < 8:
            assert abs(float(step.returns[row, length - 1]) - expected) > 0.01
