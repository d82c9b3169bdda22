"""The update loop on real models: split invariance, schedules, non-finite losses, state."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny_models import tiny_causal_lm, tiny_classifier, tiny_tokenizer

from oppo_kit.config import LearnerConfig
from oppo_kit.errors import ConfigError, NonFiniteError
from oppo_kit.learner.learner import AccelerateLearner, _Gap, _gap_metrics
from oppo_kit.registry import create_algorithm
from oppo_kit.types import EFFECTIVE_SAMPLE, Group, Prompt, Rollout, RolloutBatch, RolloutKey


def make_batch(num_groups: int = 6, *, score: float = 1.0) -> RolloutBatch:
    groups = []
    for draw in range(num_groups):
        prompt = Prompt(draw, tuple(4 + (draw * 7 + i) % 50 for i in range(1 + draw % 4)), 20)
        length = 1 + draw * 5 % 11
        rollout = Rollout(
            RolloutKey(draw, 0),
            prompt,
            token_ids=[4 + (draw * 3 + 2 * i) % 50 for i in range(length)],
            behaviour_logprobs=[-3.0 - 0.1 * i for i in range(length)],
            versions=[0] * length,
            finish_reason="stop",
            end_tick=length,
            scores={"reward": score * (draw % 3 - 1.0), "reference": [-3.1] * length},
        )
        groups.append(Group(prompt, [rollout], admitted_step=0, ended_step=0))
    return RolloutBatch.from_groups(groups, 0)


def make_learner(**settings) -> AccelerateLearner:
    settings = {"learning_rate": 1e-2, "max_grad_norm": None, **settings}
    return AccelerateLearner(
        tiny_causal_lm(), tiny_classifier(), config=LearnerConfig(**settings), temperature=1.0, num_steps=4
    )


def prepared(learner: AccelerateLearner, **algo):
    algorithm = create_algorithm("ppo", {"num_ppo_epochs": 1, **algo})
    batch = make_batch()
    batch.values = learner.compute_values(batch)
    return algorithm.prepare(batch), algorithm


def gradients_of(micro_batch_tokens: int) -> list[torch.Tensor]:
    learner = make_learner(micro_batch_tokens=micro_batch_tokens)
    batch, algorithm = prepared(learner)
    seen: list[torch.Tensor] = []
    parameters = [p for m in (learner.policy, learner.critic) for p in m.parameters()]
    learner._optimizer.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in parameters if p.grad is not None)
    )
    learner.update(batch, algorithm)
    return seen


def test_the_gradient_is_the_same_for_every_split_into_micro_batches() -> None:
    whole = gradients_of(100_000)
    assert len(whole) > 20
    for micro_batch_tokens in (1, 30):
        for one, other in zip(gradients_of(micro_batch_tokens), whole, strict=True):
            scale = max(float(other.abs().max()), 1e-8)
            assert float((one - other).abs().max()) <= 1e-5 * scale


def test_critic_values_do_not_depend_on_the_split_and_are_zero_past_the_end() -> None:
    batch = make_batch()
    one = make_learner(micro_batch_tokens=1).compute_values(batch)
    other = make_learner().compute_values(batch)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not one[~batch.response_mask].any()
    assert one[batch.response_mask].abs().min() > 0


def test_every_parameter_of_policy_and_critic_moves() -> None:
    learner = make_learner()
    before = [p.clone() for m in (learner.policy, learner.critic) for p in m.parameters()]
    batch, algorithm = prepared(learner)
    learner.update(batch, algorithm)
    after = [p for m in (learner.policy, learner.critic) for p in m.parameters()]
    assert all(not torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_mini_batches_cover_every_row_once_an_epoch_in_a_fresh_order() -> None:
    learner = make_learner()
    batch, _ = prepared(learner)
    orders = []
    for _ in range(2):
        parts = learner._mini_batches(batch, 4)
        assert sorted(row for part in parts for row in part) == list(range(6))
        assert [len(part) for part in parts] == [2, 2, 1, 1]
        orders.append([row for part in parts for row in part])
    assert orders[0] != orders[1]


def test_the_learning_rate_decays_once_an_engine_step_whatever_the_mini_batches() -> None:
    learner = make_learner(lr_scheduler_type="linear")
    rates = []
    for _ in range(4):
        batch, algorithm = prepared(learner, num_ppo_epochs=2, num_mini_batches=3)
        rates.append(learner.update(batch, algorithm)["lr"])
    assert rates == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])


def test_a_warm_up_is_kept_also_before_a_constant_rate() -> None:
    learner = make_learner(lr_scheduler_type="constant", warmup_steps=2)
    rates = []
    for _ in range(4):
        batch, algorithm = prepared(learner)
        rates.append(learner.update(batch, algorithm)["lr"])
    assert rates == pytest.approx([0.0, 5e-3, 1e-2, 1e-2])


def test_the_gradient_is_clipped_to_the_norm_asked_for() -> None:
    learner = make_learner(max_grad_norm=1e-12, weight_decay=0.0, adam_epsilon=1.0)
    before = [p.clone() for p in learner.policy.parameters()]
    batch, algorithm = prepared(learner)
    assert learner.update(batch, algorithm)["grad_norm"] > 1e-3
    for one, other in zip(before, learner.policy.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_non_finite_loss_leaves_every_weight_as_it_was() -> None:
    learner = make_learner()
    batch, algorithm = prepared(learner, num_mini_batches=2)
    batch.tensors["advantages"][:] = float("nan")
    before = [p.clone() for p in learner.policy.parameters()]
    with pytest.raises(NonFiniteError, match="the loss or its gradient is not finite; the batch is left out"):
        learner.update(batch, algorithm)
    assert all(
        torch.equal(one, other) for one, other in zip(before, learner.policy.parameters(), strict=True)
    )
    batch, algorithm = prepared(learner)
    assert learner.update(batch, algorithm)["grad_norm"] > 0


def test_a_later_non_finite_mini_batch_is_skipped_and_counted() -> None:
    learner = make_learner()
    batch, algorithm = prepared(learner, num_mini_batches=3)
    order = copy.deepcopy(learner._order)
    last = learner._mini_batches(batch, 3)[-1]
    learner._order.set_state(order.get_state())
    batch.tensors["advantages"][last] = float("inf")
    assert learner.update(batch, algorithm)["oppo/skipped_mini_batches"] == 1.0
    assert all(torch.isfinite(p).all() for p in learner.policy.parameters())


def test_a_saved_state_goes_on_as_if_nothing_had_happened() -> None:
    def run(num_updates: int, learner: AccelerateLearner) -> None:
        for _ in range(num_updates):
            batch, algorithm = prepared(learner, num_mini_batches=3)
            learner.update(batch, algorithm)

    straight = make_learner()
    run(4, straight)
    first = make_learner()
    run(2, first)
    second = make_learner()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(2, second)
    for one, other in zip(straight.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(one, other)


def test_models_are_saved_in_hugging_face_format(tmp_path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    learner = make_learner()
    learner.save_pretrained(tmp_path, tiny_tokenizer())
    policy = AutoModelForCausalLM.from_pretrained(tmp_path)
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert torch.equal(next(policy.parameters()), next(learner.policy.parameters()))
    assert torch.equal(critic.score.weight, learner.critic.score.weight)
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == 2


def test_a_missing_critic_is_named() -> None:
    learner = AccelerateLearner(tiny_causal_lm(), None, config=LearnerConfig(), temperature=1.0, num_steps=1)
    with pytest.raises(ConfigError, match="needs a critic, but the learner has none; pass critic="):
        learner.compute_values(make_batch())


def test_the_effective_sample_is_the_share_that_equal_weights_would_have() -> None:
    logratios = torch.tensor([0.0, 0.0, 0.0, math.log(3.0)])
    gaps = [
        _Gap(logratios[:1], torch.tensor([True])),
        _Gap(logratios[1:], torch.tensor([True, False, False])),
    ]
    metrics = _gap_metrics(gaps)
    assert metrics[EFFECTIVE_SAMPLE] == pytest.approx(6**2 / (4 * (1 + 1 + 1 + 9)))
    assert metrics["oppo/behaviour_gap_max"] == 0.0
    large = _gap_metrics([_Gap(torch.tensor([500.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.bool))])
    assert large == {EFFECTIVE_SAMPLE: pytest.approx(0.25)}
    assert _gap_metrics([]) == {}
