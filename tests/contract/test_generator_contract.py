"""One contract for every generator: what ``oppo_kit.protocols.Generator`` promises, for each of them.

The oracle decodes one row at a time: no cache, no padding, no batch; the full context at every token. Points that
need no model hold for the engine's fake too, so that what the engine is tested with keeps the same promises.
"""

from __future__ import annotations

from itertools import count

import pytest
import torch
from generator_subjects import (
    STOP_IDS,
    SUBJECTS,
    TOLERANCE,
    assert_same,
    by_key,
    decode,
    decode_all,
    every_hf_generator,
    every_hf_generator_and_the_fake,
    every_hf_way_and_the_fake,
    every_way,
    every_way_and_the_fake,
    make_generator,
    make_rollout,
    make_rollouts,
    next_logprobs,
    policy_of,
    sample_alone,
    uninterrupted,
)
from tiny_models import VOCAB_SIZE, tiny_causal_lm

from oppo_kit.errors import NonFiniteError
from oppo_kit.types import Prompt, Rollout, RolloutKey


@every_hf_generator
def test_rows_that_enter_and_leave_sample_what_they_would_sample_alone(name: str) -> None:
    generator = make_generator(name)
    rollouts = make_rollouts()
    live: dict[RolloutKey, Rollout] = {}
    for wave in (rollouts[:3], rollouts[3:4], rollouts[4:]):
        generator.admit(wave)
        live |= by_key(wave)
        decode(generator, live, 4)
    decode_all(generator, rollouts, 3)
    expected = [sample_alone(policy_of(name), rollout) for rollout in rollouts]
    assert_same(rollouts, expected)
    assert len({len(rollout.token_ids) for rollout in rollouts}) > 3, (
        "the rows should leave at different ticks"
    )
    for rollout in rollouts:
        assert rollout.sampling_logprobs == rollout.behaviour_logprobs, "nothing is truncated"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_at_a_low_temperature_the_tokens_are_those_of_greedy_generate(name: str) -> None:
    """argmax(log p / T + Gumbel) is argmax(log p) where the best token leads by more than T times the noise's range.

    With 23 bits the noise lies in (-2.8, 16.7), so that at T = 0.01 a lead of 0.2 is enough; a row is compared up to
    its first smaller one.
    """
    policy = policy_of(name)
    generator = SUBJECTS[name].make(policy, temperature=0.01)
    rollouts = [make_rollout(draw, 1 + draw * 5 % 13, limit=8) for draw in range(12)]
    generator.admit(rollouts[:8])
    live = by_key(rollouts[:8])
    decode(generator, live, 3)
    generator.admit(rollouts[8:])
    decode_all(generator, rollouts, 5)
    num_compared = 0
    for rollout in rollouts:
        prompt = torch.tensor([rollout.prompt.token_ids])
        greedy = policy.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=8,
            eos_token_id=list(STOP_IDS),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.cat(greedy.logits).topk(2).values
        is_close = [lead <= 0.2 for lead in (best[:, 0] - best[:, 1]).tolist()]
        num_clear = is_close.index(True) if any(is_close) else len(is_close)
        expected = greedy.sequences[0, prompt.shape[1] :].tolist()
        assert rollout.token_ids[:num_clear] == expected[:num_clear]
        if not any(is_close):
            assert len(rollout.token_ids) == len(expected)
        num_compared += num_clear
    assert num_compared >= 15


@every_hf_generator_and_the_fake
def test_neither_chunk_size_nor_order_of_admission_changes_a_token(name: str) -> None:
    expected = uninterrupted(name)
    for max_tokens, order in ((1, 1), (5, -1)):
        rollouts = make_rollouts()
        generator = make_generator(name)
        generator.admit(rollouts[::order])
        decode_all(generator, rollouts, max_tokens)
        assert_same(rollouts, expected)


