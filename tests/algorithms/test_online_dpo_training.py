"""Online DPO under the real learner and the whole engine."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import tiny_engine
import torch
from fakes import FakeGenerator, FakeHandle, FakeLearner, FakePrompts, VirtualClock
from tiny_models import tiny_causal_lm, tiny_classifier
from torch import Tensor

from algorithms.online_dpo import OnlineDPO, OnlineDPOConfig
from oppo_kit.backends.function_scorer import FunctionScorer
from oppo_kit.backends.pairwise_judge import pairwise_reward
from oppo_kit.config import LearnerConfig, OverlapConfig
from oppo_kit.engine.loop import OverlapEngine
from oppo_kit.learner.learner import AccelerateLearner
from oppo_kit.types import Group, Prompt, Rollout, RolloutBatch, RolloutKey

BETA = 0.4


def algorithm(**changes: Any) -> OnlineDPO:
    return OnlineDPO(OnlineDPOConfig.model_validate({"beta": BETA} | changes))


# --- the learner


def long_batch() -> RolloutBatch:
    """Six pairs of unequal prompts and responses; pair 3 is a tie, pair 4 a tie of empty responses."""
    groups = []
    for draw in range(6):
        prompt = Prompt(draw, tuple(4 + (draw * 7 + place) % 50 for place in range(1 + draw % 4)), 20)
        rollouts = []
        for member in range(2):
            length = 0 if draw == 4 else 1 + (draw * 5 + member * 8) % 13
            rollouts.append(
                Rollout(
                    RolloutKey(draw, member),
                    prompt,
                    token_ids=[4 + (draw * 3 + member + 2 * place) % 50 for place in range(length)],
                    behaviour_logprobs=[-3.0] * length,
                    proximal_logprobs=[-3.0] * length,
                    sampling_logprobs=[-3.0] * length,
                    versions=[0] * length,
                    finish_reason="stop",
                    scores={
                        "reward": 0.0 if draw in {3, 4} else float((draw + member) % 2),
                        "reference": [-3.1 - 0.1 * draw] * length,
                    },
                )
            )
        groups.append(Group(prompt, rollouts, admitted_step=0))
    return RolloutBatch.from_groups(groups, 0)


def update(
    batch: RolloutBatch, *, micro_batch_tokens: int = 100_000, **changes: Any
) -> tuple[dict[str, float], list[Tensor]]:
    """Metrics and gradients of one optimizer step of the real learner."""
    learner = AccelerateLearner(
        tiny_causal_lm(),
        None,
        config=LearnerConfig(max_grad_norm=None, micro_batch_tokens=micro_batch_tokens),
        temperature=0.9,
        num_steps=1,
    )
    seen: list[Tensor] = []
    learner._optimizer.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in learner.policy.parameters() if p.grad is not None)
    )
    subject = algorithm(**changes)
    return learner.update(subject.prepare(batch), subject), seen


@pytest.mark.parametrize("ties", ["first", "skip"])
def test_the_learners_gradient_is_the_same_for_every_split_into_micro_batches(ties: str) -> None:
    metrics, whole = update(long_batch(), ties=ties)
    assert len(whole) > 20
    for micro_batch_tokens in (1, 60):
        other_metrics, other = update(long_batch(), micro_batch_tokens=micro_batch_tokens, ties=ties)
        assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5)
        for one, two in zip(whole, other, strict=True):
            assert float((one - two).abs().max()) <= 1e-5 * max(float(one.abs().max()), 1e-8)


def test_the_learner_leaves_skipped_ties_out_of_the_mean_also_where_they_are_empty() -> None:
    batch = long_batch()
    untied = RolloutBatch.from_groups([group for group in batch.groups if group.draw_id not in {3, 4}], 0)
    metrics, gradients = update(batch, ties="skip")
    expected_metrics, expected = update(untied, ties="skip")
    for name in ("loss", "grad_norm", "rewards/margins", "logps/chosen"):
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5), name
    for one, two in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_the_learner_takes_a_step_on_nothing_but_ties_and_on_nothing_but_empty_responses() -> None:
    batch = long_batch()
    for draws in ({3, 4}, {4}):
        ties = RolloutBatch.from_groups([group for group in batch.groups if group.draw_id in draws], 0)
        metrics, _ = update(ties, ties="skip")
        assert metrics["loss"] == metrics["grad_norm"] == 0.0
    metrics, _ = update(ties, loss_type="ipo")
    assert metrics["loss"] == pytest.approx(1.25**2)  # (1 / 2β)²
    assert metrics["grad_norm"] == 0.0


def test_training_on_a_batch_makes_its_chosen_responses_likelier_than_its_rejected_ones() -> None:
    learner = AccelerateLearner(
        tiny_causal_lm(), None, config=LearnerConfig(learning_rate=1e-3), temperature=1.0, num_steps=12
    )
    subject = algorithm(ties="skip")
    margins = [learner.update(subject.prepare(long_batch()), subject)["rewards/margins"] for _ in range(12)]
    assert margins[-1] > margins[0] + 1.0


# --- the engine


def longer_is_better(
    prompts: list[Any], completions: list[list[str]], shuffle_order: bool = True
) -> list[int]:
    return [max((0, 1), key=lambda index: len(pair[index])) for pair in completions]


def rewards() -> dict[str, Any]:
    tokenizer = tiny_engine.TOKENIZER
    return {
        "function": FunctionScorer([tiny_engine.reward_by_length], tokenizer),
        "model": tiny_classifier(),
        "judge": FunctionScorer([pairwise_reward(longer_is_better)], tokenizer, call_per="group"),
    }


@pytest.mark.parametrize("kind", ["function", "model", "judge"])
def test_the_engine_trains_whole_pairs_with_overcommit_and_every_parameter_moves(kind: str) -> None:
    subject = algorithm(num_mini_batches=2)
    engine = tiny_engine.make_engine(
        algorithm=subject,
        reward=rewards()[kind],
        delta=2,
        num_steps=3,
        sampling=tiny_engine.LONG_TAILED,
        score_at="sample",
    )
    before = [parameter.clone() for parameter in engine.learner.policy.parameters()]
    num_carried, reports = 0, []
    with engine:
        while engine.num_steps_done < engine.num_steps:
            batch = engine.collect()
            assert [len(group.rollouts) for group in batch.groups] == [2] * 4
            num_carried += int((~batch.is_current & batch.response_mask).any(1).sum())
            reports.append(engine.step(batch))
    assert num_carried > 0
    assert sum(report.trained - one.trained for one, report in itertools.pairwise(reports)) == 2 * 4
    after = list(engine.learner.policy.parameters())
    assert all(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    metrics = reports[-1].metrics
    assert all(math.isfinite(value) for value in metrics.values())
    assert {"loss", "objective/kl", "rewards/accuracies", "logps/chosen"} <= set(metrics)
    if kind == "judge":
        assert metrics["objective/scores"] == 0.5
        assert metrics["objective/scores_margin"] == 1.0


def test_at_the_first_update_policy_and_reference_are_one_so_the_loss_is_log_two() -> None:
    engine = tiny_engine.make_engine(algorithm=algorithm(), reward=tiny_classifier(), num_steps=1)
    with engine:
        (report,) = engine.run()
    assert report.metrics["loss"] == pytest.approx(math.log(2.0), abs=1e-5)
    assert report.metrics["objective/kl"] == pytest.approx(0.0, abs=1e-4)


def test_one_slow_response_holds_its_pair_and_no_other() -> None:
    def length_of(draw_id: int, sample_index: int) -> int:
        return 30 if (draw_id, sample_index) == (0, 1) else 3 + draw_id % 2

    clock = VirtualClock()
    learner: Any = FakeLearner(clock)
    engine = OverlapEngine(
        algorithm=algorithm(),
        generator=FakeGenerator(length_of, clock),
        scorers={
            "reward": FakeHandle("reward", lambda rollout: float(len(rollout.token_ids))),  # type: ignore[dict-item]
            "reference": FakeHandle("reference", lambda rollout: [-1.0] * len(rollout.token_ids)),  # type: ignore[dict-item]
        },
        learner=learner,
        prompts=FakePrompts(),
        batch_size=2,
        num_steps=3,
        overlap=OverlapConfig(decode_tokens=1, delta=1),
        clock=clock,
    )
    list(engine.run())
    trained = [[group.draw_id for group in batch.groups] for batch in learner.batches]
    assert trained[0] == [1, 2]
    assert sorted(draw for draws in trained for draw in draws) == list(range(6))
    (held,) = [group for batch in learner.batches for group in batch.groups if group.draw_id == 0]
    assert [len(rollout.token_ids) for rollout in held.rollouts] == [3, 30]
