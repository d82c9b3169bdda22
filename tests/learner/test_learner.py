"""The update loop on real models: split invariance, schedules, non-finite losses, state."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny_models import tiny_causal_lm, tiny_classifier, tiny_tokenizer
from torch.nn.functional import softplus

from oppo_kit.algorithm import AlgorithmBase, AlgorithmConfig
from oppo_kit.config import LearnerConfig
from oppo_kit.errors import ConfigError, NonFiniteError
from oppo_kit.learner.learner import AccelerateLearner, _Gap, _gap_metrics
from oppo_kit.registry import create_algorithm
from oppo_kit.types import EFFECTIVE_SAMPLE, Group, Prompt, Rollout, RolloutBatch, RolloutKey, TrainBatch


def make_batch(num_groups: int = 6, *, score: float = 1.0, group_size: int = 1) -> RolloutBatch:
    groups = []
    for draw in range(num_groups):
        prompt = Prompt(draw, tuple(4 + (draw * 7 + i) % 50 for i in range(1 + draw % 4)), 20)
        rollouts = []
        for index in range(group_size):
            number = draw + 4 * index
            length = 1 + number * 5 % 11
            rollout = Rollout(
                RolloutKey(draw, index),
                prompt,
                token_ids=[4 + (number * 3 + 2 * i) % 50 for i in range(length)],
                behaviour_logprobs=[-3.0 - 0.1 * i for i in range(length)],
                proximal_logprobs=[-3.1 - 0.05 * i for i in range(length)],
                versions=[0] * length,
                finish_reason="length" if number % 5 == 3 else "stop",
                end_tick=length,
                scores={"reward": score * (number % 3 - 1.0), "reference": [-3.1] * length},
            )
            rollouts.append(rollout)
        groups.append(Group(prompt, rollouts, admitted_step=0, ended_step=0))
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


class Recorder(AlgorithmBase):
    """A mean over tokens and one over rows; it remembers its micro-batches."""

    name = "recorder"

    def __init__(self, loss_mask: torch.Tensor | None = None) -> None:
        super().__init__(AlgorithmConfig())
        self.loss_mask = loss_mask
        self.seen: list = []

    def prepare(self, batch):
        rows = torch.arange(batch.num_rows)
        return TrainBatch(batch, {"rows": rows}, {}, loss_mask=self.loss_mask)

    def loss(self, micro_batch, outputs):
        mask = micro_batch.mask
        self.seen.append((micro_batch.tensors["rows"].tolist(), mask, micro_batch))
        sums = torch.where(mask, outputs.policy_logprobs, 0.0).sum(1)
        means = sums / mask.sum(1).clamp(min=1)
        return sums.sum() / micro_batch.num_step_tokens + means.sum() / micro_batch.num_step_rows, {}


class Pairs(Recorder):
    """Compares the two responses of each group."""

    needs_whole_groups = True

    def loss(self, micro_batch, outputs):
        super().loss(micro_batch, outputs)
        first, second = torch.where(micro_batch.mask, outputs.policy_logprobs, 0.0).sum(1).view(-1, 2).T
        return softplus(second - first).sum() / (micro_batch.num_step_rows / 2), {}


def policy_gradients(batch: RolloutBatch, algorithm: AlgorithmBase, micro_batch_tokens: int) -> list:
    learner = AccelerateLearner(
        tiny_causal_lm(),
        None,
        config=LearnerConfig(max_grad_norm=None, micro_batch_tokens=micro_batch_tokens),
        temperature=1.0,
        num_steps=4,
    )
    seen: list[torch.Tensor] = []
    learner._optimizer.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in learner.policy.parameters() if p.grad is not None)
    )
    learner.update(algorithm.prepare(batch), algorithm)
    assert max(float(gradient.abs().max()) for gradient in seen) > 1e-6, "not a comparison of zeros"
    return seen


def assert_same(gradients: list, others: list) -> None:
    scale = max(float(other.abs().max()) for other in others)
    for one, other in zip(gradients, others, strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * scale


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", {"loss_type": "dapo", "beta": 0.1}),
        ("grpo", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
        ("grpo", {"loss_type": "dr_grpo", "scale_rewards": "none", "correction": "decoupled"}),
        ("rloo", {"correction": "decoupled"}),
    ],
)
@pytest.mark.parametrize("is_masked", [False, True])
def test_group_algorithms_have_the_same_gradient_for_every_split(name, settings, is_masked) -> None:
    settings = {"num_generations": 3, "mask_truncated_completions": is_masked, **settings}
    batch = make_batch(4, group_size=3)
    whole = policy_gradients(batch, create_algorithm(name, settings), 100_000)
    for micro_batch_tokens in (1, 30):
        split = policy_gradients(batch, create_algorithm(name, settings), micro_batch_tokens)
        assert_same(split, whole)


def test_a_loss_mask_counts_in_numerator_and_denominators_for_every_split() -> None:
    batch = make_batch()
    loss_mask = batch.response_mask.clone()
    loss_mask[2] = False
    loss_mask[5, 1] = False
    whole = Recorder(loss_mask)
    gradients = policy_gradients(batch, whole, 100_000)
    for micro_batch_tokens in (1, 30):
        split = Recorder(loss_mask)
        assert_same(policy_gradients(batch, split, micro_batch_tokens), gradients)
        assert len(split.seen) > 1
        for rows, mask, micro_batch in split.seen:
            assert torch.equal(mask, loss_mask[rows][:, : mask.shape[1]])
            assert (micro_batch.num_step_tokens, micro_batch.num_step_rows) == (int(loss_mask.sum()), 5)


def test_a_masked_response_is_as_if_it_were_not_there() -> None:
    batch = make_batch()
    loss_mask = batch.response_mask.clone()
    loss_mask[2] = False
    without = RolloutBatch.from_groups([group for group in batch.groups if group.draw_id != 2], 0)
    assert_same(policy_gradients(batch, Recorder(loss_mask), 30), policy_gradients(without, Recorder(), 30))


def test_an_empty_response_is_a_row_and_a_masked_one_is_none() -> None:
    batch = make_batch(3)
    batch.response_lengths[1] = 0
    loss_mask = batch.response_mask.clone()
    loss_mask[2] = False
    algorithm = Recorder(loss_mask)
    policy_gradients(batch, algorithm, 100_000)
    assert algorithm.seen[0][2].num_step_rows == 2


def test_whole_groups_stay_together_and_their_gradient_is_the_same_for_every_split() -> None:
    batch = make_batch(5, group_size=2)
    whole = policy_gradients(batch, Pairs(), 100_000)
    for micro_batch_tokens in (1, 40):
        pairs = Pairs()
        assert_same(policy_gradients(batch, pairs, micro_batch_tokens), whole)
        assert len(pairs.seen) > 1
        rows = [row for micro_batch_rows, _, _ in pairs.seen for row in micro_batch_rows]
        assert sorted(rows) == list(range(10))
        for micro_batch_rows, _, _ in pairs.seen:
            firsts, seconds = micro_batch_rows[::2], micro_batch_rows[1::2]
            assert [row + 1 for row in firsts] == seconds
            assert all(row % 2 == 0 for row in firsts)


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


def test_an_accumulation_that_somebody_broke_off_stops_no_update() -> None:
    learner = make_learner()
    before = [parameter.detach().clone() for parameter in learner.policy.parameters()]
    batch, algorithm = prepared(learner)
    learner.accelerator.gradient_state.sync_gradients = False
    learner.update(batch, algorithm)
    assert not any(map(torch.equal, before, learner.policy.parameters()))


def test_mini_batches_cover_every_row_once_an_epoch_in_a_fresh_order() -> None:
    learner = make_learner()
    batch, algorithm = prepared(learner, num_mini_batches=4)
    orders = []
    for _ in range(2):
        parts = learner._mini_batches(batch, algorithm)
        assert sorted(row for part in parts for row in part) == list(range(6))
        assert [len(part) for part in parts] == [2, 2, 1, 1]
        orders.append([row for part in parts for row in part])
    assert orders[0] != orders[1]


def test_every_optimizer_step_is_told_the_mean_of_their_tokens() -> None:
    batch = make_batch(6)
    loss_mask = batch.response_mask.clone()
    loss_mask[2] = False
    learner, algorithm = make_learner(), Recorder(loss_mask)
    algorithm.config = AlgorithmConfig(num_mini_batches=4)
    learner.update(algorithm.prepare(batch), algorithm)
    tokens = {tuple(rows): micro_batch.num_step_tokens for rows, _, micro_batch in algorithm.seen}
    assert sum(tokens.values()) == int(loss_mask.sum())
    assert len(set(tokens.values())) > 1
    means = {micro_batch.mean_step_tokens for _, _, micro_batch in algorithm.seen}
    assert means == {int(loss_mask.sum()) / 4}


@pytest.mark.parametrize("kind", [Recorder, Pairs])
def test_mini_batches_split_groups_unless_the_loss_compares_their_members(kind: type[Recorder]) -> None:
    learner, algorithm = make_learner(), kind()
    algorithm.config = AlgorithmConfig(num_mini_batches=3)
    batch = algorithm.prepare(make_batch(6, group_size=4))
    parts = [learner._mini_batches(batch, algorithm) for _ in range(4)]
    for found in parts:
        assert sorted(row for part in found for row in part) == list(range(24))
        assert [len(part) for part in found] == [8, 8, 8]
    neighbours = [part[at : at + 4] for found in parts for part in found for at in (0, 4)]
    are_whole = [rows == list(range(rows[0], rows[0] + 4)) and rows[0] % 4 == 0 for rows in neighbours]
    assert all(are_whole) == (kind is Pairs)


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
    last = learner._mini_batches(batch, algorithm)[-1]
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