@every_hf_way_and_the_fake
@pytest.mark.parametrize("is_fresh", [False, True], ids=["same generator", "fresh generator"])
def test_an_evicted_rollout_that_comes_back_with_its_tokens_goes_on_as_if_never_gone(
    name: str, is_fresh: bool
) -> None:
    """Limits count over all stays, and positions go on: neither budget nor noise starts anew."""
    expected = uninterrupted(name)
    rollouts = make_rollouts()
    generator = make_generator(name)
    generator.admit(rollouts)
    live = by_key(rollouts)
    for stay in count():
        decode(generator, live, 2 + stay)
        gone = list(live.values())[::2]
        if not gone:
            break
        generator.evict([rollout.key for rollout in gone])
        if is_fresh:
            generator, gone = make_generator(name), list(live.values())
        generator.admit(gone)
    decode_all(generator, rollouts, 3)
    assert_same(rollouts, expected)
    assert all(len(rollout.token_ids) <= rollout.prompt.max_new_tokens for rollout in rollouts)
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}


@every_way_and_the_fake
def test_ticks_count_inside_a_chunk(name: str) -> None:
    generator = make_generator(name, has_stops=False)
    generator.admit([make_rollout(0, 2, limit=3), make_rollout(1, 2, limit=7), make_rollout(2, 2, limit=30)])
    ticks = {chunk.key.draw_id: (chunk.last_tick, chunk.finish_reason) for chunk in generator.decode(10)}
    assert ticks == {0: (3, "length"), 1: (7, "length"), 2: (10, None)}
    [chunk] = generator.decode(10)
    assert (chunk.key.draw_id, chunk.last_tick, chunk.finish_reason) == (2, 10, None)


@every_way
def test_a_response_ends_at_its_stop_token_and_no_token_is_spent_after_it(name: str) -> None:
    """trl#2387."""
    generator = SUBJECTS[name].make(policy_of(name), stop_ids=range(0, VOCAB_SIZE, 3), temperature=1.5)
    rollouts = [make_rollout(draw, 2, limit=80) for draw in range(12)]
    generator.admit(rollouts)
    decode_all(generator, rollouts, 16)
    assert {rollout.finish_reason for rollout in rollouts} == {"stop"}
    for rollout in rollouts:
        assert rollout.token_ids[-1] % 3 == 0
        assert all(token % 3 for token in rollout.token_ids[:-1])


@every_way
def test_a_stop_token_at_the_limit_is_a_stop(name: str) -> None:
    [expected] = [r for r in uninterrupted(name) if r.finish_reason == "stop" and len(r.token_ids) > 1][:1]
    prompt = expected.prompt
    rollout = Rollout(expected.key, Prompt(prompt.draw_id, prompt.token_ids, len(expected.token_ids)))
    generator = make_generator(name)
    generator.admit([rollout])
    decode_all(generator, [rollout], 3)
    assert (rollout.token_ids, rollout.finish_reason) == (expected.token_ids, "stop")


@every_way_and_the_fake
def test_a_response_without_any_budget_ends_empty(name: str) -> None:
    generator = make_generator(name, has_stops=False)
    rollout, other = make_rollout(0, 2, limit=2), make_rollout(1, 3, limit=4)
    rollout.token_ids, rollout.behaviour_logprobs, rollout.versions = [5, 6], [-1.0, -1.0], [0, 0]
    generator.admit([rollout, other])
    chunks = {chunk.key.draw_id: chunk for chunk in generator.decode(4)}
    assert (chunks[0].token_ids, chunks[0].finish_reason, chunks[0].last_tick) == ([], "length", 0)
    assert (len(chunks[1].token_ids), chunks[1].finish_reason, chunks[1].last_tick) == (4, "length", 4)
    assert generator.decode(4) == []


@every_way_and_the_fake
def test_evicted_rows_disturb_no_other_and_unknown_keys_are_ignored(name: str) -> None:
    expected = {rollout.key: rollout for rollout in uninterrupted(name)}
    rollouts = make_rollouts()
    generator = make_generator(name)
    generator.admit(rollouts)
    live = by_key(rollouts)
    decode(generator, live, 2)
    evicted = [key for index, key in enumerate(live) if index % 3 == 1]
    assert evicted
    generator.evict([*evicted, RolloutKey(99, 0), RolloutKey(2, 7)])
    late = make_rollout(11, 4)
    generator.admit([late])
    generator.evict([late.key])  # before it was ever decoded
    kept = [rollout for rollout in rollouts if rollout.key not in evicted]
    decode_all(generator, kept, 3)
    assert_same(kept, [expected[rollout.key] for rollout in kept])
    assert not any(rollout.is_ended for rollout in rollouts if rollout.key in evicted)
    assert late.token_ids == []


