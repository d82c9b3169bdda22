"""Training on the embedded model with vLLM as the generator, under the whole engine; by ``make test-vllm``."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.runners.oppo import make_engine
from harness.schema import load_result
from harness.settings import load_train_config
from harness.workloads.loading import load_workload
from oppo_kit.backends.vllm_generator import VLLMGenerator
from oppo_kit.engine.loop import OverlapEngine
from oppo_kit.installation import main
from oppo_kit.types import StepReport

# vLLM takes up to a minute to start, and a benchmark starts it three times.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SMALL = [
    *("num_steps=4", "batch_size=8", "sampling.response_length=64", "vllm.kv_cache_gib=0.1"),
    *("overlap.decode_tokens=4", "overlap.placement=inline"),
]
OVERLAPPED = ["overlap.delta=6", "overlap.delta_control=fixed"]
IN_TURN = ["overlap.schedule=sequential"]


def make(algo: str, *sets: str) -> OverlapEngine:
    train = load_train_config(options={"algo": algo, "backend": "vllm"}, overrides=[*SMALL, *sets])
    return make_engine(train, load_workload(train, num_eval_problems=0))


def check_laws(report: StepReport, version: int) -> None:
    assert report.drawn == report.trained + report.in_flight + report.queued + sum(report.rejected.values())
    assert report.version == version
    assert report.groups_trained == 8
    assert report.age_max <= 2
    assert max(report.trained_lengths) <= 64
    assert all(math.isfinite(value) for value in report.metrics.values())


@pytest.mark.parametrize("overlap", [IN_TURN, OVERLAPPED], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_a_run_trains_on_what_vllm_samples_from_the_policy(algo: str, overlap: list[str]) -> None:
    sets = ["algo_config.num_generations=4"] if algo == "grpo" else []
    reports = []
    with make(algo, *overlap, *sets) as engine:
        assert isinstance(engine.generator, VLLMGenerator)
        before = [parameter.detach().clone() for parameter in engine.learner.policy.parameters()]
        for version, report in enumerate(engine.run()):
            check_laws(report, version)
            reports.append(report)
        after = list(engine.learner.policy.parameters())
        assert all(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
        engine.generator.close()
    assert reports[-1].trained == 32
    # Of tokens that the weights about to be updated sampled, those of carried responses too.
    assert max(report.metrics["oppo/behaviour_gap_mean"] for report in reports) <= 1e-4
    assert max(report.metrics["oppo/behaviour_gap_max"] for report in reports) <= 1e-2
    assert (sum(report.num_deferred for report in reports) > 0) == (overlap is OVERLAPPED)


def test_decoupled_corrects_against_the_policys_own_logprobs() -> None:
    with make("ppo", *OVERLAPPED, "algo_config.correction=decoupled") as engine:
        generator: Any = engine.generator
        for _ in range(3):
            batch = engine.collect()
            assert torch.equal(batch.proximal_logprobs, generator.policy_logprobs(batch))
            mask = batch.response_mask
            gap = (batch.proximal_logprobs - batch.behaviour_logprobs).abs()
            assert 0 < float(gap[mask & batch.is_current].mean()) <= 1e-4
            engine.step(batch)
        assert float(gap[mask & ~batch.is_current].max()) > 1e-2, "carried tokens are of other weights"
        generator.close()


def test_a_saved_run_goes_on_in_a_fresh_vllm_with_what_was_in_flight() -> None:
    with make("ppo", *OVERLAPPED) as engine:
        for _ in range(2):
            engine.step(engine.collect())
        state, weights = engine.state_dict(), engine.learner.state_dict()
        generator: Any = engine.generator
        assert generator.num_live > 0
        live = {rollout.key: list(rollout.token_ids) for g in engine._buffer.groups for rollout in g.rollouts}
        generator.close()
    with make("ppo", *OVERLAPPED) as engine:
        engine.learner.load_state_dict(weights)
        engine.load_state_dict(state)
        for version in (2, 3):
            batch = engine.collect()
            for group in batch.groups:
                for rollout in group.rollouts:
                    begun = live.get(rollout.key, [])
                    assert rollout.token_ids[: len(begun)] == begun
            report = engine.step(batch)
            check_laws(report, version)
            assert report.metrics["oppo/behaviour_gap_mean"] <= 1e-4
        assert report.trained == 32
        generator = engine.generator
        generator.close()


def test_bench_measures_our_runners_on_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["--set", "vllm.kv_cache_gib=0.1", "--set", "algo_config.num_mini_batches=2"]
    arguments = [
        "bench",
        "--algo",
        "ppo",
        "--backend",
        "vllm",
        "--quick",
        *sets,
        "--out",
        str(tmp_path / "run"),
    ]
    monkeypatch.setattr(sys, "argv", ["oppo-kit", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert "sequential" in capsys.readouterr().out
    result = load_result(tmp_path / "run")
    assert result.workload.backend == "vllm"
    assert set(result.runners) == {"sequential", "both"}
    for runner in result.runners.values():
        for step in runner.runs[0].steps:
            gap = step.metrics["oppo/behaviour_gap_mean"]
            assert gap is not None
            assert gap <= 1e-4
    assert result.bound is not None
