"""vLLM against the policy under training: what it samples, what a sync does, what it refuses; by ``make test-vllm``.

The contract that it shares with every generator is in ``tests/contract``. Which tokens it samples is its own business,
so that nothing here compares tokens with another backend's: log-probs say what they were sampled from.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from statistics import fmean
from typing import Any

import pytest
import torch
from generator_subjects import (
    SUBJECTS,
    TEMPERATURE,
    VLLM_HEADS,
    VLLM_SUBJECTS,
    by_key,
    change,
    decode,
    decode_all,
    forward_logprobs,
    make_rollout,
    make_rollouts,
    policy_of,
    vllm_engine,
)
from tiny_models import tiny_causal_lm, tiny_config
from torch import nn
from transformers import LlamaForCausalLM

from oppo_kit.backends import vllm_generator
from oppo_kit.backends.vllm_engine import VLLMEngine
from oppo_kit.backends.vllm_generator import VLLMGenerator
from oppo_kit.errors import ConfigError, DataError, ModelError, NonFiniteError, PartFailedError
from oppo_kit.types import Group, Prompt, Rollout, RolloutBatch, RolloutKey

pytestmark = pytest.mark.vllm

# Mean difference of a token's log-prob from the policy's, float32.
MEAN_GAP = 1e-4


def assert_sampled_from(policy: nn.Module, rollouts: list[Rollout], first: int = 0) -> None:
    """The log-probs from token ``first`` on are the policy's."""
    gaps = [
        abs(one - other)
        for rollout in rollouts
        for one, other in zip(
            rollout.behaviour_logprobs[first:], forward_logprobs(policy, rollout)[first:], strict=True
        )
    ]
    assert fmean(gaps) <= MEAN_GAP
    assert max(gaps) <= 10 * MEAN_GAP


@pytest.mark.parametrize("name", VLLM_SUBJECTS)
def test_rows_that_enter_and_leave_have_the_logprobs_of_the_policy(name: str) -> None:
    policy = policy_of(name)
    generator = SUBJECTS[name].make(policy)
    rollouts = make_rollouts()
    live: dict[RolloutKey, Rollout] = {}
    for wave in (rollouts[:3], rollouts[3:4], rollouts[4:]):
        generator.admit(wave)
        live |= by_key(wave)
        decode(generator, live, 4)
    decode_all(generator, rollouts, 3)
    assert len({len(rollout.token_ids) for rollout in rollouts}) > 3, "rows should leave at different ticks"
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    assert_sampled_from(policy, rollouts)


# --- noise


def test_tokens_follow_from_seed_and_key_and_not_from_neighbours_chunks_or_order() -> None:
    def sample(*, order: int = 1, max_tokens: int = 64, num: int = 8, seed: int = 3) -> list[list[int]]:
        generator = SUBJECTS["vllm"].make(policy_of("vllm"), stop_ids=(), seed=seed)
        rollouts = make_rollouts()[:num]
        generator.admit(rollouts[::order])
        decode_all(generator, rollouts, max_tokens)
        return [rollout.token_ids for rollout in rollouts]

    expected = sample()
    assert sample(order=-1, max_tokens=5) == expected
    assert sample(max_tokens=1, num=2) == expected[:2]
    assert sample(seed=4) != expected
    assert expected[6][:8] != expected[7][:8], "two samples of one draw"


def test_a_response_that_comes_back_does_not_meet_the_noise_of_its_first_tokens_again() -> None:
    generator = SUBJECTS["vllm"].make(policy_of("vllm"), stop_ids=())
    key = RolloutKey(4, 0)
    fresh = Rollout(key, Prompt(4, (5, 6, 7, 8), 12))
    # The same context, of which three tokens are the response's.
    back = Rollout(key, Prompt(4, (5,), 15), [6, 7, 8], [-1.0] * 3, [0] * 3)
    for rollout in (fresh, back):
        generator.admit([rollout])
        decode_all(generator, [rollout], 12)
    assert len(fresh.token_ids) == 12
    assert (len(back.token_ids), back.finish_reason) == (15, "length")
    assert back.token_ids[3:] != fresh.token_ids


# --- evict


