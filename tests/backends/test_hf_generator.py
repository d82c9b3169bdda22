"""What is special to the embedded generator; what every generator promises stands in ``tests/contract``."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCAB_SIZE, tiny_causal_lm

from oppo_kit.backends import hf_generator
from oppo_kit.backends.forward import response_logprobs
from oppo_kit.backends.hf_generator import HFGenerator
from oppo_kit.backends.sampler import Truncation
from oppo_kit.errors import DataError, ModelError
from oppo_kit.ops.batching import pad_prompts_and_responses
from oppo_kit.types import Prompt, Rollout, RolloutKey

KINDS = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox", "gemma", "gemma3", "opt")
STOP_ID = 2


def make_rollout(draw_id: int, num_prompt_tokens: int, limit: int = 12) -> Rollout:
    ids = tuple((draw_id * 17 + 5 * index) % VOCAB_SIZE for index in range(num_prompt_tokens))
    return Rollout(RolloutKey(draw_id, 0), Prompt(draw_id, ids, limit))


def decode_all(generator: HFGenerator, rollouts: list[Rollout], max_tokens: int) -> None:
    by_key = {rollout.key: rollout for rollout in rollouts}
    while generator.num_live:
        for chunk in generator.decode(max_tokens):
            by_key[chunk.key].append(chunk, base_tick=0)


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


def test_a_window_that_a_model_applies_by_itself_is_refused() -> None:
    """By column, a short row beside a long one would see the window at the long row's end."""
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    config = GPTNeoConfig(
        vocab_size=40,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=32,
    )
    with pytest.raises(
        ModelError, match="gpt_neo cannot be decoded .* it applies its window_size of 32 by column"
    ):
        HFGenerator(GPTNeoForCausalLM(config).eval(), temperature=1.0, stop_token_ids=[], seed=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_probe_leaves_no_trace(kind: str) -> None:
    generator = HFGenerator(tiny_causal_lm(kind), temperature=0.5, stop_token_ids=[STOP_ID], seed=0)
    assert generator.num_live == 0
    assert generator.decode(3) == []


def test_live_responses_are_counted_whether_they_wait_or_are_decoded() -> None:
    generator = HFGenerator(tiny_causal_lm(), temperature=1.0, stop_token_ids=[], seed=0)
    generator.admit([make_rollout(draw, 2, limit=3 + draw) for draw in range(4)])
    assert generator.num_live == 4
    generator.decode(2)
    generator.admit([make_rollout(9, 3)])
    assert generator.num_live == 5
    generator.evict([RolloutKey(3, 0), RolloutKey(9, 0)])
    assert generator.num_live == 3
    generator.decode(2)
    assert generator.num_live == 1
    generator.load_weights(1)
    assert generator.num_live == 1


@pytest.mark.parametrize("ticks_per_read", [1, 4])
def test_truncated_draws_bring_the_logprobs_that_they_were_drawn_with(ticks_per_read: int) -> None:
    model = tiny_causal_lm()
    generator = HFGenerator(
        model,
        temperature=0.8,
        stop_token_ids=[STOP_ID],
        seed=0,
        truncation=Truncation(top_k=3),
        ticks_per_read=ticks_per_read,
    )
    rollouts = [make_rollout(draw, 1 + draw, limit=9 + draw) for draw in range(6)]
    generator.admit(rollouts)
    decode_all(generator, rollouts, 5)
    for rollout in rollouts:
        num_prompt_tokens = len(rollout.prompt.token_ids)
        token_ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=token_ids).logits[0, num_prompt_tokens - 1 : -1] / 0.8
        chosen = token_ids[0, num_prompt_tokens:, None]
        top = logits.log_softmax(-1).topk(3)
        assert (top.indices == chosen).any(-1).all()
        expected = logits.log_softmax(-1).gather(1, chosen)[:, 0]
        assert rollout.behaviour_logprobs == pytest.approx(expected.tolist(), abs=1e-5)
        kept = top.values.logsumexp(-1)
        assert rollout.sampling_logprobs == pytest.approx((expected - kept).tolist(), abs=1e-5)


def test_a_model_whose_decoded_logprobs_are_not_those_of_its_forward_pass_is_refused(monkeypatch) -> None:
    def response_logprobs_of_another_model(policy, rows, *, temperature):
        logprobs, entropy = response_logprobs(policy, rows, temperature=temperature)
        return logprobs - 0.5, entropy

    monkeypatch.setattr(hf_generator, "response_logprobs", response_logprobs_of_another_model)
    with pytest.raises(
        ModelError,
        match=r"LlamaForCausalLM cannot be decoded .*: its decoded log-probs differ from a plain forward .* by 0\.[56]",
    ):
        HFGenerator(tiny_causal_lm(), temperature=1.0, stop_token_ids=[], seed=0)


def test_a_model_that_does_not_take_the_inputs_is_refused_with_what_it_said() -> None:
    model = tiny_causal_lm()

    def forward(input_ids, attention_mask=None, position_ids=None, use_cache=None, cache=None):
        raise ValueError("no masks of four dimensions here")

    model.model.forward = forward
    with pytest.raises(
        ModelError, match="in a batch of unequal rows: ValueError: no masks of four dimensions here; use a"
    ):
        HFGenerator(model, temperature=1.0, stop_token_ids=[], seed=0)


def test_decoding_beside_scorers_has_its_own_number_of_threads_and_leaves_the_callers_as_it_was() -> None:
    seen = []

    class Watched(HFGenerator):
        def _decode(self, max_tokens: int):
            seen.append(torch.get_num_threads())
            if max_tokens == 99:
                raise RuntimeError("stop")
            return super()._decode(max_tokens)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        generator = Watched(
            tiny_causal_lm(), temperature=1.0, stop_token_ids=(2,), seed=0, num_threads_shared=1
        )
        generator.decode(4)
        generator.set_shared(True)
        generator.decode(4)
        with pytest.raises(RuntimeError, match="stop"):
            generator.decode(99)
        assert torch.get_num_threads() == 2
        assert seen == [2, 2, 1, 1], "the probe at the start, then alone, then twice beside scorers"
    finally:
        torch.set_num_threads(before)
