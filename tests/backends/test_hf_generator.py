"""The embedded generator against unbatched forward passes of the same model."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCAB_SIZE, tiny_causal_lm

from oppo_kit.backends.forward import response_logprobs
from oppo_kit.backends.hf_generator import HFGenerator
from oppo_kit.errors import DataError, ModelError, NonFiniteError
from oppo_kit.ops.batching import pad_prompts_and_responses
from oppo_kit.ops.noise import gumbel_noise, stream_key, token_keys
from oppo_kit.types import Prompt, Rollout, RolloutKey

KINDS = ("llama", "qwen2", "mistral", "gpt2", "gpt_neox", "gemma", "opt")
STOP_ID = 2


def make_rollout(draw_id: int, num_prompt_tokens: int, limit: int = 12) -> Rollout:
    ids = tuple((draw_id * 17 + 5 * index) % VOCAB_SIZE for index in range(num_prompt_tokens))
    return Rollout(RolloutKey(draw_id, 0), Prompt(draw_id, ids, limit))


def decode_all(generator: HFGenerator, rollouts: list[Rollout], max_tokens: int) -> None:
    by_key = {rollout.key: rollout for rollout in rollouts}
    while generator.num_live:
        for chunk in generator.decode(max_tokens):
            by_key[chunk.key].append(chunk, base_tick=0)


@torch.no_grad()
def sample_alone(model, rollout: Rollout, *, temperature: float, seed: int) -> tuple[list[int], list[float]]:
    """The oracle: one row, no cache, no padding, the full context at every token."""
    context = list(rollout.prompt.token_ids)
    token_ids, logprobs = [], []
    key = stream_key(seed, *rollout.key)
    while len(token_ids) < rollout.prompt.max_new_tokens and (not token_ids or token_ids[-1] != STOP_ID):
        logits = model(torch.tensor([context + token_ids])).logits[0, -1] / temperature
        all_logprobs = logits.log_softmax(-1)
        noise = gumbel_noise(token_keys([key], [len(token_ids)], 1)[0], VOCAB_SIZE)[0]
        token_ids.append(int((all_logprobs + noise).argmax()))
        logprobs.append(float(all_logprobs[token_ids[-1]]))
    return token_ids, logprobs


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_enter_and_leave_sample_what_they_would_sample_alone(kind: str) -> None:
    model = tiny_causal_lm(kind)
    generator = HFGenerator(model, temperature=0.8, stop_token_ids=[STOP_ID], seed=3)
    first = [make_rollout(draw, 1 + draw * 2 % 7, limit=3 + draw * 5 % 17) for draw in range(5)]
    late = [make_rollout(draw, 9 - draw % 4) for draw in range(5, 8)]
    generator.admit(first)
    for chunk in generator.decode(4):
        first[chunk.key.draw_id].append(chunk, base_tick=0)
    generator.admit(late)
    decode_all(generator, first + late, 3)
    for rollout in first + late:
        token_ids, logprobs = sample_alone(model, rollout, temperature=0.8, seed=3)
        assert rollout.token_ids == token_ids
        assert rollout.behaviour_logprobs == pytest.approx(logprobs, abs=1e-5)
        assert rollout.finish_reason == ("stop" if token_ids[-1] == STOP_ID else "length")


@pytest.mark.parametrize("max_tokens", [1, 5, 64])
def test_the_chunk_size_changes_no_token(max_tokens: int) -> None:
    results = []
    for size in (max_tokens, 7):
        rollouts = [make_rollout(draw, 1 + draw) for draw in range(6)]
        generator = HFGenerator(tiny_causal_lm(), temperature=1.0, stop_token_ids=[STOP_ID], seed=0)
        generator.admit(rollouts)
        decode_all(generator, rollouts, size)
        results.append(rollouts)
    for one, other in zip(*results, strict=True):
        assert one.token_ids == other.token_ids
        assert one.behaviour_logprobs == pytest.approx(other.behaviour_logprobs, abs=1e-5)


def test_behaviour_logprobs_are_those_of_the_training_forward_also_at_a_temperature() -> None:
    """Ratio 1 at zero staleness (trl#4159)."""
    model = tiny_causal_lm("qwen2")
    rollouts = [make_rollout(draw, 2 + draw, limit=20) for draw in range(4)]
    generator = HFGenerator(model, temperature=0.6, stop_token_ids=[STOP_ID], seed=1)
    generator.admit(rollouts)
    decode_all(generator, rollouts, 8)
    rows = pad_prompts_and_responses([r.prompt.token_ids for r in rollouts], [r.token_ids for r in rollouts])
    logprobs, _ = response_logprobs(model, rows, temperature=0.6)
    for rollout, row in zip(rollouts, logprobs.tolist(), strict=True):
        assert rollout.behaviour_logprobs == pytest.approx(row[: len(rollout.token_ids)], abs=1e-5)


def test_after_an_update_a_carried_response_goes_on_under_the_new_weights_and_keeps_its_old_tokens() -> None:
    """No key or value of the old weights survives (vllm#9744); versions are recorded per token (slime#2092)."""
    model = tiny_causal_lm()
    generator = HFGenerator(model, temperature=1.0, stop_token_ids=[], seed=0)
    rollouts = [make_rollout(0, 4, limit=9), make_rollout(1, 2, limit=9)]
    generator.admit(rollouts)
    for chunk in generator.decode(5):
        rollouts[chunk.key.draw_id].append(chunk, base_tick=0)
    before = [list(rollout.token_ids) for rollout in rollouts]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.sin(torch.arange(parameter.numel())).reshape(parameter.shape) * 0.05)
    generator.load_weights(1)
    decode_all(generator, rollouts, 2)
    for rollout, kept in zip(rollouts, before, strict=True):
        assert rollout.token_ids[:5] == kept
        assert rollout.versions == [0] * 5 + [1] * 4
        rows = pad_prompts_and_responses([rollout.prompt.token_ids], [rollout.token_ids])
        fresh, _ = response_logprobs(model, rows, temperature=1.0)
        assert rollout.behaviour_logprobs[5:] == pytest.approx(fresh[0, 5:].tolist(), abs=1e-5)