@every_way_and_the_fake
def test_every_token_carries_the_version_that_sampled_it(name: str) -> None:
    generator = make_generator(name, has_stops=False)
    rollouts = [make_rollout(0, 4, limit=9), make_rollout(1, 2, limit=6), make_rollout(2, 3, limit=3)]
    generator.admit(rollouts)
    live = by_key(rollouts)
    decode(generator, live, 4)
    generator.load_weights(1)
    decode(generator, live, 2)
    generator.load_weights(5)
    late = make_rollout(7, 2, limit=2)
    generator.admit([late])
    decode_all(generator, [*rollouts, late], 2)
    assert [rollout.versions for rollout in (*rollouts, late)] == [
        [0, 0, 0, 0, 1, 1, 5, 5, 5],
        [0, 0, 0, 0, 1, 1],
        [0, 0, 0],
        [5, 5],
    ]


@pytest.mark.parametrize(
    "name", ["llama", "four ticks a read", "batch-invariant", "carried cache kept", "prefix log-probs"]
)
def test_rows_with_non_finite_logits_are_named_and_the_others_can_come_back(name: str) -> None:
    """trl#1941. Tied or not, the output row of token 40 is NaN for everybody, so only untied models name one row."""
    policy = SUBJECTS[name].make_policy()
    assert not policy.config.tie_word_embeddings
    with torch.no_grad():
        policy.get_input_embeddings().weight[40] = float("nan")
    generator = SUBJECTS[name].make(policy, stop_ids=())
    good = [make_rollout(7, 3, limit=9), make_rollout(9, 6, limit=9)]
    bad = [Rollout(RolloutKey(draw, 0), Prompt(draw, (5, 6, 7, 8, 40, 6), 9)) for draw in (8, 12)]
    generator.admit(good)
    decode(generator, by_key(good), 2)
    generator.admit(bad)
    with pytest.raises(
        NonFiniteError, match=r"NaN or infinite for draws \[8, 12\] at version 0; lower the learning"
    ):
        generator.decode(1)
    assert generator.decode(1) == []
    # Four short rows: two of them come to where the bad ones were, whose keys and values are NaN from column 4 on.
    good += [make_rollout(draw, 1, limit=9) for draw in (10, 11)]
    generator.admit(good)
    decode_all(generator, good, 3)
    assert_same(good, [sample_alone(policy_of("llama"), rollout, ()) for rollout in good])


@every_way
def test_pad_and_eos_tokens_are_ordinary_in_a_prompt_and_pad_is_ordinary_in_a_response(name: str) -> None:
    """Only a sampled stop token ends a response; no token id stands for absence. Pad and EOS may be one token."""
    rollouts = [
        Rollout(RolloutKey(draw, 0), Prompt(draw, ids, 40))
        for draw, ids in enumerate(((2, 2), (0, 7, 0), (2,), (9, 0, 2), (0, 0, 0, 0), (0,)))
    ]
    generator = SUBJECTS[name].make(
        policy_of(name), stop_ids=[2], temperature=SUBJECTS[name].high_temperature
    )
    generator.admit(rollouts)
    decode_all(generator, rollouts, 7)
    for rollout in rollouts:
        assert rollout.token_ids.count(2) == (rollout.finish_reason == "stop")
        assert (rollout.token_ids[-1] == 2) == (rollout.finish_reason == "stop")
    assert any(0 in rollout.token_ids[:-1] for rollout in rollouts), "some response should hold the pad token"
    for rollout in rollouts[:3]:
        noise_free = next_logprobs(
            policy_of(name), [*rollout.prompt.token_ids], SUBJECTS[name].high_temperature
        )
        assert rollout.behaviour_logprobs[0] == pytest.approx(
            float(noise_free[rollout.token_ids[0]]), abs=TOLERANCE
        )


def test_a_pad_token_that_is_the_eos_token_changes_nothing() -> None:
    expected = [sample_alone(policy_of("llama"), rollout, [2]) for rollout in make_rollouts()]
    policy = tiny_causal_lm(pad_token_id=2)
    assert policy.config.pad_token_id == policy.config.eos_token_id == 2
    rollouts = make_rollouts()
    generator = SUBJECTS["llama"].make(policy, stop_ids=[2])
    generator.admit(rollouts)
    decode_all(generator, rollouts, 5)
    assert_same(rollouts, expected)
