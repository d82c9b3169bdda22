"""Every rung of the ladder is one run: the same tokens and scores, wherever scorers are and whenever they read."""

from __future__ import annotations

import threading

import pytest
import torch
from tiny_engine import LONG_TAILED, TOKENIZER, make_engine, reward_by_length
from tiny_models import tiny_causal_lm, tiny_classifier, tiny_tokenizer

from oppo_kit.algorithm import AlgorithmBase, AlgorithmConfig
from oppo_kit.backends.function_scorer import FunctionScorer
from oppo_kit.backends.hf_scorer import HFCriticScorer, HFReferenceScorer, HFRewardScorer
from oppo_kit.build import frozen_reference
from oppo_kit.config import OverlapConfig, TrainConfig, parse_config
from oppo_kit.errors import ConfigError, ModelError, PartFailedError
from oppo_kit.types import RolloutBatch

NUM_STEPS = 3


class Functional(AlgorithmBase):
    """Needs a reward and nothing else."""

    name = "functional"

    def __init__(self) -> None:
        super().__init__(AlgorithmConfig())

    def prepare(self, batch):
        raise NotImplementedError

    def loss(self, micro_batch, outputs):
        raise NotImplementedError


AT_DELTA_ZERO = {
    "sample": {"score_at": "sample"},
    "chunk": {"score_at": "chunk", "chunk_tokens": 4},
    "chunk in a thread": {"score_at": "chunk", "chunk_tokens": 4, "placement": "thread"},
    "chunk, critic too": {"score_at": "chunk", "chunk_tokens": 4, "stream_critic": True},
    "auto": {"score_at": "auto", "chunk_candidates": (4, 12)},
}
# Processes start in seconds each, so one that does everything.
IN_A_PROCESS = {"score_at": "chunk", "chunk_tokens": 4, "placement": "process"}


def run(num_steps: int = NUM_STEPS, **settings) -> tuple[list[RolloutBatch], list]:
    """The batches that were trained, and the reports."""
    batches, reports = [], []
    torch.manual_seed(0)  # of a fresh adapter
    with make_engine(sampling=LONG_TAILED, num_steps=num_steps, **settings) as engine:
        while engine.num_steps_done < num_steps:
            batches.append(engine.collect())
            reports.append(engine.step(batches[-1]))
    return batches, reports


@pytest.fixture(scope="module")
def sequential() -> list[RolloutBatch]:
    return run(schedule="sequential")[0]


@pytest.mark.parametrize("rung", [*AT_DELTA_ZERO, "process"])
def test_at_delta_zero_every_rung_trains_the_same_batches(rung: str, sequential) -> None:
    batches, reports = run(**AT_DELTA_ZERO.get(rung, IN_A_PROCESS))
    for one, other in zip(batches, sequential, strict=True):
        assert [g.draw_id for g in one.groups] == [g.draw_id for g in other.groups]
        assert torch.equal(one.response_ids, other.response_ids)
        for name in ("reward", "reference"):
            torch.testing.assert_close(one.scores[name], other.scores[name], rtol=0, atol=1e-5)
        torch.testing.assert_close(one.values, other.values, rtol=0, atol=1e-5)
        assert one.scores.keys() == other.scores.keys()
    prefetched = sum(report.tokens_prefetched for report in reports)
    assert (prefetched > 0) == ("chunk" in rung or rung == "process")


@pytest.mark.parametrize(
    "overlap",
    [
        {"score_at": "chunk", "chunk_tokens": 4},
        {"score_at": "sample", "placement": "thread"},
        {"score_at": "chunk", "chunk_tokens": 2, "placement": "thread", "stream_critic": True},
    ],
)
def test_with_overcommit_the_scores_of_every_trained_response_are_one_shot_scores(overlap) -> None:
    """Carried responses keep the caches of frozen models, and the critic reads them again under new weights."""
    with make_engine(sampling=LONG_TAILED, num_steps=5, delta=4, decode_tokens=2, **overlap) as engine:
        reference = HFReferenceScorer(make_engine().learner.policy, temperature=1.0)
        reward = HFRewardScorer(tiny_classifier())
        num_deferred = 0
        for _ in range(5):
            batch = engine.collect()
            rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
            assert batch.scores["reward"].tolist() == pytest.approx(reward.score(rollouts), abs=1e-5)
            values = HFCriticScorer(engine.learner.critic).score(rollouts)
            for row, (logprobs, value) in enumerate(zip(reference.score(rollouts), values, strict=True)):
                num_tokens = len(rollouts[row].token_ids)
                assert batch.scores["reference"][row, :num_tokens].tolist() == pytest.approx(
                    logprobs, abs=1e-5
                )
                assert batch.values[row, :num_tokens].tolist() == pytest.approx(value, abs=1e-5)
            num_deferred += engine.step(batch).num_deferred
        assert num_deferred > 0


def test_no_token_is_scored_twice_over_a_whole_run() -> None:
    """Reward model and reference each read a response once; the reference needs no last token when it is fed."""
    batches, reports = run(num_steps=5, delta=4, decode_tokens=2, score_at="chunk", chunk_tokens=2)
    num_tokens = sum(
        len(prompt) + int(length)
        for batch in batches
        for prompt, length in zip(batch.prompt_ids, batch.response_lengths, strict=True)
    )
    num_rows = sum(batch.num_rows for batch in batches)
    read = sum(report.tokens_prefetched + report.tokens_scored for report in reports)
    assert 2 * num_tokens - num_rows <= read <= 2 * num_tokens
    assert sum(report.tokens_prefetched for report in reports) > read / 3


