"""The stages' costs, measured for real on the embedded models."""

from __future__ import annotations

import pytest

from harness.measurement.bound import StageCosts, measure_costs
from harness.runners.base import RunSpec
from harness.settings import load_train_config

SMALL = ["batch_size=2", "sampling.response_length=8", "algo_config.num_mini_batches=1"]


@pytest.mark.parametrize(
    ("algo", "overrides"),
    [
        ("grpo", ["algo_config.num_generations=2", "reward=harness.workloads.tiny:chain_reward"]),
        ("rloo", ["algo_config.num_generations=2"]),
        ("online_dpo", []),
    ],
)
def test_groups_have_costs_whether_or_not_there_are_functions_a_reference_or_a_critic(
    algo: str, overrides: list[str]
) -> None:
    train = load_train_config(options={"algo": algo}, overrides=[*SMALL, *overrides])
    costs = measure_costs(RunSpec(runner="sequential", seed=0, train=train))
    for name in StageCosts.model_fields:
        assert 0 < getattr(costs, name) < 1, name
