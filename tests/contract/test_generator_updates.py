"""What an update of the weights does to responses in flight, for every generator that has weights."""

from __future__ import annotations

import copy

import pytest
from generator_subjects import (
    RECOMPUTING,
    SUBJECTS,
    TOLERANCE,
    by_key,
    change,
    decode,
    decode_all,
    forward_logprobs,
    make_rollout,
    policy_of,
)


@pytest.mark.parametrize("name", RECOMPUTING)
def test_after_an_update_a_carried_response_goes_on_under_the_new_weights_and_keeps_its_old_tokens(
    name: str,
) -> None:
    """No key or value of the old weights survives (vllm#9744); versions are recorded per token (slime#2092)."""
    subject, policy = SUBJECTS[name], SUBJECTS[name].make_policy()
    generator = subject.make(policy, stop_ids=())
    rollouts = [make_rollout(0, 4, limit=9), make_rollout(1, 2, limit=9), make_rollout(2, 11, limit=9)]
    generator.admit(rollouts)
    decode(generator, by_key(rollouts), 5)
    before = copy.deepcopy(rollouts)
    change(policy)
    generator.load_weights(1)
    rollouts.append(make_rollout(3, 6, limit=9))
    generator.admit(rollouts[3:])
    decode_all(generator, rollouts, 2)
    for rollout, old in zip(rollouts[:3], before, strict=True):
        assert rollout.token_ids[:5] == old.token_ids
        assert rollout.behaviour_logprobs[:5] == old.behaviour_logprobs
        assert rollout.versions == [0] * 5 + [1] * 4
    largest_change = 0.0
    for rollout in rollouts:
        num_old = rollout.versions.count(0)
        fresh = forward_logprobs(policy, rollout)
        assert rollout.behaviour_logprobs[num_old:] == pytest.approx(fresh[num_old:], abs=TOLERANCE)
        stale = forward_logprobs(policy_of(name), rollout)
        gaps = [abs(one - other) for one, other in zip(fresh, stale, strict=True)]
        largest_change = max(largest_change, *gaps)
    assert largest_change > 0.1, "the update changes the policy, else this test says nothing"


PREFIX_KINDS = ["prefix log-probs", "gemma3", "mistral", "gpt2", "llama with LoRA", "batch-invariant"]


@pytest.mark.parametrize("name", PREFIX_KINDS)
def test_a_carried_response_brings_the_logprobs_of_its_tokens_under_the_new_weights_once(name: str) -> None:
    subject, policy = SUBJECTS[name], SUBJECTS[name].make_policy()
    generator = subject.make(policy, stop_ids=(), has_prefix_logprobs=True)
    # A prompt of one token: its carried tokens fill the whole prefill.
    carried = [make_rollout(0, 1, limit=11), make_rollout(1, 8, limit=11), make_rollout(2, 3, limit=11)]
    generator.admit(carried)
    assert all(chunk.prefix_logprobs is None for chunk in decode(generator, by_key(carried), 5))
    change(policy)
    generator.load_weights(1)
    fresh = make_rollout(3, 5, limit=11)
    generator.admit([fresh])
    rollouts = [*carried, fresh]
    chunks = {chunk.key.draw_id: chunk for chunk in decode(generator, by_key(rollouts), 2)}
    assert chunks[3].prefix_logprobs is None
    for rollout in carried:
        expected = forward_logprobs(policy, rollout)
        assert chunks[rollout.key.draw_id].prefix_logprobs == pytest.approx(expected[:5], abs=TOLERANCE)
        # What is trained on: every token's log-prob under the newest policy that has read it.
        assert rollout.proximal_logprobs == pytest.approx(expected, abs=TOLERANCE)
        old = forward_logprobs(policy_of(name), rollout)
        assert rollout.behaviour_logprobs[:5] == pytest.approx(old[:5], abs=TOLERANCE)
        assert max(abs(a - b) for a, b in zip(expected[:5], old[:5], strict=True)) > 1e-3
    assert fresh.proximal_logprobs == fresh.behaviour_logprobs
    assert all(chunk.prefix_logprobs is None for chunk in decode(generator, by_key(rollouts), 2))


def test_without_the_option_no_prefix_is_reported_and_proximal_logprobs_are_those_of_the_behaviour() -> None:
    policy = SUBJECTS["llama"].make_policy()
    generator = SUBJECTS["llama"].make(policy, stop_ids=())
    rollouts = [make_rollout(0, 4)]
    generator.admit(rollouts)
    decode(generator, by_key(rollouts), 5)
    change(policy)
    generator.load_weights(1)
    assert all(chunk.prefix_logprobs is None for chunk in decode(generator, by_key(rollouts), 3))
    assert rollouts[0].proximal_logprobs == rollouts[0].behaviour_logprobs


def test_a_kept_cache_is_really_kept_over_an_update_and_only_what_follows_differs() -> None:
    """The new weights read keys and values of the old ones, so that the log-probs are those of no single policy."""
    subject = SUBJECTS["carried cache kept"]
    policy = subject.make_policy()
    generator = subject.make(policy, stop_ids=(), has_prefix_logprobs=True)
    carried = [make_rollout(0, 4, limit=9), make_rollout(1, 7, limit=9)]
    generator.admit(carried)
    decode(generator, by_key(carried), 5)
    change(policy)
    generator.load_weights(1)
    fresh = make_rollout(2, 6, limit=9)
    generator.admit([fresh])
    rollouts = [*carried, fresh]
    assert all(chunk.prefix_logprobs is None for chunk in decode(generator, by_key(rollouts), 4)), (
        "no prefill"
    )
    for rollout in carried:
        assert rollout.versions == [0] * 5 + [1] * 4
        new, old = forward_logprobs(policy, rollout), forward_logprobs(policy_of("llama"), rollout)
        assert rollout.behaviour_logprobs[:5] == pytest.approx(old[:5], abs=TOLERANCE)
        for expected in (new, old):
            gaps = zip(rollout.behaviour_logprobs[5:], expected[5:], strict=True)
            assert max(abs(one - other) for one, other in gaps) > 1e-3
    # A row that came after the update shares the cache with them, and nothing else.
    decode_all(generator, [fresh], 4)
    assert fresh.behaviour_logprobs == pytest.approx(forward_logprobs(policy, fresh), abs=TOLERANCE)
    assert fresh.versions == [1] * 9