def test_a_run_in_text_mode_streams_what_it_scores_in_one_shot() -> None:
    """trl#3595: a vocabulary of equal size and other ids is read as text."""
    permuted = tiny_tokenizer(is_permuted=True)
    expected, _ = run(reward_tokenizer=permuted, schedule="sequential")
    ids, _ = run(schedule="sequential")
    streamed, _ = run(reward_tokenizer=permuted, score_at="chunk", chunk_tokens=4)
    for one, other in zip(streamed, expected, strict=True):
        torch.testing.assert_close(one.scores["reward"], other.scores["reward"], rtol=0, atol=1e-5)
    assert (expected[0].scores["reward"] - ids[0].scores["reward"]).abs().max() > 1e-3


def test_another_vocabulary_is_refused_where_ids_are_asked_for() -> None:
    with pytest.raises(ModelError, match="vocabularies differ in .* tokens .*; set reward_input to 'text'"):
        make_engine(reward_tokenizer=tiny_tokenizer(is_permuted=True), reward_input="ids")
    with pytest.raises(
        ConfigError, match="reward_input 'text' needs the reward model's tokenizer; pass reward_"
    ):
        make_engine(reward_input="text")
    functions = FunctionScorer([reward_by_length], TOKENIZER)
    for reward_input in ("text", "ids"):
        with pytest.raises(
            ConfigError, match=f"reward_input is '{reward_input}', and the reward is no model"
        ):
            make_engine(reward=functions, reward_input=reward_input)


def test_a_lora_run_streams_too() -> None:
    expected, _ = run(lora=True, schedule="sequential")
    streamed, _ = run(lora=True, score_at="chunk", chunk_tokens=4, placement="thread")
    for one, other in zip(streamed, expected, strict=True):
        assert torch.equal(one.response_ids, other.response_ids)
        torch.testing.assert_close(one.scores["reference"], other.scores["reference"], rtol=0, atol=1e-5)


def test_a_reward_model_that_breaks_while_it_is_fed_ends_the_step() -> None:
    for placement in ("inline", "thread"):
        reward = tiny_classifier()
        with make_engine(
            sampling=LONG_TAILED, reward=reward, score_at="chunk", chunk_tokens=4, placement=placement
        ) as engine:
            reward.model.forward = None
            with pytest.raises(PartFailedError, match="scorer.* failed .*TypeError"):
                for _ in engine.run():
                    pass


@pytest.mark.parametrize(
    ("overlap", "message"),
    [
        ({"chunk_candidates": [0, 8]}, r"chunk_candidates=\[0, 8\] must all be at least 1"),
        (
            {"scorer_cores": [1], "placement": "inline"},
            "scorer_cores pins a process, but placement is 'inline'",
        ),
        ({"stream_critic": True}, "stream_critic feeds chunks, but score_at is 'batch'"),
        (
            {"stream_critic": True, "score_at": "chunk", "placement": "process"},
            "stream_critic reads the critic under training, which a process cannot",
        ),
    ],
)
def test_overlap_settings_that_contradict_each_other_are_refused(overlap, message) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(TrainConfig, {"overlap": overlap})


def test_the_defaults_stream_nothing() -> None:
    assert OverlapConfig().score_at == "batch"
    assert OverlapConfig().placement == "auto"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scorer_device": "gpu"}, "scorer_device 'gpu' cannot be used: .*; name one that this machine has"),
        (
            {
                "score_at": "chunk",
                "algorithm": Functional(),
                "reward": FunctionScorer([reward_by_length], TOKENIZER),
            },
            "score_at 'chunk' has nobody to stream to, since reward functions see whole responses",
        ),
        (
            {"score_at": "chunk", "stream_critic": True, "algorithm": Functional()},
            "stream_critic is set, and 'functional' has no critic",
        ),
    ],
)
def test_scorers_that_cannot_be_placed_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(**settings)


def test_an_engine_that_cannot_be_built_leaves_no_thread_behind() -> None:
    algorithm = Functional()
    algorithm.scorers = frozenset({"reward", "reference", "judge"})
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(ConfigError, match=r"needs the scorers \['judge'\]"):
        make_engine(algorithm=algorithm, placement="thread")
    assert {thread.name for thread in threading.enumerate()} <= before


def test_a_lora_reference_that_goes_to_another_device_does_not_take_the_policy_along() -> None:
    lora = {"actor_lora": {"r": 4}}
    base = tiny_causal_lm()
    for overlap, is_shared in (({}, True), ({"scorer_device": "meta"}, False)):
        reference = frozen_reference(TrainConfig.model_validate(lora | {"overlap": overlap}), base)
        own = {parameter.data_ptr() for parameter in base.parameters()}
        assert ({parameter.data_ptr() for parameter in reference.parameters()} <= own) == is_shared
    reference.to("meta")
    assert all(parameter.device.type == "cpu" for parameter in base.parameters())
