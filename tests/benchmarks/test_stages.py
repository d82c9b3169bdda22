"""Timings of single stages on the embedded models; `make benchmark` runs them, no test asserts a duration."""

from __future__ import annotations

import pytest
import torch

from harness.measurement.decoding import draw_limits, make_generate, make_ours
from harness.runners.oppo import make_engine
from harness.settings import load_train_config
from harness.workloads.loading import load_workload
from oppo_kit.backends.hf_generator import HFGenerator
from oppo_kit.config import OverlapConfig
from oppo_kit.ops.noise import gumbel_noise, stream_key, token_keys
from oppo_kit.types import Rollout, RolloutKey

pytestmark = pytest.mark.benchmark_only


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def engine(one_thread):
    train = load_train_config(overrides=["num_steps=1", "overlap.delta=0"])
    train = train.model_copy(update={"overlap": OverlapConfig(schedule="sequential")})
    with make_engine(train, load_workload(train, num_eval_problems=0)) as engine:
        yield engine


@pytest.mark.parametrize("num_rows", [1, 8, 32, 48])
def test_decode_16_ticks(benchmark, engine, num_rows: int) -> None:
    def setup():
        generator = HFGenerator(engine.learner.policy, temperature=1.0, stop_token_ids=(), seed=0)
        prompts = [engine.prompts.draw(draw) for draw in range(num_rows)]
        generator.admit([Rollout(RolloutKey(prompt.draw_id, 0), prompt) for prompt in prompts])
        generator.decode(16)
        return (generator,), {}

    benchmark.pedantic(lambda generator: generator.decode(16), setup=setup, rounds=10)


def test_decode_48_requests_of_unequal_length(benchmark) -> None:
    """Against ``generate`` in batches of 16, each to its longest row; stop tokens are ignored on both sides."""
    limits = draw_limits()
    workload = load_workload(load_train_config(), num_eval_problems=0)
    ours, generate = make_ours(workload, limits), make_generate(workload, limits)
    benchmark.pedantic(ours, rounds=3, warmup_rounds=1)
    generate_s = sorted(generate() for _ in range(3))
    benchmark.extra_info["num_tokens"] = sum(limits)
    benchmark.extra_info["generate_s"] = generate_s
    benchmark.extra_info["generate_over_ours"] = round(generate_s[1] / benchmark.stats.stats.median, 2)
    print(benchmark.extra_info)


def test_score_one_batch(benchmark, engine) -> None:
    batch = engine.collect()
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    benchmark(lambda: [handle.submit(rollouts).result() for handle in engine.scorers.values()])


def test_critic_values_of_one_batch(benchmark, engine) -> None:
    batch = engine.collect()
    benchmark(lambda: engine.learner.compute_values(batch))


def test_update_on_one_batch(benchmark, engine) -> None:
    train_batch = engine.algorithm.prepare(engine.collect())
    benchmark.pedantic(
        lambda: engine.learner.update(train_batch, engine.algorithm), rounds=5, warmup_rounds=1
    )


@pytest.mark.parametrize("vocab_size", [18, 50_000])
def test_noise_for_16_rows(benchmark, vocab_size: int) -> None:
    streams = [stream_key(0, draw, 0) for draw in range(16)]
    benchmark(lambda: gumbel_noise(token_keys(streams, [5] * 16, 1)[0], vocab_size))
