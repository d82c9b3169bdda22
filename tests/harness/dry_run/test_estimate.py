"""Seconds of a step, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.dry_run.cards import CARDS, parse_gpus
from harness.dry_run.estimate import BANDWIDTH_FRAC, COMPUTE_FRAC, estimate_step
from harness.dry_run.layout import make_layout
from harness.dry_run.models import CountedModel, Models, Shape
from harness.dry_run.work import Work
from oppo_kit.config import LoraSettings, TrainConfig, VLLMConfig

CARD = CARDS["H200"]
SHAPE = Shape(num_layers=10, hidden=64, inner=256, key_value=16, vocab=100)
# A billion parameters each, in bfloat16.
MODEL = CountedModel("a", "", SHAPE, 10**9, 2 * 10**9, 0, 0)
MODELS = Models(MODEL, MODEL, MODEL, MODEL, "a")
# One token each, so that the lengths are known: 8 rows of 101 tokens are trained, and one tick decodes them.
WORK = Work(
    batch_size=8,
    delta=0,
    max_age=2,
    group_size=1,
    prompt_tokens=100,
    response_tokens=1,
    num_epochs=2,
    num_mini_batches=1,
    micro_batch_tokens=8192,
)
TRAIN = TrainConfig(batch_size=8, dtype="bfloat16")
RATE = 989e12 * COMPUTE_FRAC
ONE = make_layout(parse_gpus("1xH200"), None)


def test_the_stages_are_operations_over_rate_and_the_launches_of_a_tick() -> None:
    estimate = estimate_step(TRAIN, MODELS, WORK, ONE, CARD)
    step = estimate.sequential
    assert step.generate_s == pytest.approx(10 * 1e-3 + 2e9 * 800 / RATE)
    assert step.score_s == pytest.approx(2 * 2e9 * 808 / RATE)
    # Two passes over policy and critic, and the critic's values.
    assert step.train_s == pytest.approx((2 * 6e9 + 2 * 6e9 + 2e9) * 808 / RATE)
    assert step.step_s == pytest.approx(step.generate_s + step.score_s + step.train_s)
    assert estimate.decode_limit == "launches"
    assert estimate.both == step
    assert estimate.ratio == 1


def test_an_adapter_doubles_the_launches_and_saves_a_third_of_the_policy_s_training() -> None:
    train = TRAIN.model_copy(update={"actor_lora": LoraSettings()})
    step = estimate_step(train, MODELS, WORK, ONE, CARD).sequential
    assert step.generate_s == pytest.approx(20 * 1e-3 + 2e9 * 800 / RATE)
    assert step.train_s == pytest.approx((2 * 4e9 + 2 * 6e9 + 2e9) * 808 / RATE)


def test_without_launches_decoding_reads_weights_and_cache() -> None:
    train = TRAIN.model_copy(update={"backend": "vllm"})
    estimate = estimate_step(train, MODELS, WORK, ONE, CARD)
    read_bytes = 2e9 + 8 * 101 * 2 * 10 * 16 * 2
    assert estimate.decode_limit == "bandwidth"
    assert estimate.sequential.generate_s == pytest.approx(
        read_bytes / (4.8e12 * BANDWIDTH_FRAC) + 2e9 * 800 / RATE
    )
    assert not any("host" in sentence for sentence in estimate.assumptions)


def test_rows_take_turns_where_vllm_s_cache_holds_half_of_them() -> None:
    half_gib = 808 * 2 * 10 * 16 * 2 / 2 / 2**30
    train = TRAIN.model_copy(update={"backend": "vllm", "vllm": VLLMConfig(kv_cache_gib=half_gib)})
    estimate = estimate_step(train, MODELS, WORK, ONE, CARD)
    read_bytes = 2e9 + half_gib * 2**30
    assert estimate.sequential.generate_s == pytest.approx(
        2 * read_bytes / (4.8e12 * BANDWIDTH_FRAC) + 2e9 * 800 / RATE
    )
    assert any("1 in 2.0 of the rows" in sentence for sentence in estimate.assumptions)
    roomy = TRAIN.model_copy(update={"backend": "vllm"})
    assert not any("turns" in text for text in estimate_step(roomy, MODELS, WORK, ONE, CARD).assumptions)


def test_with_very_many_rows_decoding_is_arithmetic() -> None:
    train = TRAIN.model_copy(update={"backend": "vllm"})
    work = replace(WORK, batch_size=256, prompt_tokens=1)
    assert estimate_step(train, MODELS, work, ONE, CARD).decode_limit == "arithmetic"


def test_devices_share_prefill_and_training_and_a_scoring_one_has_all_scores() -> None:
    layout = make_layout(parse_gpus("8xH200"), "cuda:7")
    estimate = estimate_step(TRAIN, MODELS, WORK, layout, CARD)
    assert estimate.sequential.generate_s == pytest.approx(10 * 1e-3 + 2e9 * 800 / RATE / 7)
    assert estimate.sequential.train_s == pytest.approx(26e9 * 808 / RATE / 7)
    assert estimate.sequential.score_s == pytest.approx(2 * 2e9 * 808 / RATE)
    # Decoding is long enough to hide it.
    assert estimate.both.score_s == 0
    assert estimate.ratio > 1


def test_scores_that_take_longer_than_decoding_are_waited_for() -> None:
    layout = make_layout(parse_gpus("2xH200"), "cuda:1")
    large = replace(MODEL, num_parameters=10**12)
    models = replace(MODELS, reward=large)
    estimate = estimate_step(TRAIN, models, WORK, layout, CARD)
    assert estimate.both.score_s == pytest.approx(estimate.sequential.score_s - estimate.both.generate_s)
    assert estimate.bottleneck.startswith("scoring, ")


def test_the_bottleneck_is_the_longest_stage_and_says_what_decoding_waits_for() -> None:
    work = replace(WORK, response_tokens=512, num_epochs=1)
    estimate = estimate_step(TRAIN, MODELS, work, ONE, CARD)
    assert estimate.bottleneck.startswith("generation, ")
    assert estimate.bottleneck.endswith("each token waits for the host, which starts kernels one by one")
    assert estimate_step(TRAIN, MODELS, WORK, ONE, CARDS["L4"]).bottleneck.startswith("training, ")


def test_float32_is_slower_than_bfloat16() -> None:
    single = estimate_step(TrainConfig(batch_size=8), MODELS, WORK, ONE, CARD).sequential
    assert single.train_s == pytest.approx(
        estimate_step(TRAIN, MODELS, WORK, ONE, CARD).sequential.train_s * 989 / 67
    )


def test_what_is_assumed_is_said_in_numbers() -> None:
    work = replace(WORK, response_tokens=512, delta=4)
    layout = make_layout(parse_gpus("8xH200"), "cuda:7")
    text = "; ".join(estimate_step(TRAIN, MODELS, work, layout, CARD).assumptions)
    for words in (
        "median 128 tokens, mean 1",
        "prompts: 100 tokens",
        "60 % of the card's bandwidth in decoding, 35 % of its dense bfloat16 peak",
        "kernels of a layer in 1 ms",
        "communication between GPUs takes no time",
        "scoring beside decoding is free",
    ):
        assert words in text
