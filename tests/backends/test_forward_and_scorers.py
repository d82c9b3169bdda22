"""Log-probs, values and scores against the models' own plain forward, row by row, without padding."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import tiny_causal_lm, tiny_classifier
from transformers import T5Config, T5ForConditionalGeneration

from oppo_kit.backends.forward import (
    cache_keyword,
    probe_causal_model,
    response_logprobs,
    sequence_scores,
    token_values,
)
from oppo_kit.backends.hf_scorer import HFReferenceScorer, HFRewardScorer
from oppo_kit.build import add_adapter, frozen_reference
from oppo_kit.config import LoraSettings, TrainConfig
from oppo_kit.errors import ModelError
from oppo_kit.ops.batching import pad_prompts_and_responses
from oppo_kit.types import Prompt, Rollout, RolloutKey

KINDS = ("llama", "qwen2", "mistral", "gpt2", "gpt_neox", "gemma", "opt")
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17]]
RESPONSES = [[20, 21, 2], [30, 31, 32, 33, 34, 35, 2], [40], []]


def make_rollouts() -> list[Rollout]:
    return [
        Rollout(
            RolloutKey(i, 0), Prompt(i, tuple(prompt), 16), token_ids=list(response), finish_reason="stop"
        )
        for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True))
    ]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_padded_rows_have_the_logprobs_entropy_and_values_of_unpadded_ones(kind: str) -> None:
    """trl#469: padding must change nothing."""
    model, critic = tiny_causal_lm(kind), tiny_classifier(kind)
    rows = pad_prompts_and_responses(PROMPTS, RESPONSES)
    logprobs, entropy = response_logprobs(model, rows, temperature=0.7)
    values = token_values(critic, rows)
    for index, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        ids = torch.tensor([prompt + response])
        expected = (model(ids).logits[0] / 0.7).log_softmax(-1)
        hidden = getattr(critic, critic.base_model_prefix)(ids).last_hidden_state
        own_values = critic.score(hidden)[0, :, 0]
        for position, token in enumerate(response):
            predictor = len(prompt) - 1 + position
            assert float(logprobs[index, position]) == pytest.approx(
                float(expected[predictor, token]), abs=1e-5
            )
            own_entropy = float(-(expected[predictor].exp() * expected[predictor]).sum())
            assert float(entropy[index, position]) == pytest.approx(own_entropy, abs=1e-4)
            assert float(values[index, position]) == pytest.approx(float(own_values[predictor]), abs=1e-5)
        assert not logprobs[index, len(response) :].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_score_depends_neither_on_the_batch_nor_on_what_pad_and_eos_are(kind: str) -> None:
    """transformers#35352: with pad == eos a classifier's own pooling scores one token early."""
    plain = tiny_classifier(kind)
    same = tiny_classifier(kind, pad_token_id=2, eos_token_id=2)
    rollouts = make_rollouts()
    scores = HFRewardScorer(copy.deepcopy(plain)).score(rollouts)
    assert HFRewardScorer(same).score(rollouts) == scores
    assert HFRewardScorer(copy.deepcopy(plain), batch_tokens=1).score(rollouts) == pytest.approx(
        scores, abs=1e-5
    )
    for rollout, score in zip(rollouts, scores, strict=True):
        ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids]])
        assert score == pytest.approx(float(plain(ids).logits[0, 0]), abs=1e-5)


def test_reference_logprobs_have_one_number_a_token_and_none_for_an_empty_response() -> None:
    scores = HFReferenceScorer(tiny_causal_lm(), temperature=1.0).score(make_rollouts())
    assert [len(score) for score in scores] == [3, 7, 1, 0]