def test_an_evicted_rollout_comes_back_with_its_tokens_and_the_rest_of_its_budget() -> None:
    policy = policy_of("vllm")
    generator = SUBJECTS["vllm"].make(policy)
    rollouts = make_rollouts()
    generator.admit(rollouts)
    live = by_key(rollouts)
    for max_tokens in range(2, 9):
        decode(generator, live, max_tokens)
        gone = list(live.values())[::2]
        generator.evict([rollout.key for rollout in gone])
        assert generator.num_live == len(live) - len(gone)
        generator.admit(gone)
    decode_all(generator, rollouts, 3)
    assert all(len(rollout.token_ids) <= rollout.prompt.max_new_tokens for rollout in rollouts)
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    assert_sampled_from(policy, rollouts)


# --- room


def test_more_responses_than_vllm_decodes_at_once_wait_for_their_turn() -> None:
    generator = SUBJECTS["vllm"].make(policy_of("vllm"), stop_ids=())
    num = generator.engine.max_requests + 5
    rollouts = {RolloutKey(draw, 0): make_rollout(draw, 3, limit=6) for draw in range(num)}
    generator.admit(list(rollouts.values()))
    first = generator.decode(4)
    assert {len(chunk.token_ids) for chunk in first} == {4}
    assert len(first) == generator.engine.max_requests
    num_calls = 1
    chunks = first
    while chunks:
        for chunk in chunks:
            assert chunk.token_ids
            rollouts[chunk.key].append(chunk, base_tick=0)
        chunks = generator.decode(4)
        num_calls += 1
    assert num_calls < 8
    assert all(len(rollout.token_ids) == 6 for rollout in rollouts.values())
    assert_sampled_from(policy_of("vllm"), list(rollouts.values()))


def test_responses_that_the_cache_has_no_room_for_are_computed_again_later() -> None:
    """The cache holds one response of full length, and not the eight that are admitted."""
    policy = policy_of("vllm")
    engine = VLLMEngine(policy, max_tokens=256, max_requests=8, kv_cache_gib=0.0008)  # type: ignore[arg-type]
    generator = VLLMGenerator(policy, engine, temperature=TEMPERATURE, stop_token_ids=(), seed=3)
    rollouts = {RolloutKey(draw, 0): make_rollout(draw, 60, limit=120) for draw in range(8)}
    generator.admit(list(rollouts.values()))
    has_waited = False
    while generator.num_live:
        num_live = generator.num_live
        chunks = generator.decode(16)
        has_waited |= len(chunks) < num_live
        for chunk in chunks:
            rollouts[chunk.key].append(chunk, base_tick=0)
    assert has_waited
    assert {len(rollout.token_ids) for rollout in rollouts.values()} == {120}
    assert_sampled_from(policy, list(rollouts.values()))
    generator.close()


# --- sync


@pytest.mark.parametrize("name", ["vllm with tied embeddings", "vllm with LoRA"])
def test_right_after_each_of_many_syncs_fresh_and_carried_responses_have_the_new_logprobs(name: str) -> None:
    policy = SUBJECTS[name].make_policy()
    generator = SUBJECTS[name].make(policy, stop_ids=())
    carried = [make_rollout(0, 4, limit=30), make_rollout(1, 9, limit=30)]
    generator.admit(carried)
    for version in range(1, 6):
        before = copy.deepcopy(policy)
        change(policy)
        generator.load_weights(version)
        fresh = make_rollout(10 + version, 5, limit=4)
        generator.admit([fresh])
        num_carried = len(carried[0].token_ids)
        decode(generator, by_key([*carried, fresh]), 4)
        assert_sampled_from(policy, [fresh])
        assert_sampled_from(policy, carried, first=num_carried)
        moved = zip(forward_logprobs(policy, fresh), forward_logprobs(before, fresh), strict=True)
        assert fmean(abs(one - other) for one, other in moved) > 100 * MEAN_GAP, "else this says nothing"
        assert fresh.versions == [version] * 4


def leave_out(name: str) -> Callable[[nn.Module], Any]:
    whole = vllm_generator.checkpoint_weights
    return lambda policy: ((key, value) for key, value in whole(policy) if key != name)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.down_proj.weight"])
