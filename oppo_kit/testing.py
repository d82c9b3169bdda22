"""Checks for the tests of an algorithm, anybody's. Needs no model, no engine and no test framework.

def test_the_gradient_does_not_depend_on_the_split():
    check_split_invariance(MyAlgorithm(MyAlgorithm.config_class()))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oppo_kit.algorithm import AlgorithmBase
from oppo_kit.types import (
    Group,
    MicroBatch,
    PolicyOutputs,
    Prompt,
    Rollout,
    RolloutBatch,
    RolloutKey,
    Score,
    TrainBatch,
)

MAX_TOKENS = 7


def check_split_invariance(algorithm: AlgorithmBase, *, num_batches: int = 8, seed: int = 0) -> None:
    """Loss, metrics and gradient of an optimizer step are finite, and the same for every split into micro-batches.

    Random batches go through ``on_batch`` and ``prepare``; then some groups, as in a mini-batch, go through ``loss`` at
    once, one by one, and in random parts, rows in random order. Compared are the loss, each metric, and the gradient of
    every log-prob and value, to float32's rounding.

    Args:
        algorithm: a fresh one, since ``on_batch`` and ``prepare`` may change it.
        num_batches: how many, of different seeds.
        seed: of the first batch.

    Raises:
        AssertionError: naming what depends on the split or is not finite, or that the policy has no gradient.
    """
    has_gradient = False
    for batch_seed in range(seed, seed + num_batches):
        random = torch.Generator().manual_seed(batch_seed)
        batch = random_batch(algorithm, seed=batch_seed)
        algorithm.on_batch(batch)
        train_batch = algorithm.prepare(batch)
        outputs = _random_outputs(algorithm, batch, random)
        units = _units(algorithm, batch, random)
        whole = _step(algorithm, train_batch, outputs, [_joined(units)])
        cut = int(torch.randint(1, len(units), (1,), generator=random))
        for split in (units, [_joined(units[:cut]), _joined(units[cut:])]):
            _compare(_step(algorithm, train_batch, outputs, split), whole, algorithm.name, batch_seed)
        has_gradient = has_gradient or bool(whole["the gradient of the log-probs"].any())
    if not has_gradient:
        raise AssertionError(f"the loss of {algorithm.name!r} gives the policy no gradient in any batch")


def random_batch(algorithm: AlgorithmBase, *, num_groups: int = 6, seed: int = 0) -> RolloutBatch:
    """What an engine could hand to this algorithm: groups of its size with all that it asks for.

    Responses have 0 to 7 tokens, some of them sampled one version ago; some are cut by their limit. One response in
    a group of three and more has no reward.
    """
    random = torch.Generator().manual_seed(seed)
    groups = []
    for draw in range(num_groups):
        prompt = Prompt(draw, (1, 2, 3), MAX_TOKENS)
        rollouts = [
            _random_rollout(algorithm, RolloutKey(draw, index), prompt, random)
            for index in range(algorithm.group_size)
        ]
        if len(rollouts) > 2 and "reward" in algorithm.scorers:
            rollouts[draw % len(rollouts)].scores["reward"] = None
        groups.append(Group(prompt, rollouts, admitted_step=0, ended_step=1))
    batch = RolloutBatch.from_groups(groups, version=1)
    if algorithm.needs_critic:
        values = torch.randn(batch.behaviour_logprobs.shape, generator=random)
        batch.values = torch.where(batch.response_mask, values, 0.0)
    return batch


def cut_micro_batch(batch: TrainBatch, rows: Sequence[int], step_rows: Sequence[int]) -> MicroBatch:
    """Some rows of an optimizer step over ``step_rows``, as a learner hands them to ``loss``."""
    indices = list(rows)
    all_tokens = batch.rollouts.response_mask
    mask = all_tokens if batch.loss_mask is None else batch.loss_mask
    width = int(batch.rollouts.response_lengths[indices].max())

    def cut(tensor: Tensor) -> Tensor:
        chosen = tensor[indices]
        is_by_token = tensor.dim() > 1 and tensor.shape[1] == mask.shape[1]
        return chosen[:, :width] if is_by_token else chosen

    of_step = list(step_rows)
    counts = mask.any(1) | ~all_tokens.any(1) if batch.row_mask is None else batch.row_mask
    return MicroBatch(
        mask=cut(mask),
        tensors={name: cut(tensor) for name, tensor in batch.tensors.items()},
        num_step_tokens=int(mask[of_step].sum()),
        num_step_rows=int(counts[of_step].sum()),
        mean_step_tokens=float(mask.sum()) * len(of_step) / len(mask),
    )


def _random_rollout(
    algorithm: AlgorithmBase, key: RolloutKey, prompt: Prompt, random: torch.Generator
) -> Rollout:
    length, num_carried = torch.randint(0, MAX_TOKENS + 1, (2,), generator=random).tolist()
    num_carried = min(num_carried, length)
    logprobs = (-2 * torch.rand(length, generator=random)).tolist()
    # The newest policy has read what an older one sampled, where the algorithm asks for that.
    drift = 0.2 * torch.randn(length, generator=random)
    drift[num_carried:] = 0.0
    proximal = [a + b for a, b in zip(logprobs, drift.tolist(), strict=True)]
    scores: dict[str, Score | None] = {
        name: (-2 * torch.rand(length, generator=random)).tolist()
        if name == "reference"
        else float(torch.randn((), generator=random))
        for name in sorted(algorithm.scorers)
    }
    return Rollout(
        key,
        prompt,
        token_ids=torch.randint(4, 50, (length,), generator=random).tolist(),
        behaviour_logprobs=logprobs,
        versions=[0] * num_carried + [1] * (length - num_carried),
        proximal_logprobs=proximal if algorithm.needs_proximal else list(logprobs),
        sampling_logprobs=list(logprobs),
        finish_reason="length" if length == MAX_TOKENS else "stop",
        end_tick=length,
        scores=scores,
    )


def _random_outputs(algorithm: AlgorithmBase, batch: RolloutBatch, random: torch.Generator) -> PolicyOutputs:
    """Near the behaviour policy; past a row's end 0 for the policy and anything for the critic, as in a learner."""
    mask, shape = batch.response_mask, batch.behaviour_logprobs.shape
    drift = 0.3 * torch.randn(shape, generator=random)
    logprobs = torch.where(mask, batch.behaviour_logprobs + drift, 0.0)
    entropy = torch.where(mask, torch.rand(shape, generator=random), 0.0)
    values = torch.randn(shape, generator=random).requires_grad_() if algorithm.needs_critic else None
    return PolicyOutputs(logprobs.requires_grad_(), entropy, values)


