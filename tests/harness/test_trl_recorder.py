"""What is read off TRL from outside: times by stage, and the lengths of its rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from harness.runners.trl_recorder import Meter, row_lengths, timed


def test_each_forward_pass_is_timed_as_what_it_is() -> None:
    """The rollout's reference, critic and reward passes are scoring; the policy's own pass is training."""
    now_s = [0.0]

    def takes(seconds: float, result: Any) -> Any:
        def call(*_: Any) -> Any:
            now_s[0] += seconds
            return result

        return call

    reply = (torch.zeros(1, 5), None)
    scores = (None, torch.tensor([2.0]), None)
    module = SimpleNamespace(
        batch_generation=takes(1, reply), get_reward=takes(10, scores), forward=takes(100, None)
    )
    originals = dict(vars(module))
    trainer = SimpleNamespace(reward_model="reward", ref_model="reference")
    meter = Meter(lambda: now_s[0])
    with timed(module, trainer, meter):
        module.batch_generation("policy", torch.zeros(1, 3))
        module.forward("reference")
        module.get_reward("critic")
        module.get_reward("reward")
        module.forward("policy and critic")
    assert (meter.generate_s, meter.score_s) == (1, 120)
    assert [tuple(rows.shape) for rows in meter.responses] == [(1, 2)]
    assert torch.cat(meter.scores).tolist() == [2.0], "the critic's are no scores"
    assert vars(module) == originals


def test_rows_end_at_the_first_stop_token_and_for_trl_also_before_a_sampled_pad() -> None:
    responses = torch.tensor(
        [[5, 2, 0, 0], [5, 6, 7, 8], [5, 6, 7, 2], [9, 0, 2, 0], [0, 5, 6, 7], [4, 5, 2, 2]]
    )
    sampled, trained = row_lengths(responses, (2, 4), 0)
    assert sampled == [2, 4, 4, 3, 4, 1]
    assert trained == [2, 4, 4, 1, 0, 1]