def test_the_learner_may_move_on_while_the_generator_keeps_its_own_copy() -> None:
    model = tiny_causal_lm()
    expected = [make_rollout(0, 3)]
    decode = HFGenerator(tiny_causal_lm(), temperature=1.0, stop_token_ids=[STOP_ID], seed=0)
    decode.admit(expected)
    decode_all(decode, expected, 4)
    generator = HFGenerator(model, temperature=1.0, stop_token_ids=[STOP_ID], seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    rollouts = [make_rollout(0, 3)]
    generator.admit(rollouts)
    decode_all(generator, rollouts, 4)
    assert rollouts[0].token_ids == expected[0].token_ids


def test_a_response_ends_at_its_stop_token_and_no_token_is_spent_after_it() -> None:
    """trl#2387."""
    generator = HFGenerator(tiny_causal_lm(), temperature=1.5, stop_token_ids=range(0, VOCAB_SIZE, 3), seed=0)
    rollouts = [make_rollout(draw, 2, limit=40) for draw in range(12)]
    generator.admit(rollouts)
    decode_all(generator, rollouts, 16)
    assert {rollout.finish_reason for rollout in rollouts} == {"stop"}
    for rollout in rollouts:
        assert rollout.token_ids[-1] % 3 == 0
        assert all(token % 3 for token in rollout.token_ids[:-1])


def test_ticks_count_inside_a_chunk() -> None:
    generator = HFGenerator(tiny_causal_lm(), temperature=1.0, stop_token_ids=[], seed=0)
    generator.admit([make_rollout(0, 2, limit=3), make_rollout(1, 2, limit=7), make_rollout(2, 2, limit=30)])
    ticks = {chunk.key.draw_id: (chunk.last_tick, chunk.finish_reason) for chunk in generator.decode(10)}
    assert ticks == {0: (3, "length"), 1: (7, "length"), 2: (10, None)}


def test_a_response_without_any_budget_ends_empty() -> None:
    generator = HFGenerator(tiny_causal_lm(), temperature=1.0, stop_token_ids=[], seed=0)
    rollout = make_rollout(0, 2, limit=2)
    rollout.token_ids, rollout.behaviour_logprobs, rollout.versions = [5, 6], [-1.0, -1.0], [0, 0]
    generator.admit([rollout])
    [chunk] = generator.decode(4)
    assert (chunk.token_ids, chunk.finish_reason, chunk.last_tick) == ([], "length", 0)
    assert generator.num_live == 0


def test_evicted_rows_disturb_no_other() -> None:
    generator = HFGenerator(tiny_causal_lm(), temperature=1.0, stop_token_ids=[STOP_ID], seed=0)
    rollouts = [make_rollout(draw, 1 + draw) for draw in range(4)]
    generator.admit(rollouts)
    for chunk in generator.decode(2):
        rollouts[chunk.key.draw_id].append(chunk, base_tick=0)
    generator.evict([rollouts[1].key, RolloutKey(99, 0)])
    decode_all(generator, rollouts, 4)
    alone, _ = sample_alone(tiny_causal_lm(), rollouts[2], temperature=1.0, seed=0)
    assert rollouts[2].token_ids == alone
    assert not rollouts[1].is_ended


def test_rows_with_non_finite_logits_are_named() -> None:
    """trl#1941."""
    model = tiny_causal_lm()
    with torch.no_grad():
        model.get_input_embeddings().weight[40] = float("nan")
    generator = HFGenerator(model, temperature=1.0, stop_token_ids=[], seed=0)
    good = Rollout(RolloutKey(7, 0), Prompt(7, (5, 6), 4))
    bad = Rollout(RolloutKey(8, 0), Prompt(8, (40, 6), 4))
    # Tied or not, the output row of token 40 is NaN for everybody, so only untied models name one row.
    assert not model.config.tie_word_embeddings
    generator.admit([good, bad])
    with pytest.raises(
        NonFiniteError, match=r"NaN or infinite for draws \[8\] at version 0; lower the learning"
    ):
        generator.decode(1)


def test_a_limit_beyond_the_context_is_refused_before_anything_is_decoded() -> None:
    """trl#3569."""
    generator = HFGenerator(tiny_causal_lm(), temperature=1.0, stop_token_ids=[], seed=0)
    with pytest.raises(
        DataError, match="200 prompt tokens and a limit of 100 exceed the model's context of 256"
    ):
        generator.admit([Rollout(RolloutKey(0, 0), Prompt(0, (3,) * 200, 100))])


def test_a_recurrent_model_is_refused_instead_of_sampling_from_another_distribution() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    model = MambaForCausalLM(
        MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    with pytest.raises(
        ModelError, match=r"mamba cannot be decoded in a batch of unequal rows: its layers .*; use a"
    ):
        HFGenerator(model, temperature=1.0, stop_token_ids=[], seed=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_probe_leaves_no_trace(kind: str) -> None:
    generator = HFGenerator(tiny_causal_lm(kind), temperature=0.5, stop_token_ids=[STOP_ID], seed=0)
    assert generator.num_live == 0
    assert generator.decode(3) == []


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mistral", {"sliding_window": 5}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("llama", {"tie_word_embeddings": True}),
    ],
)
def test_sliding_windows_and_tied_embeddings_sample_as_they_would_alone(kind: str, settings: dict) -> None:
    model = tiny_causal_lm(kind, **settings)
    generator = HFGenerator(model, temperature=0.9, stop_token_ids=[STOP_ID], seed=5)
    rollouts = [make_rollout(draw, 1 + draw * 3, limit=8 + 6 * draw) for draw in range(4)]
    generator.admit(rollouts)
    decode_all(generator, rollouts, 5)
    for rollout in rollouts:
        token_ids, logprobs = sample_alone(model, rollout, temperature=0.9, seed=5)
        assert rollout.token_ids == token_ids
        assert rollout.behaviour_logprobs == pytest.approx(logprobs, abs=1e-5)
