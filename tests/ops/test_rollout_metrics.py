"""Metrics of rewards and lengths by hand."""

from __future__ import annotations

import math

import pytest
import torch
from group_batches import make_batch

from oppo_kit.ops.rollout_metrics import completion_metrics, reward_metrics


def test_reward_metrics_leave_out_abstentions_and_count_groups_of_equal_rewards() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0, 2.0, math.nan, 4.0]).double()
    metrics = reward_metrics(scores, 2)
    present = [1.0, 3.0, 2.0, 2.0, 4.0]
    variance = sum((score - 2.4) ** 2 for score in present) / 4
    assert metrics["reward"] == pytest.approx(2.4)
    assert metrics["reward_std"] == pytest.approx(math.sqrt(variance))
    assert metrics["frac_reward_zero_std"] == pytest.approx(1 / 3)


def test_completion_metrics_tell_truncated_from_ended_responses() -> None:
    batch = make_batch(
        [[-1.0] * 5, [-1.0], [-1.0] * 3], [0.0] * 3, group_size=3, is_stopped=[False, True, True]
    )
    assert completion_metrics(batch) == {
        "completions/mean_length": 3.0,
        "completions/min_length": 1.0,
        "completions/max_length": 5.0,
        "completions/clipped_ratio": pytest.approx(1 / 3),
        "completions/mean_terminated_length": 2.0,
        "completions/min_terminated_length": 1.0,
        "completions/max_terminated_length": 3.0,
    }


def test_where_every_response_is_truncated_the_terminated_lengths_are_zero() -> None:
    batch = make_batch([[-1.0] * 5, [-1.0]], [0.0] * 2, group_size=2, is_stopped=[False, False])
    metrics = completion_metrics(batch)
    assert metrics["completions/clipped_ratio"] == 1.0
    assert metrics["completions/max_terminated_length"] == 0.0