def test_weights_that_a_sync_leaves_out_are_found_at_its_first_use(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU vLLM keeps a copy of a tied output head, which it does not renew from the embedding."""
    policy = SUBJECTS["vllm with tied embeddings"].make_policy()
    generator = SUBJECTS["vllm with tied embeddings"].make(policy, stop_ids=())
    monkeypatch.setattr(vllm_generator, "checkpoint_weights", leave_out(name))
    change(policy)
    generator.load_weights(1)
    generator.admit([make_rollout(5, 4)])
    message = (
        r"log-probs of draw 5 at version 1 differ from those of LlamaForCausalLM under training by [\d.]+ a token, and "
        r"0.0013 is allowed in torch.float32: vLLM has other weights, or computes this model otherwise; use backend"
    )
    with pytest.raises(ModelError, match=message):
        generator.decode(4)
    assert generator.num_live == 0


def test_stale_keys_and_values_of_a_carried_response_are_found_at_its_first_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = SUBJECTS["vllm"].make_policy()
    generator = SUBJECTS["vllm"].make(policy, stop_ids=())
    carried = [make_rollout(2, 30, limit=30)]
    generator.admit(carried)
    decode(generator, by_key(carried), 5)
    monkeypatch.setattr(generator.engine, "reset_cache", lambda: None)
    change(policy)
    generator.load_weights(1)
    generator.admit([make_rollout(3, 4)])
    with pytest.raises(ModelError, match="log-probs of draw 2 at version 1 differ"):
        generator.decode(4)


def test_a_kept_cache_is_really_kept_over_an_update_and_new_responses_do_not_find_it() -> None:
    """The new weights read keys and values of the old ones, so that the log-probs are those of no single policy."""
    subject = SUBJECTS["vllm, carried cache kept"]
    policy = subject.make_policy()
    generator = subject.make(policy, stop_ids=())
    carried = [make_rollout(0, 40, limit=9), make_rollout(1, 47, limit=9)]
    generator.admit(carried)
    decode(generator, by_key(carried), 5)
    old_policy = copy.deepcopy(policy)
    change(policy)
    generator.load_weights(1)
    # The prompt of a carried response, whose keys and values are old.
    fresh = Rollout(RolloutKey(2, 0), Prompt(2, carried[1].prompt.token_ids, 9))
    generator.admit([fresh])
    decode_all(generator, [*carried, fresh], 9)
    for rollout in carried:
        assert rollout.versions == [0] * 5 + [1] * 4
        new, old = forward_logprobs(policy, rollout), forward_logprobs(old_policy, rollout)
        assert rollout.behaviour_logprobs[:5] == pytest.approx(old[:5], abs=MEAN_GAP)
        for expected in (new, old):
            gaps = zip(rollout.behaviour_logprobs[5:], expected[5:], strict=True)
            assert max(abs(one - other) for one, other in gaps) > 1e-3
    assert_sampled_from(policy, [fresh])


def test_the_policys_own_logprobs_of_a_batch_are_those_of_a_forward_pass() -> None:
    policy = SUBJECTS["vllm"].make_policy()
    generator = SUBJECTS["vllm"].make(policy)
    rollouts = make_rollouts()[:6]
    generator.admit(rollouts)
    decode_all(generator, rollouts, 8)
    change(policy)
    groups = [Group(rollout.prompt, [rollout], admitted_step=0) for rollout in rollouts]
    batch = RolloutBatch.from_groups(groups, version=1)
    logprobs = generator.policy_logprobs(batch)
    assert logprobs.shape == batch.behaviour_logprobs.shape
    for row, rollout in zip(logprobs.tolist(), rollouts, strict=True):
        length = len(rollout.token_ids)
        assert row[:length] == pytest.approx(forward_logprobs(policy, rollout), abs=1e-5)
        assert not any(row[length:])
    assert (logprobs - batch.behaviour_logprobs).abs().max() > 0.1


# --- refusals


def test_rows_whose_logits_are_not_finite_are_named_and_nothing_stays_in_flight() -> None:
    policy = SUBJECTS["vllm"].make_policy()
    with torch.no_grad():
        policy.get_input_embeddings().weight[40] = float("nan")
    generator = SUBJECTS["vllm"].make(policy, stop_ids=())
    good = make_rollout(7, 3, limit=9)
    bad = [Rollout(RolloutKey(draw, 0), Prompt(draw, (5, 6, 7, 8, 40, 6), 9)) for draw in (8, 12)]
    generator.admit([good, *bad])
    with pytest.raises(
        NonFiniteError, match=r"NaN or infinite for draws \[8, 12\] at version 0; lower the learning"
    ):
        generator.decode(1)
    assert generator.decode(1) == []
    generator.admit([good])
    decode_all(generator, [good], 9)
    assert_sampled_from(policy_of("vllm"), [good])


def test_what_is_longer_than_vllm_was_started_for_is_refused_at_the_door() -> None:
    generator = SUBJECTS["vllm"].make(policy_of("vllm"))
    with pytest.raises(
        DataError, match=r"draw 3: 200 prompt tokens and a limit of 57 exceed the 256 tokens that vLLM"
    ):
        generator.admit([make_rollout(3, 200, limit=57)])
    rollout = make_rollout(3, 200, limit=56)
    generator.admit([rollout])
    decode_all(generator, [rollout], 64)


def test_a_kept_cache_and_a_prefix_cache_are_refused_together() -> None:
    engine = vllm_engine("llama", VLLM_HEADS, has_prefix_cache=True)
    with pytest.raises(
        ConfigError, match="carried_cache 'keep' leaves keys and values of earlier weights in"
    ):
        VLLMGenerator(
            policy_of("vllm"), engine, temperature=1.0, stop_token_ids=(), seed=0, carried_cache="keep"
        )


def test_an_engine_that_samples_nothing_is_given_up() -> None:
    generator = SUBJECTS["vllm"].make(policy_of("vllm"))
    generator.admit([make_rollout(0, 3)])
    generator.engine.abort_all()  # behind its back
    with pytest.raises(PartFailedError, match="vLLM sampled nothing in 100 steps while 1 responses are in"):
        generator.decode(4)


class UnknownForCausalLM(LlamaForCausalLM):
    pass


def test_a_model_that_vllm_does_not_know_is_refused_with_its_reason() -> None:
    model = UnknownForCausalLM(tiny_config())
    message = r"vLLM cannot serve UnknownForCausalLM for 2 responses.*UnknownForCausalLM.*not supported.*use backend"
    with pytest.raises(ModelError, match=message):
        VLLMEngine(model, max_tokens=64, max_requests=2, kv_cache_gib=0.1)


def test_a_model_that_vllm_fails_to_decode_with_is_refused_with_its_reason() -> None:
    policy: Any = tiny_causal_lm()
    engine = VLLMEngine(policy, max_tokens=64, max_requests=2, kv_cache_gib=0.1)
    with pytest.raises(
        ModelError,
        match=r"vLLM cannot decode with LlamaForCausalLM: RuntimeError: .*head_dim=8.*; use backend 'hf'",
    ):
        VLLMGenerator(policy, engine, temperature=1.0, stop_token_ids=(), seed=0)
    assert engine.is_closed


def test_a_cache_too_small_for_one_response_is_refused() -> None:
    policy: Any = policy_of("vllm")
    with pytest.raises(ModelError, match=r"vLLM cannot serve LlamaForCausalLM.*vllm.kv_cache_gib"):
        VLLMEngine(policy, max_tokens=256, max_requests=2, kv_cache_gib=0.00001)


def test_an_engine_that_was_closed_says_so_and_why() -> None:
    first = SUBJECTS["vllm"].make(policy_of("vllm"))
    second = SUBJECTS["vllm, carried cache kept"].make(policy_of("vllm"))
    with pytest.raises(
        PartFailedError, match=r"closed, by close\(\) or by starting another one in the same process"
    ):
        first.load_weights(1)
    second.close()
    second.close()
    assert second.engine.is_closed


def test_starting_vllm_leaves_the_process_as_it_was() -> None:
    environment, states = dict(os.environ), (random.getstate(), torch.get_rng_state())
    set_num_threads = torch.set_num_threads
    policy: Any = policy_of("vllm")
    VLLMEngine(policy, max_tokens=64, max_requests=2, kv_cache_gib=0.1)
    assert dict(os.environ) == environment
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert torch.set_num_threads is set_num_threads
