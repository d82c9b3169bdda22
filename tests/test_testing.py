"""The check that an algorithm's own tests use: it passes the built-in ones and catches the usual mistakes."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny_causal_lm

from oppo_kit import AlgorithmBase, AlgorithmConfig
from oppo_kit.config import LearnerConfig
from oppo_kit.learner.learner import AccelerateLearner
from oppo_kit.ops.masking import masked_sum
from oppo_kit.testing import check_split_invariance, cut_micro_batch, random_batch
from oppo_kit.types import TrainBatch

PYPROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
BUILT_IN = PYPROJECT["project"]["entry-points"]["oppo_kit.algorithms"]


class Plain(AlgorithmBase):
    """REINFORCE without a baseline, right."""

    name = "plain"

    def prepare(self, batch: Any) -> TrainBatch:
        rewards = batch.scores["reward"].nan_to_num(0.0)
        return TrainBatch(batch, {"rewards": rewards[:, None].expand_as(batch.behaviour_logprobs)}, {})

    def loss(self, micro_batch: Any, outputs: Any) -> Any:
        mask, total = micro_batch.mask, max(micro_batch.num_step_tokens, 1)
        loss = masked_sum(-outputs.policy_logprobs * micro_batch.tensors["rewards"], mask) / total
        return loss, {"entropy": masked_sum(outputs.entropy, mask) / total}


class MeanOfMicroBatch(Plain):
    def loss(self, micro_batch: Any, outputs: Any) -> Any:
        losses = -outputs.policy_logprobs * micro_batch.tensors["rewards"]
        return losses[micro_batch.mask].sum() / max(int(micro_batch.mask.sum()), 1), {}


class MeanMetric(Plain):
    def loss(self, micro_batch: Any, outputs: Any) -> Any:
        return super().loss(micro_batch, outputs)[0], {"entropy": outputs.entropy.mean()}


class Unmasked(Plain):
    """Past a row's end the ratio is 1, and the reward is there too."""

    def loss(self, micro_batch: Any, outputs: Any) -> Any:
        ratios = outputs.policy_logprobs.exp()
        return -(ratios * micro_batch.tensors["rewards"]).sum() / max(micro_batch.num_step_tokens, 1), {}


class ComparesRows(Plain):
    """A response against the one beside it."""

    group_size = 2

    def prepare(self, batch: Any) -> TrainBatch:
        return TrainBatch(batch, {}, {})

    def loss(self, micro_batch: Any, outputs: Any) -> Any:
        sums = torch.where(micro_batch.mask, outputs.policy_logprobs, 0.0).sum(1)
        margins = sums - sums.roll(1)
        return torch.nn.functional.softplus(margins).sum() / micro_batch.num_step_rows, {}


class ForgetsAbstentions(Plain):
    group_size = 3

    def prepare(self, batch: Any) -> TrainBatch:
        rewards = batch.scores["reward"]
        return TrainBatch(batch, {"rewards": rewards[:, None].expand_as(batch.behaviour_logprobs)}, {})


class Detached(Plain):
    def loss(self, micro_batch: Any, outputs: Any) -> Any:
        return masked_sum(-outputs.policy_logprobs.detach(), micro_batch.mask), {}


class Indifferent(Plain):
    def loss(self, micro_batch: Any, outputs: Any) -> Any:
        return 0.0 * masked_sum(outputs.policy_logprobs, micro_batch.mask), {}


def make(algorithm_class: type[AlgorithmBase]) -> AlgorithmBase:
    return algorithm_class(algorithm_class.config_class())


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_built_in_algorithms_do_not_depend_on_the_split(name: str) -> None:
    check_split_invariance(make(EntryPoint(name, BUILT_IN[name], "").load()))


