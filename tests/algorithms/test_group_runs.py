"""GRPO and RLOO on tiny real models under the whole engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_engine import LONG_TAILED, TOKENIZER, WORDS, reward_by_length
from tiny_models import tiny_causal_lm, tiny_classifier

from oppo_kit import OverlapConfig, PromptDataset, SamplingConfig, TrainConfig, build_engine
from oppo_kit.backends.function_scorer import FunctionScorer
from oppo_kit.engine.loop import OverlapEngine
from oppo_kit.errors import ConfigError, PartFailedError
from oppo_kit.types import RolloutBatch

OVERLAPPED = {"delta": 2, "decode_tokens": 2, "delta_control": "fixed"}


def make_engine(
    algo: str,
    *,
    reward: Any = reward_by_length,
    call_per: Any = "group",
    words: tuple[str, ...] = WORDS,
    batch_size: int = 3,
    num_steps: int = 3,
    overlap: dict[str, Any] | None = None,
    limit: int = 40,
    **algo_config: Any,
) -> OverlapEngine:
    config = TrainConfig(
        algo=algo,
        algo_config={"num_generations": 4, **algo_config},
        batch_size=batch_size,
        num_steps=num_steps,
        sampling=SamplingConfig.model_validate({"temperature": 1.0, **LONG_TAILED, "response_length": limit}),
        overlap=OverlapConfig(**{"placement": "inline", "decode_tokens": 4, **(overlap or {})}),
        learner={"learning_rate": 1e-2, "micro_batch_tokens": 64},
    )
    prompts = PromptDataset(
        [{"prompt": word} for word in words], TOKENIZER, prompt_column="prompt", max_new_tokens=limit, seed=0
    )
    is_model = isinstance(reward, torch.nn.Module)
    return build_engine(
        config,
        policy=tiny_causal_lm(),
        tokenizer=TOKENIZER,
        prompts=prompts,
        reward=reward if is_model else FunctionScorer([reward], TOKENIZER, None, call_per=call_per),
    )


def weights(engine: OverlapEngine) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in engine.learner.policy.parameters()]


def run(engine: OverlapEngine, look: Callable[[RolloutBatch], None] | None = None) -> list:
    reports = []
    with engine:
        while engine.num_steps_done < engine.num_steps:
            batch = engine.collect()
            if look is not None:
                look(batch)
            reports.append(engine.step(batch))
    for report in reports:
        assert all(math.isfinite(value) for value in report.metrics.values()), report.metrics
    return reports


@pytest.mark.parametrize("overlap", [None, OVERLAPPED], ids=["in-turn", "overlapped"])
@pytest.mark.parametrize(
    ("algo", "settings"),
    [
        ("grpo", {"beta": 0.05, "num_iterations": 2, "num_mini_batches": 2}),
        (
            "grpo",
            {"loss_type": "dr_grpo", "importance_sampling_level": "sequence", "correction": "decoupled"},
        ),
        ("rloo", {"correction": "decoupled"}),
    ],
    ids=["grpo", "dr-grpo-sequence", "rloo"],
)
def test_a_run_moves_every_parameter_and_trains_whole_groups(
    algo: str, settings: dict[str, Any], overlap: dict[str, Any] | None
) -> None:
    engine = make_engine(algo, overlap=overlap, **settings)
    before = weights(engine)
    sizes: list[tuple[int, int]] = []
    reports = run(engine, lambda batch: sizes.append((batch.num_rows, batch.group_size)))
    assert all(not torch.equal(one, other) for one, other in zip(before, weights(engine), strict=True))
    assert sizes == [(12, 4)] * 3
    assert all(report.responses_trained == 12 for report in reports)
    assert reports[-1].trained == 9
    assert ("kl" in reports[0].metrics) == ("reference" in engine.algorithm.scorers)


def test_a_group_waits_for_its_slowest_response_while_others_are_trained() -> None:
    """Responses of 1 to 40 tokens: carried groups come home whole, with members of several versions."""
    batches: list[RolloutBatch] = []
    reports = run(make_engine("grpo", num_steps=4, overlap=OVERLAPPED), batches.append)
    assert sum(report.num_deferred for report in reports) > 0
    assert max(report.age_max for report in reports) >= 1
    draws = [group.draw_id for batch in batches for group in batch.groups]
    assert len(set(draws)) == len(draws) == 12
    spreads = [
        max(lengths) - min(lengths)
        for batch in batches
        for lengths in batch.response_lengths.view(-1, 4).tolist()
    ]
    assert max(spreads) > 20
    assert all(rollout.is_ended for batch in batches for group in batch.groups for rollout in group.rollouts)


def test_carried_tokens_get_a_weight_and_fresh_ones_get_one() -> None:
    engine = make_engine("grpo", num_steps=4, overlap=OVERLAPPED, correction="decoupled")
    changed = 0

    def look(batch: RolloutBatch) -> None:
        nonlocal changed
        tensors = engine.algorithm.prepare(batch).tensors
        is_weighted = tensors["correction_weights"] != 1.0
        assert not (is_weighted & batch.is_current).any()
        changed += int(is_weighted.sum())

    run(engine, look)
    assert changed > 0


@pytest.mark.parametrize("algo", ["grpo", "rloo"])
def test_without_overlap_decoupled_is_none_to_the_bit(algo: str) -> None:
    engines = [make_engine(algo, correction=correction, num_steps=2) for correction in ("none", "decoupled")]
    for engine in engines:
        run(engine)
    for one, other in zip(*map(weights, engines), strict=True):
        assert torch.equal(one, other)


def test_draws_of_the_same_prompt_are_groups_of_their_own() -> None:
    batches: list[RolloutBatch] = []
    run(make_engine("rloo", words=("cat", "cat"), num_steps=1), batches.append)
    groups = batches[0].groups
    assert len({group.draw_id for group in groups}) == 3
    assert len({group.prompt.token_ids for group in groups}) == 1
    responses = {tuple(rollout.token_ids) for group in groups for rollout in group.rollouts}
    assert len(responses) > 4


@pytest.mark.parametrize("algo", ["grpo", "rloo"])
def test_a_group_size_that_divides_nothing_is_fine(algo: str) -> None:
    engine = make_engine(algo, batch_size=3, num_generations=5, num_mini_batches=2, overlap=OVERLAPPED)
    assert all(report.responses_trained == 15 for report in run(engine))


@pytest.mark.parametrize("algo", ["grpo", "rloo"])
def test_a_reward_model_and_truncated_responses_left_out(algo: str) -> None:
    engine = make_engine(algo, reward=tiny_classifier(), mask_truncated_completions=True, limit=6)
    shares = [report.metrics["completions/clipped_ratio"] for report in run(engine)]
    assert 0 < max(shares) < 1


@pytest.mark.parametrize("call_per", ["response", "group"])
def test_rewards_of_some_responses_are_enough(call_per: str) -> None:
    def sometimes(completions: list[str], **_: Any) -> list[float | None]:
        return [None if len(text) % 3 == 0 else float(len(text)) for text in completions]

    engine = make_engine("grpo", reward=sometimes, call_per=call_per, num_steps=4)
    before = weights(engine)
    num_missing = 0

    def look(batch: RolloutBatch) -> None:
        nonlocal num_missing
        is_missing = batch.scores["reward"].isnan()
        num_missing += int(is_missing.sum())
        assert not engine.algorithm.prepare(batch).tensors["advantages"][is_missing].any()

    run(engine, look)
    assert num_missing > 0
    assert any(not torch.equal(one, other) for one, other in zip(before, weights(engine), strict=True))


@pytest.mark.parametrize("algo", ["grpo", "rloo"])
def test_a_reward_that_always_abstains_ends_the_run_with_the_reason(algo: str) -> None:
    engine = make_engine(algo, reward=lambda completions, **_: [None] * len(completions))
    with (
        engine,
        pytest.raises(PartFailedError, match="were all rejected .reward_abstained.; the reward must"),
    ):
        list(engine.run())


def test_equal_rewards_teach_nothing() -> None:
    engine = make_engine("grpo", reward=lambda completions, **_: [0.1] * len(completions), num_steps=1)
    before = weights(engine)
    (report,) = run(engine)
    assert report.metrics["frac_reward_zero_std"] == 1.0
    assert report.metrics["grad_norm"] == 0.0
    assert all(torch.equal(one, other) for one, other in zip(before, weights(engine), strict=True))


@pytest.mark.parametrize("algo", ["grpo", "rloo"])
def test_more_mini_batches_than_groups_are_refused(algo: str) -> None:
    with pytest.raises(ConfigError, match="num_mini_batches=5 exceeds batch_size=3"):
        make_engine(algo, num_mini_batches=5)
