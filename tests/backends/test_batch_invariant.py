"""``batch_invariant``: a response's tokens and log-probs, to the bit, whatever is decoded beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch
from tiny_models import tiny_causal_lm
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from harness.models import resolve_model
from oppo_kit.backends import hf_generator
from oppo_kit.backends.hf_generator import HFGenerator
from oppo_kit.errors import ConfigError, ModelError
from oppo_kit.types import Prompt, Rollout, RolloutKey

# Prompt tokens by row: with the longest, a decode step sees 600 columns; most are short, so that prefill is cheap.
# Rows lie on both sides of multiples of 16, and neighbours have very unequal lengths.
LENGTHS = [7, 593, 15, 31, 300, 16, 3, 64, 480, 33, 8, 127, 17, 1, 400, 48, *range(9, 135, 4)]
LIMITS = [5 + row % 3 for row in range(len(LENGTHS))]
ROWS = range(len(LENGTHS))
Responses = dict[int, tuple[list[int], list[float]]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def policy(name: str):
    """The embedded policy, whose context is 512 tokens, or a model as wide as SmolLM2."""
    if name == "tiny":
        return AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32).eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=2,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=1024,
        )
        return LlamaForCausalLM(config).eval()


@cache
def generator(name: str, is_invariant: bool) -> HFGenerator:
    return HFGenerator(policy(name), temperature=1.0, stop_token_ids=(), seed=0, batch_invariant=is_invariant)


def decode(
    name: str, groups: Sequence[Sequence[int]], *, max_tokens: int = 64, is_invariant: bool = True
) -> Responses:
    """One group of rows after the other, each admitted in its own order."""
    model = policy(name)
    longest = model.config.max_position_embeddings - max(LIMITS)
    responses: Responses = {}
    for group in groups:
        rollouts = {}
        for row in group:
            num_prompt_tokens = min(LENGTHS[row], longest)
            ids = tuple((7 * index + 3 * row) % model.config.vocab_size for index in range(num_prompt_tokens))
            rollouts[row] = Rollout(RolloutKey(row, 0), Prompt(row, ids, LIMITS[row]))
        one = generator(name, is_invariant)
        one.admit(list(rollouts.values()))
        while one.num_live:
            for chunk in one.decode(max_tokens):
                rollouts[chunk.key.draw_id].append(chunk, base_tick=0)
        for row, rollout in rollouts.items():
            responses[row] = (rollout.token_ids, rollout.behaviour_logprobs)
    return responses


@cache
def together(name: str, is_invariant: bool = True) -> Responses:
    """All rows at once."""
    return decode(name, [ROWS], is_invariant=is_invariant)


def rows_that_differ(responses: Responses, expected: Responses) -> list[int]:
    return [row for row, response in responses.items() if response != expected[row]]


COMPANIES = {
    "the same once more": {"groups": [ROWS]},
    "in two halves": {"groups": [ROWS[:24], ROWS[24:]]},
    "in another order, token by token": {"groups": [ROWS[::-1]], "max_tokens": 1},
    "one by one": {"groups": [[row] for row in (0, 1, 3, 6, 13, 40)]},
    "in fives, two tokens at a time": {
        "groups": [ROWS[start : start + 5] for start in (0, 20, 40)],
        "max_tokens": 2,
    },
}


@pytest.mark.parametrize("name", ["tiny", "wide"])
@pytest.mark.parametrize("company", COMPANIES)
def test_a_response_has_the_same_bits_in_any_company(name: str, company: str) -> None:
    assert rows_that_differ(decode(name, **COMPANIES[company]), together(name)) == []


def test_with_more_threads_it_is_refused_instead_of_broken() -> None:
    torch.set_num_threads(2)
    with pytest.raises(
        ConfigError,
        match=r"batch_invariant holds with one thread, and torch uses 2: .*; call torch.set_num_threads",
    ):
        HFGenerator(policy("tiny"), temperature=1.0, stop_token_ids=(), seed=0, batch_invariant=True)


def test_without_it_the_bits_depend_on_the_company() -> None:
    """Else the tests above say nothing. Tokens are the same: the difference is rounding."""
    expected = together("tiny", is_invariant=False)
    halves = decode("tiny", [ROWS[:24], ROWS[24:]], is_invariant=False)
    assert rows_that_differ(halves, expected)
    for row, (token_ids, logprobs) in halves.items():
        assert token_ids == expected[row][0]
        assert logprobs == pytest.approx(expected[row][1], abs=1e-4)


def test_a_model_with_matrices_that_are_not_packed_is_refused() -> None:
    """GPT-2's layers are no linear layers: their rows differ in bits from some width on, which no small probe shows."""
    with pytest.raises(
        ModelError,
        match=r"GPT2LMHeadModel cannot be decoded batch-invariantly: transformer\.h\.0\.attn\.c_attn\.weight",
    ):
        HFGenerator(tiny_causal_lm("gpt2"), temperature=1.0, stop_token_ids=(), seed=0, batch_invariant=True)


def test_a_model_whose_bits_depend_on_the_company_is_refused(monkeypatch) -> None:
    """The probe decodes one row beside another and alone; here it finds other bits."""

    def probe_decode(self, prompts):
        chunks = inner(self, prompts)
        chunks[0].behaviour_logprobs[0] += 1e-6 * len(prompts)
        return chunks

    inner = HFGenerator._probe_decode
    monkeypatch.setattr(hf_generator.HFGenerator, "_probe_decode", probe_decode)
    with pytest.raises(
        ModelError,
        match="LlamaForCausalLM gives a response other bits when it is decoded alone; batch_invariant needs float32",
    ):
        HFGenerator(policy("tiny"), temperature=1.0, stop_token_ids=(), seed=0, batch_invariant=True)