def test_a_plain_algorithm_passes() -> None:
    check_split_invariance(make(Plain))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (MeanOfMicroBatch, "the loss of 'plain' depends on the split into micro-batches"),
        (MeanMetric, "the metric 'entropy' of 'plain' depends on the split"),
        (Unmasked, "the loss of 'plain' depends on the split"),
        (ComparesRows, "depends on the split .* and set needs_whole_groups if it compares rollouts"),
        (ForgetsAbstentions, "the loss of 'plain' is not finite in random batch 0"),
        (Detached, "the loss of 'plain' has no gradient; make it from the outputs"),
        (Indifferent, "the loss of 'plain' gives the policy no gradient in any batch"),
    ],
)
def test_a_wrong_loss_is_caught_and_named(wrong: type[AlgorithmBase], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_split_invariance(make(wrong))


def test_a_loss_that_compares_the_members_of_a_group_passes_when_it_asks_for_whole_groups() -> None:
    class ComparesMembers(ComparesRows):
        needs_whole_groups = True

        def loss(self, micro_batch: Any, outputs: Any) -> Any:
            sums = torch.where(micro_batch.mask, outputs.policy_logprobs, 0.0).sum(1).view(-1, 2)
            losses = torch.nn.functional.softplus(sums[:, 0] - sums[:, 1])
            return losses.sum() / micro_batch.num_step_rows, {}

    check_split_invariance(make(ComparesMembers))


def test_random_batches_hold_what_an_algorithm_must_cope_with() -> None:
    wanted: Any = SimpleNamespace(
        group_size=3,
        scorers=frozenset({"reward", "reference"}),
        needs_critic=True,
        needs_proximal=True,
    )
    batches = [random_batch(wanted, seed=seed) for seed in range(4)]
    lengths = torch.cat([batch.response_lengths for batch in batches])
    assert (int(lengths.min()), int(lengths.max())) == (0, 7)
    for batch in batches:
        mask = batch.response_mask
        assert batch.scores["reward"].view(-1, 3).isnan().sum(1).tolist() == [1] * 6
        assert batch.scores["reference"].shape == mask.shape
        assert batch.values is not None
        assert not batch.values[~mask].any()
        assert batch.is_current.any()
        is_carried = mask & ~batch.is_current
        assert (batch.proximal_logprobs != batch.behaviour_logprobs).eq(is_carried).all()
        assert not batch.is_stopped.all()
        assert batch.is_stopped.any()


@pytest.mark.parametrize("has_loss_mask", [False, True])
@pytest.mark.parametrize("has_row_mask", [False, True])
def test_micro_batches_are_cut_as_the_learner_cuts_them(has_loss_mask: bool, has_row_mask: bool) -> None:
    class Recorder(Plain):
        group_size = 2

        def prepare(self, batch: Any) -> TrainBatch:
            train_batch = super().prepare(batch)
            train_batch.tensors["row"] = torch.arange(batch.num_rows)
            if has_row_mask:
                train_batch.row_mask = batch.scores["reward"] > 0
            if has_loss_mask:
                train_batch.loss_mask = batch.response_mask & batch.is_stopped[:, None]
            return train_batch

        def loss(self, micro_batch: Any, outputs: Any) -> Any:
            seen.append(micro_batch)
            return super().loss(micro_batch, outputs)

    seen: list = []
    algorithm = Recorder(AlgorithmConfig(num_mini_batches=2))
    batch = algorithm.prepare(random_batch(algorithm))
    config = LearnerConfig(micro_batch_tokens=24)
    learner = AccelerateLearner(tiny_causal_lm(), None, config=config, temperature=1.0, num_steps=1)
    learner.update(batch, algorithm)
    assert len(seen) > 3
    steps = {(each.num_step_tokens, each.num_step_rows) for each in seen}
    for step in steps:
        of_step = [each for each in seen if (each.num_step_tokens, each.num_step_rows) == step]
        step_rows = [row for each in of_step for row in each.tensors["row"].tolist()]
        for micro_batch in of_step:
            ours = cut_micro_batch(batch, micro_batch.tensors["row"].tolist(), step_rows)
            assert (ours.num_step_tokens, ours.num_step_rows) == step
            assert torch.equal(ours.mask, micro_batch.mask)
            assert ours.tensors.keys() == micro_batch.tensors.keys()
            for name, tensor in ours.tensors.items():
                assert torch.equal(tensor, micro_batch.tensors[name]), name