def test_a_lora_reference_shares_its_tensors_with_the_base_and_never_sees_the_adapter() -> None:
    base = tiny_causal_lm()
    expected = HFReferenceScorer(copy.deepcopy(base), temperature=1.0).score(make_rollouts())
    reference = frozen_reference(TrainConfig(actor_lora={"r": 4}), base)
    policy = add_adapter(base, LoraSettings(r=4))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    own = {parameter.data_ptr() for parameter in policy.parameters()}
    assert {parameter.data_ptr() for parameter in reference.parameters()} <= own
    scores = HFReferenceScorer(reference, temperature=1.0).score(make_rollouts())
    for one, other in zip(scores, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    rows = pad_prompts_and_responses(PROMPTS, RESPONSES)
    adapted, _ = response_logprobs(policy, rows, temperature=1.0)
    assert float((adapted[0, 0] - expected[0][0]).abs()) > 1e-3
    assert any(parameter.requires_grad for parameter in policy.parameters())


def test_soft_capped_logits_pass_the_probe_and_are_capped() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = dict(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    config = Gemma2Config(**sizes, num_key_value_heads=2, head_dim=8, final_logit_softcapping=3.0)
    model = Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=2.0)
    probe_causal_model(model)
    rows = pad_prompts_and_responses([[5, 6]], [[7, 8, 9]])
    with torch.no_grad():
        logprobs, _ = response_logprobs(model, rows, temperature=1.0)
        expected = model(rows.input_ids).logits[0].log_softmax(-1)
    assert logprobs[0].tolist() == pytest.approx([float(expected[1 + i, 7 + i]) for i in range(3)], abs=1e-5)


def test_a_model_whose_logits_are_no_function_of_its_hidden_state_is_refused() -> None:
    model = tiny_causal_lm()
    forward = model.forward

    def doubled(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        outputs.logits = outputs.logits * 2
        return outputs

    model.forward = doubled
    with pytest.raises(
        ModelError, match="LlamaForCausalLM cannot be trained: its logits differ .* standard deviations"
    ):
        probe_causal_model(model)


def test_a_module_without_a_score_head_is_no_reward_model() -> None:
    with pytest.raises(
        ModelError, match="has no backbone with a 'score' head; use a decoder's AutoModelForSequence"
    ):
        HFRewardScorer(tiny_causal_lm())
    with pytest.raises(
        ModelError, match="Linear is no transformers model; load it with AutoModelForCausalLM"
    ):
        HFReferenceScorer(torch.nn.Linear(2, 2), temperature=1.0)


def test_a_reward_model_with_two_labels_is_refused() -> None:
    with pytest.raises(
        ModelError,
        match=r"the reward model \(LlamaForSequenceClassification\) gives 2 scores per position.*num_labels=1",
    ):
        HFRewardScorer(tiny_classifier(num_labels=2))


def test_an_encoder_decoder_is_no_policy() -> None:
    config = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(ModelError, match="T5ForConditionalGeneration is an encoder-decoder; only decoders"):
        probe_causal_model(T5ForConditionalGeneration(config))


def test_weights_that_are_not_finite_are_named_as_that() -> None:
    model = tiny_causal_lm()
    with torch.no_grad():
        model.get_output_embeddings().weight[3, 0] = float("nan")
    with pytest.raises(
        ModelError, match=r"the logits of LlamaForCausalLM are not finite.*overflow in torch.float32"
    ):
        probe_causal_model(model)


def test_scores_of_a_classifier_are_read_at_the_last_token_of_each_row() -> None:
    classifier = tiny_classifier()
    rows = pad_prompts_and_responses([[5], [6, 7, 8]], [[9], [10, 11]])
    longer = pad_prompts_and_responses([[5], [6, 7, 8]], [[9], [10, 11, 12]])
    with torch.no_grad():
        one, other = sequence_scores(classifier, rows), sequence_scores(classifier, longer)
    assert float(one[0]) == pytest.approx(float(other[0]), abs=1e-6)
    assert abs(float(one[1] - other[1])) > 1e-4


def test_the_cache_keyword_is_the_one_that_the_model_takes() -> None:
    assert cache_keyword(tiny_causal_lm()) in ("cache", "past_key_values")

    class Older(torch.nn.Module):
        def forward(self, input_ids, past_key_values=None):
            return input_ids

    assert cache_keyword(Older()) == "past_key_values"
