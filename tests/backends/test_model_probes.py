"""Models that would be scored or trained wrongly without a word are refused when they are given."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny_models import tiny_classifier
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from oppo_kit.backends.forward import check_one_score, context_tokens, probe_causal_model
from oppo_kit.backends.hf_generator import HFGenerator
from oppo_kit.backends.hf_scorer import HFRewardScorer
from oppo_kit.backends.loading import ModelSettings
from oppo_kit.errors import DataError, ModelError
from oppo_kit.types import Prompt, Rollout, RolloutKey

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
DECODER = {**SIZES, "num_key_value_heads": 2}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "rope_theta": 10000.0,
}


def longrope_config(where: str) -> transformers.PreTrainedConfig:
    """Llama has the switch inside its rotary parameters, Phi-3 beside them."""
    if where == "inside":
        rope = {**LONGROPE, "original_max_position_embeddings": 32}
        return transformers.LlamaConfig(**DECODER, num_labels=1, rope_parameters=rope)
    rope = {**LONGROPE, "partial_rotary_factor": 1.0}
    return transformers.Phi3Config(
        **DECODER, num_labels=1, original_max_position_embeddings=32, rope_parameters=rope
    )


@pytest.mark.parametrize("where", ["inside", "beside"])
def test_a_model_with_longrope_is_read_up_to_the_switch_of_its_factors(where) -> None:
    config = longrope_config(where)
    assert context_tokens(config) == ModelSettings(config, None).context_tokens == 32
    scorer = HFRewardScorer(AutoModelForSequenceClassification.from_config(config))
    short = Rollout(RolloutKey(0, 0), Prompt(0, (3,) * 10, 40), token_ids=[5] * 22, finish_reason="stop")
    long = Rollout(RolloutKey(1, 0), Prompt(1, (3,) * 10, 40), token_ids=[5] * 23, finish_reason="stop")
    [alone] = scorer.score([short])
    [beside, _] = scorer.score([short, Rollout(RolloutKey(2, 0), Prompt(2, (3,), 9), finish_reason="stop")])
    assert alone == pytest.approx(beside, abs=1e-6)
    with pytest.raises(DataError, match="draw 1: its 33 tokens exceed the context of 32"):
        scorer.score([short, long])


def test_a_policy_with_longrope_decodes_up_to_the_switch() -> None:
    torch.manual_seed(0)
    generator = HFGenerator(
        AutoModelForCausalLM.from_config(longrope_config("inside")),
        temperature=1.0,
        stop_token_ids=(2,),
        seed=0,
    )
    generator.admit([Rollout(RolloutKey(0, 0), Prompt(0, (3,) * 10, 22))])
    with pytest.raises(DataError, match="exceed the model's context of 32"):
        generator.admit([Rollout(RolloutKey(1, 0), Prompt(1, (3,) * 10, 23))])


def test_other_contexts_are_what_the_config_says() -> None:
    assert context_tokens(transformers.LlamaConfig(**DECODER)) == 256
    assert context_tokens(transformers.BloomConfig(vocab_size=64)) is None


@pytest.mark.parametrize("role", ["reward model", "critic"])
def test_a_classifier_that_looks_ahead_is_refused(role) -> None:
    torch.manual_seed(0)
    gemma = transformers.Gemma3TextConfig(
        **DECODER, head_dim=8, query_pre_attn_scalar=8, use_bidirectional_attention=True, num_labels=1
    )
    bert = transformers.BertConfig(**SIZES, num_labels=1)
    bert_model = AutoModelForSequenceClassification.from_config(bert).eval()
    bert_model.score = torch.nn.Linear(32, 1)
    for model in (AutoModelForSequenceClassification.from_config(gemma).eval(), bert_model):
        with pytest.raises(
            ModelError, match=rf"the {role} \(.*\) is no causal decoder: .* when padding follows"
        ):
            check_one_score(model, role)
    check_one_score(tiny_classifier(), role)


def test_a_classifier_that_cannot_be_read_is_refused_with_the_cause() -> None:
    class Other(torch.nn.Module):
        base_model_prefix = "backbone"

        def __init__(self) -> None:
            super().__init__()
            self.config = tiny_classifier().config
            self.backbone = torch.nn.Linear(4, 4)
            self.score = torch.nn.Linear(4, 1, bias=False)

    with pytest.raises(ModelError, match=r"\(Other\) cannot be read as a decoder: TypeError: .*input_ids"):
        check_one_score(Other(), "reward model")


def test_a_policy_without_a_backbone_of_its_own_is_refused_with_the_cause() -> None:
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        **{**DECODER, "num_hidden_layers": 4},
        head_dim=8,
        attention_chunk_size=8,
        num_local_experts=2,
        intermediate_size_mlp=64,
        interleave_moe_layer_step=1,
    )
    with pytest.raises(ModelError, match="cannot be read apart .AttributeError: .*last_hidden_state"):
        probe_causal_model(AutoModelForCausalLM.from_config(config).eval())
