"""One contract for every generator: what ``oppo_kit.protocols.Generator`` promises, for each of them.

The oracle decodes one row at a time: no cache, no padding, no batch; the full context at every token. Points that
need no model hold for the engine's fake too, so that what the engine is tested with keeps the same promises.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
from fakes import FakeGenerator, VirtualClock, stable_hash
from peft import LoraConfig, get_peft_model
from tiny_models import VOCAB_SIZE, tiny_causal_lm
from torch import nn

from oppo_kit.backends.hf_generator import HFGenerator
from oppo_kit.errors import NonFiniteError
from oppo_kit.ops.noise import gumbel_noise, stream_key, token_keys
from oppo_kit.protocols import Generator
from oppo_kit.types import Prompt, Rollout, RolloutKey, TokenChunk

SEED, TEMPERATURE = 3, 0.8
STOP_IDS = tuple(range(2, VOCAB_SIZE, 9))
# Log-probs of one token by cache and by plain forward, float32.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Subject:
    """A generator under test: the model it samples from, and its settings."""

    kind: str = "llama"
    model: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    has_lora: bool = False

    def make_policy(self) -> nn.Module:
        """A fresh one, that a test may change."""
        model = tiny_causal_lm(self.kind, **self.model)
        if not self.has_lora:
            return model
        torch.manual_seed(0)
        config = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj", "down_proj"])
        return get_peft_model(model, config).eval()

    def make(self, policy: nn.Module, *, stop_ids: Sequence[int] = STOP_IDS, **changes: Any) -> HFGenerator:
        """A generator of this policy."""
        settings = {"temperature": TEMPERATURE, "seed": SEED, **self.settings, **changes}
        return HFGenerator(policy, stop_token_ids=stop_ids, **settings)


SUBJECTS = {
    "llama": Subject(),
    "llama with tied embeddings": Subject(model={"tie_word_embeddings": True}),
    "llama with eager attention": Subject(model={"attn_implementation": "eager"}),
    "llama with LoRA": Subject(has_lora=True),
    "qwen2": Subject("qwen2"),
    "qwen2, sliding in one layer": Subject(
        "qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
    "qwen3": Subject("qwen3"),
    "mistral": Subject("mistral", {"sliding_window": 5}),
    "gemma": Subject("gemma"),
    "gemma3": Subject("gemma3"),
    "gpt2": Subject("gpt2"),
    "gpt_neox": Subject("gpt_neox"),
    "opt": Subject("opt"),
    "four ticks a read": Subject(settings={"ticks_per_read": 4}),
    "batch-invariant": Subject(settings={"batch_invariant": True}),
    "carried cache kept": Subject(settings={"carried_cache": "keep"}),
    "prefix log-probs": Subject(settings={"has_prefix_logprobs": True}),
}
RECOMPUTING = sorted(set(SUBJECTS) - {"carried cache kept"})


@cache
def policy_of(name: str) -> nn.Module:
    """Shared by the tests that leave it as it is."""
    return SUBJECTS[name].make_policy()


def make_generator(name: str, *, has_stops: bool = True) -> Generator:
    if name == "fake":
        return FakeGenerator(
            (lambda draw, sample: 1 + stable_hash(draw, sample) % 15) if has_stops else lambda *_: 10_000,
            VirtualClock(),
        )
    return SUBJECTS[name].make(policy_of(name), stop_ids=STOP_IDS if has_stops else ())


# Bookkeeping does not depend on the family of the model: these are the ways through the generator.
WAYS = [
    "llama",
    "llama with LoRA",
    "gemma3",
    "gpt2",
    "four ticks a read",
    "batch-invariant",
    "carried cache kept",
    "prefix log-probs",
]
every_hf_generator = pytest.mark.parametrize("name", SUBJECTS)
every_way = pytest.mark.parametrize("name", WAYS)
every_way_and_the_fake = pytest.mark.parametrize("name", ["fake", *WAYS])


def make_rollout(draw_id: int, num_prompt_tokens: int, limit: int = 12, sample_index: int = 0) -> Rollout:
    ids = tuple((draw_id * 17 + 5 * index) % VOCAB_SIZE for index in range(num_prompt_tokens))
    return Rollout(RolloutKey(draw_id, sample_index), Prompt(draw_id, ids, limit))


def make_rollouts() -> list[Rollout]:
    """Unequal prompts and limits; two samples of one draw."""
    rollouts = [make_rollout(draw, 1 + draw * 5 % 13, limit=3 + draw * 5 % 17) for draw in range(7)]
    return [*rollouts, make_rollout(6, 5, limit=16, sample_index=1)]


def decode(generator: Generator, live: dict[RolloutKey, Rollout], max_tokens: int) -> list[TokenChunk]:
    """One call; whatever holds for every call of every generator is checked here."""
    chunks = generator.decode(max_tokens)
    assert sorted(chunk.key for chunk in chunks) == sorted(live), "one chunk per live rollout"
    for chunk in chunks:
        rollout = live[chunk.key]
        remaining = rollout.remaining_tokens
        num_tokens = len(chunk.token_ids)
        assert num_tokens == len(chunk.behaviour_logprobs) <= min(remaining, max_tokens)
        assert all(logprob <= 0 for logprob in chunk.behaviour_logprobs)
        # Every live row advances at every tick, so that a chunk's tokens are those of ticks 1, 2, …
        assert chunk.last_tick == num_tokens
        if chunk.finish_reason is None:
            assert num_tokens == max_tokens < remaining
        elif chunk.finish_reason == "length":
            assert num_tokens == remaining
        rollout.append(chunk, base_tick=0)
        if chunk.finish_reason is not None:
            del live[chunk.key]
    return chunks


def by_key(rollouts: Sequence[Rollout]) -> dict[RolloutKey, Rollout]:
    return {rollout.key: rollout for rollout in rollouts if not rollout.is_ended}


def decode_all(generator: Generator, rollouts: Sequence[Rollout], max_tokens: int) -> None:
    live = by_key(rollouts)
    while live:
        decode(generator, live, max_tokens)
    assert generator.decode(max_tokens) == []


def assert_same(rollouts: Sequence[Rollout], expected: Sequence[Rollout]) -> None:
    for one, other in zip(rollouts, expected, strict=True):
        assert one.key == other.key
        assert one.token_ids == other.token_ids
        assert one.behaviour_logprobs == pytest.approx(other.behaviour_logprobs, abs=TOLERANCE)
        assert one.finish_reason == other.finish_reason


def uninterrupted(name: str) -> list[Rollout]:
    rollouts = make_rollouts()
    generator = make_generator(name)
    generator.admit(rollouts)
    decode_all(generator, rollouts, 64)
    return rollouts


@torch.no_grad()
def next_logprobs(policy: nn.Module, token_ids: list[int], temperature: float = TEMPERATURE) -> torch.Tensor:
    return (policy(input_ids=torch.tensor([token_ids])).logits[0, -1] / temperature).log_softmax(-1)


def sample_alone(policy: nn.Module, rollout: Rollout, stop_ids: Sequence[int] = STOP_IDS) -> Rollout:
    """The oracle."""
    alone = Rollout(rollout.key, rollout.prompt)
    key = stream_key(SEED, *rollout.key)
    while not alone.is_ended:
        logprobs = next_logprobs(policy, [*rollout.prompt.token_ids, *alone.token_ids])
        noise = gumbel_noise(token_keys([key], [len(alone.token_ids)], 1)[0], VOCAB_SIZE)[0]
        alone.token_ids.append(int((logprobs + noise).argmax()))
        alone.behaviour_logprobs.append(float(logprobs[alone.token_ids[-1]]))
        if alone.token_ids[-1] in stop_ids:
            alone.finish_reason = "stop"
        elif not alone.remaining_tokens:
            alone.finish_reason = "length"
    return alone


@torch.no_grad()
def forward_logprobs(policy: nn.Module, rollout: Rollout) -> list[float]:
    """Of all response tokens, by one plain forward pass over this row alone."""
    num_prompt_tokens = len(rollout.prompt.token_ids)
    token_ids = [*rollout.prompt.token_ids, *rollout.token_ids]
    logits = policy(input_ids=torch.tensor([token_ids])).logits[0, num_prompt_tokens - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0].tolist()


@torch.no_grad()
def change(policy: nn.Module) -> None:
    for parameter in policy.parameters():
        parameter.add_(torch.sin(torch.arange(parameter.numel())).reshape(parameter.shape) * 0.05)


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


@pytest.mark.parametrize("name", ["fake", *SUBJECTS])
def test_neither_chunk_size_nor_order_of_admission_changes_a_token(name: str) -> None:
    expected = uninterrupted(name)
    for max_tokens, order in ((1, 1), (5, -1)):
        rollouts = make_rollouts()
        generator = make_generator(name)
        generator.admit(rollouts[::order])
        decode_all(generator, rollouts, max_tokens)
        assert_same(rollouts, expected)


@every_way_and_the_fake
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
    generator = SUBJECTS[name].make(policy_of(name), stop_ids=[2], temperature=3.0)
    generator.admit(rollouts)
    decode_all(generator, rollouts, 7)
    for rollout in rollouts:
        assert rollout.token_ids.count(2) == (rollout.finish_reason == "stop")
        assert (rollout.token_ids[-1] == 2) == (rollout.finish_reason == "stop")
    assert any(0 in rollout.token_ids[:-1] for rollout in rollouts), "some response should hold the pad token"
    for rollout in rollouts[:3]:
        noise_free = next_logprobs(policy_of(name), [*rollout.prompt.token_ids], 3.0)
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
