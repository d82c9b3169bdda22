"""The held-out evaluation: the same for every run, and before training made once for all of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.runners.base import HeldOutEvaluator, hash_of_parameters
from harness.schema import Evaluation
from harness.workloads.loading import Workload, load_workload
from oppo_kit.config import TrainConfig

BEFORE = {"step": 0, "elapsed_train_s": 0.0, "responses_trained": 0}
AFTER = {"step": 3, "elapsed_train_s": 1.5, "responses_trained": 96}


@pytest.fixture(scope="module")
def workload() -> Workload:
    return load_workload(TrainConfig(), num_eval_problems=6)


@pytest.fixture
def policy(workload: Workload) -> nn.Module:
    return workload.make_policy()


def evaluator(workload: Workload, untrained: Evaluation | None = None) -> HeldOutEvaluator:
    return HeldOutEvaluator(workload, TrainConfig(), untrained)


def without_time(evaluation: Evaluation) -> dict:
    return evaluation.model_dump(exclude={"eval_s"})


def test_evaluating_twice_gives_the_same_and_leaves_the_policy(workload: Workload, policy: nn.Module) -> None:
    before = hash_of_parameters(policy)
    first, second = (evaluator(workload)(policy, **BEFORE) for _ in range(2))
    assert without_time(first) == without_time(second)
    assert hash_of_parameters(policy) == before == first.policy_sha256
    assert first.accuracy is not None
    assert first.score_mean is not None


def test_the_hash_sees_every_part_of_the_parameters() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    module, other = make(), make()
    assert hash_of_parameters(module) == hash_of_parameters(other)
    seen = {hash_of_parameters(module)}
    with torch.no_grad():
        module[0].bias[1] += 1e-7
        seen.add(hash_of_parameters(module))
        other[1].running_mean[0] = 1e-7  # a buffer
        seen.add(hash_of_parameters(other))
    seen.add(hash_of_parameters(make().to(torch.bfloat16)))
    seen.add(hash_of_parameters(nn.ModuleDict({"head": make()})))
    assert len(seen) == 5


def test_what_is_known_of_the_same_parameters_is_repeated(workload: Workload, policy: nn.Module) -> None:
    known = evaluator(workload)(policy, **BEFORE).model_copy(update={"accuracy": 0.123})
    assert evaluator(workload, known)(workload.make_policy(), **BEFORE) == known


def test_other_parameters_and_later_steps_are_evaluated(workload: Workload, policy: nn.Module) -> None:
    known = evaluator(workload)(policy, **BEFORE).model_copy(update={"accuracy": 0.123})
    later = evaluator(workload, known)(policy, **AFTER)
    assert later.accuracy != 0.123
    assert (later.step, later.policy_sha256) == (3, None)
    # As of a run whose file knows no hash.
    assert (
        evaluator(workload, known.model_copy(update={"policy_sha256": None}))(policy, **AFTER).accuracy
        != 0.123
    )
    with torch.no_grad():
        next(policy.parameters()).mul_(1.01)
    changed = evaluator(workload, known)(policy, **BEFORE)
    assert changed.accuracy != 0.123
    assert changed.policy_sha256 != known.policy_sha256
