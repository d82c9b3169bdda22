"""Real models under the whole engine: law 2, LoRA, function rewards, resume to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_engine import LONG_TAILED, TOKENIZER, make_engine, reward_by_length, trajectory
from tiny_models import tiny_causal_lm, tiny_classifier

from algorithms.ppo import PPO, PPOConfig
from oppo_kit.backends.forward import response_logprobs
from oppo_kit.backends.function_scorer import FunctionScorer
from oppo_kit.checkpoint import CHECKPOINT_NAME, load_checkpoint, save_checkpoint
from oppo_kit.errors import ConfigError, ModelError, StateError
from oppo_kit.ops.batching import pad_prompts_and_responses
from oppo_kit.types import RolloutBatch


def parameters(engine) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in engine.learner.policy.parameters()]


def test_at_delta_zero_overlap_changes_no_token_and_no_weight() -> None:
    """verl#6780: the run without overlap and the run with it are one run."""
    sequential = make_engine(schedule="sequential")
    expected = trajectory(sequential)
    for overlap in (
        {"decode_tokens": 1},
        {"score_at": "sample"},
        {"decode_tokens": 64, "score_at": "sample"},
    ):
        engine = make_engine(**overlap)
        assert trajectory(engine) == expected
        for one, other in zip(parameters(engine), parameters(sequential), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_batch_invariant_runs_with_and_without_overlap_are_equal_to_the_bit() -> None:
    """Law 2: tokens, behaviour log-probs and batches, for overlap off, at the sample, and chunks of any size."""
    settings = {"batch_invariant": True}

    def batches(**overlap) -> list[RolloutBatch]:
        with make_engine(
            sampling=settings, num_steps=2, reward=FunctionScorer([reward_by_length], TOKENIZER), **overlap
        ) as e:
            collected = []
            for _ in range(2):
                collected.append(e.collect())
                e.step(collected[-1])
            return collected

    expected = batches(schedule="sequential")
    for overlap in (
        {"decode_tokens": 1},
        {"score_at": "sample"},
        {"decode_tokens": 64, "score_at": "sample"},
    ):
        for one, other in zip(batches(**overlap), expected, strict=True):
            assert torch.equal(one.response_ids, other.response_ids)
            assert torch.equal(one.behaviour_logprobs, other.behaviour_logprobs)
            assert one.scores.keys() == other.scores.keys()
            assert torch.equal(one.scores["reward"], other.scores["reward"])


class Watched(PPO):
    """Keeps what it was given to prepare."""

    needs_proximal = True

    def on_batch(self, batch) -> None:
        self.batches = [*getattr(self, "batches", []), batch]


def test_the_proximal_logprobs_of_carried_tokens_are_those_of_the_weights_about_to_be_updated() -> None:
    """Fresh tokens have the behaviour log-probs; carried ones, prefilled again, those of the new policy."""
    algorithm = Watched(PPOConfig(num_ppo_epochs=1, num_mini_batches=1))
    num_moved = 0
    with make_engine(num_steps=4, delta=4, decode_tokens=2, algorithm=algorithm, sampling=LONG_TAILED) as e:
        for _ in range(4):
            batch = e.collect()
            rows = pad_prompts_and_responses(
                batch.prompt_ids,
                [ids[:n].tolist() for ids, n in zip(batch.response_ids, batch.response_lengths, strict=True)],
            )
            with torch.no_grad():
                now, _ = response_logprobs(e.learner.policy, rows, temperature=1.0)
            width = batch.response_ids.shape[1]
            # A group that ended before the last update is not prefilled again: it has no token of this version.
            read = batch.is_current.any(1)
            mask = batch.response_mask & read[:, None]
            assert batch.proximal_logprobs[mask].tolist() == pytest.approx(
                now[:, :width][mask].tolist(), abs=1e-4
            )
            moved = (batch.proximal_logprobs - batch.behaviour_logprobs).abs() > 1e-4
            assert not (moved & batch.is_current).any()
            num_moved += int((moved & mask).sum())
            e.step(batch)
    assert num_moved > 10


def test_a_correction_that_needs_what_a_kept_cache_never_says_is_refused() -> None:
    algorithm = PPO(PPOConfig(num_ppo_epochs=1, correction="decoupled"))
    with pytest.raises(
        ConfigError, match="with carried_cache 'keep' it never reads them; set overlap.carried"
    ):
        make_engine(algorithm=algorithm, carried_cache="keep")


def test_the_behaviour_gap_is_rounding_and_shows_a_generator_that_samples_something_else() -> None:
    """areal-1290: the log-probs that the engine sampled with are watched against those of training."""
    with make_engine(num_steps=1, schedule="sequential") as engine:
        [report] = engine.run()
    assert report.metrics["oppo/behaviour_gap_max"] < 1e-4
    with make_engine(num_steps=1, schedule="sequential") as engine:
        with torch.no_grad():
            engine.learner.policy.get_output_embeddings().weight.mul_(1.5)  # the generator is not told
        [report] = engine.run()
    assert report.metrics["oppo/behaviour_gap_mean"] > 1e-2


def test_a_kept_cache_of_carried_responses_shows_in_the_behaviour_gap() -> None:
    gaps = {}
    for carried_cache in ("recompute", "keep"):
        with make_engine(
            num_steps=4,
            delta=4,
            decode_tokens=2,
            carried_cache=carried_cache,
            sampling=LONG_TAILED,
        ) as engine:
            reports = list(engine.run())
        gaps[carried_cache] = max(report.metrics.get("oppo/behaviour_gap_max", 0.0) for report in reports)
        assert sum(report.num_deferred for report in reports) > 0
    assert gaps["recompute"] < 1e-4
    assert gaps["keep"] > 1e-3


def test_where_a_generator_knows_the_policys_own_logprobs_a_correction_is_taken_against_them() -> None:
    """vLLM's are only near them; whoever needs no proximal log-probs is not given them."""
    for algorithm in (Watched(PPOConfig(num_mini_batches=1)), PPO(PPOConfig(num_mini_batches=1))):
        with make_engine(num_steps=1, algorithm=algorithm) as engine:
            generator: Any = engine.generator
            generator.policy_logprobs = lambda batch: batch.behaviour_logprobs - 0.5
            batch = engine.collect()
            difference = batch.behaviour_logprobs - batch.proximal_logprobs
        is_needed = isinstance(algorithm, Watched)
        torch.testing.assert_close(difference, torch.full_like(difference, 0.5 * is_needed))


def test_vllm_is_not_started_without_a_longest_length() -> None:
    policy = tiny_causal_lm()
    policy.config.max_position_embeddings = 0
    with pytest.raises(
        ConfigError,
        match="LlamaForCausalLM names no longest context, and vLLM must know it.*set max_prompt_tokens",
    ):
        make_engine(policy=policy, backend="vllm")


def test_truncated_sampling_is_told_and_its_kept_mass_reported(caplog) -> None:
    with make_engine(num_steps=1, schedule="sequential", sampling={"top_k": 3}) as engine:
        batch = engine.collect()
        report = engine.step(batch)
    assert "top_k=3, top_p=1, min_p=0: responses are drawn from a truncated distribution" in caplog.text
    assert 0.05 < report.metrics["oppo/kept_mass"] < 0.99
    mask = batch.response_mask
    assert (batch.sampling_logprobs >= batch.behaviour_logprobs)[mask].all()
    # Behaviour log-probs stay those of the full vocabulary, which the policy under training has too.
    assert report.metrics["oppo/behaviour_gap_max"] < 1e-4


def test_without_truncation_nothing_is_said_about_it(caplog) -> None:
    with make_engine(num_steps=1, schedule="sequential") as engine:
        [report] = engine.run()
    assert "truncated" not in caplog.text
    assert "oppo/kept_mass" not in report.metrics


def test_at_zero_staleness_the_ratio_is_one_and_the_kl_zero() -> None:
    engine = make_engine(schedule="sequential", num_steps=1)
    engine.algorithm.config = engine.algorithm.config.model_copy(update={"num_mini_batches": 1})
    [report] = engine.run()
    assert report.metrics["val/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert report.metrics["objective/kl"] == pytest.approx(0.0, abs=1e-4)
    assert report.metrics["policy/clipfrac_avg"] == 0.0


def test_overcommit_trains_every_draw_once_on_real_models() -> None:
    draws = [draw for step in trajectory(make_engine(delta=3, num_steps=5)) for draw, _ in step]
    assert sorted(draws) == list(range(20))


def test_a_lora_run_moves_the_adapter_and_leaves_the_base() -> None:
    engine = make_engine(lora=True, delta=2)
    base = {name: p.clone() for name, p in engine.learner.policy.named_parameters() if "lora" not in name}
    adapter = {name: p.clone() for name, p in engine.learner.policy.named_parameters() if "lora_B" in name}
    reports = list(engine.run())
    after = dict(engine.learner.policy.named_parameters())
    assert all(torch.equal(after[name], parameter) for name, parameter in base.items())
    assert all(not torch.equal(after[name], parameter) for name, parameter in adapter.items())
    assert reports[0].metrics["objective/kl"] == pytest.approx(0.0, abs=1e-4)
    assert abs(reports[-1].metrics["objective/kl"]) > 1e-6


def test_a_python_function_is_a_reward() -> None:
    engine = make_engine(
        reward=FunctionScorer([reward_by_length], TOKENIZER, prompt_column="prompt"), score_at="sample"
    )
    with engine:
        for report in engine.run():
            assert report.reward_mean == pytest.approx(report.reward_mean)
            assert report.reward_mean > 0


def test_a_killed_run_goes_on_to_the_bit(tmp_path) -> None:
    """trl#1643, OpenRLHF#1322: rollouts in flight, critic and optimizer included."""
    straight = make_engine(delta=2, num_steps=5)
    list(straight.run())
    first = make_engine(delta=2, num_steps=5)
    for _ in range(2):
        first.step(first.collect())
    assert first.num_in_flight + first.num_queued == 2
    save_checkpoint(tmp_path, first)
    resumed = make_engine(delta=2, num_steps=5)
    load_checkpoint(tmp_path, resumed)
    reports = list(resumed.run())
    assert [report.step for report in reports] == [2, 3, 4]
    for one, other in zip(parameters(resumed), parameters(straight), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_that_cannot_be_used_says_why(tmp_path) -> None:
    engine = make_engine()
    with pytest.raises(StateError, match=f"there is no {CHECKPOINT_NAME} in .*; start without --resume"):
        load_checkpoint(tmp_path, engine)
    file = save_checkpoint(tmp_path, engine)
    assert not list(tmp_path.glob("*.tmp"))
    with pytest.raises(StateError, match="does not fit this configuration's models or optimizer"):
        load_checkpoint(tmp_path, make_engine(lora=True))
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(StateError, match="is damaged: .*; restore a copy or start anew"):
        load_checkpoint(tmp_path, engine)


def test_pad_equal_to_eos_changes_nothing() -> None:
    """trl#5303."""
    critic, same_critic = tiny_classifier(seed=5), tiny_classifier(seed=5, pad_token_id=2)
    one = make_engine(critic=critic)
    other = make_engine(critic=same_critic, reward=tiny_classifier(pad_token_id=2))
    assert trajectory(one) == trajectory(other)
    for first, second in zip(parameters(one), parameters(other), strict=True):
        assert torch.equal(first, second)


def test_models_that_do_not_fit_the_policy_are_refused() -> None:
    with pytest.raises(ModelError, match="the reward model's vocab_size is 61, the policy's 62"):
        make_engine(reward=tiny_classifier(vocab_size=61))
    with pytest.raises(ModelError, match="the critic's vocab_size is 61, the policy's 62"):
        make_engine(critic=tiny_classifier(vocab_size=61))
    with pytest.raises(ModelError, match=r"the critic \(LlamaForSequenceClassification\) gives 2 scores"):
        make_engine(critic=tiny_classifier(num_labels=2))


def test_the_models_handed_over_as_reward_are_never_trained() -> None:
    reward = tiny_classifier()
    before = copy.deepcopy(reward.state_dict())
    list(make_engine(reward=reward).run())
    assert all(torch.equal(before[name], value) for name, value in reward.state_dict().items())