def _units(algorithm: AlgorithmBase, batch: RolloutBatch, random: torch.Generator) -> list[list[int]]:
    """Rows of most of the groups in random order, as parts that a split leaves whole: rows, or groups."""
    size = batch.group_size
    groups = torch.randperm(len(batch.groups), generator=random)[:-1].tolist()
    units = [[group * size + member for member in range(size)] for group in groups]
    if algorithm.needs_whole_groups:
        return units
    rows = _joined(units)
    return [[rows[index]] for index in torch.randperm(len(rows), generator=random).tolist()]


def _joined(units: Sequence[Sequence[int]]) -> list[int]:
    return [row for unit in units for row in unit]


def _step(
    algorithm: AlgorithmBase, batch: TrainBatch, outputs: PolicyOutputs, split: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """Loss, metrics and gradients of an optimizer step, summed over its micro-batches."""
    leaves = {"the gradient of the log-probs": outputs.policy_logprobs}
    if outputs.values is not None:
        leaves["the gradient of the values"] = outputs.values
    for leaf in leaves.values():
        leaf.grad = torch.zeros_like(leaf)
    step_rows = _joined(split)
    totals: dict[str, Tensor] = {}
    for rows in split:
        micro_batch = cut_micro_batch(batch, rows, step_rows)
        loss, metrics = algorithm.loss(micro_batch, _cut_outputs(outputs, rows, micro_batch.mask.shape[1]))
        if not loss.requires_grad:
            raise AssertionError(f"the loss of {algorithm.name!r} has no gradient; make it from the outputs")
        loss.backward()
        parts = {"the loss": loss} | {f"the metric {name!r}": value for name, value in metrics.items()}
        for name, value in parts.items():
            totals[name] = totals.get(name, torch.zeros(())) + torch.as_tensor(value).detach()
    return totals | {name: leaf.grad.clone() for name, leaf in leaves.items() if leaf.grad is not None}


def _cut_outputs(outputs: PolicyOutputs, rows: Sequence[int], width: int) -> PolicyOutputs:
    indices = list(rows)
    return PolicyOutputs(
        policy_logprobs=outputs.policy_logprobs[indices, :width],
        entropy=outputs.entropy[indices, :width],
        values=None if outputs.values is None else outputs.values[indices, :width],
    )


def _compare(actual: dict[str, Tensor], whole: dict[str, Tensor], name: str, seed: int) -> None:
    for what, expected in whole.items():
        if not bool(expected.isfinite().all()):
            raise AssertionError(f"{what} of {name!r} is not finite in random batch {seed}")
        if not torch.allclose(actual.get(what, torch.zeros(())), expected, rtol=1e-4, atol=1e-5):
            raise AssertionError(
                f"{what} of {name!r} depends on the split into micro-batches (random batch {seed}); divide sums over "
                "rows or tokens by num_step_rows or num_step_tokens, and set needs_whole_groups if it compares rollouts"
            )
