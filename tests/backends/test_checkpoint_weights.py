"""Weights by the names of a checkpoint: a fresh model that loads them says what the policy says."""

from __future__ import annotations

import pytest
import torch
from generator_subjects import SUBJECTS, change
from tiny_models import VOCAB_SIZE, tiny_causal_lm

from oppo_kit.backends.checkpoint_weights import checkpoint_weights

IDS = torch.tensor([[5 * index % VOCAB_SIZE for index in range(11)]])


@pytest.mark.parametrize("name", ["llama", "llama with tied embeddings", "llama with LoRA", "gpt2"])
@torch.no_grad()
def test_a_fresh_model_with_these_weights_is_the_policy(name: str) -> None:
    policy = SUBJECTS[name].make_policy()
    change(policy)
    fresh = tiny_causal_lm(SUBJECTS[name].kind, seed=9, **SUBJECTS[name].model)
    assert not torch.allclose(fresh(input_ids=IDS).logits, policy(input_ids=IDS).logits, atol=1e-2)
    weights = dict(checkpoint_weights(policy))
    assert weights.keys() == fresh.state_dict().keys()
    fresh.load_state_dict(weights)
    torch.testing.assert_close(
        fresh(input_ids=IDS).logits, policy(input_ids=IDS).logits, atol=1e-4, rtol=1e-4
    )


def test_a_tied_output_head_is_there_under_its_own_name() -> None:
    policy = SUBJECTS["llama with tied embeddings"].make_policy()
    weights = dict(checkpoint_weights(policy))
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


@torch.no_grad()
def test_adapters_count_as_the_forward_pass_counts_them_and_the_policy_is_left_as_it_is() -> None:
    policy = SUBJECTS["llama with LoRA"].make_policy()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    name = "model.layers.0.self_attn.q_proj.weight"
    merged = dict(checkpoint_weights(policy))[name]
    with policy.disable_adapter():
        plain = dict(checkpoint_weights(policy))[name]
    assert not torch.allclose(merged, plain)
    assert torch.equal(
        plain, policy.get_base_model().get_submodule(name.removesuffix(".weight")).base_layer.weight
    )
    policy.merge_adapter()
    assert torch.allclose(dict(checkpoint_weights(policy))[name], merged)
    policy.unmerge_adapter()
    assert before.keys() == policy.state_dict().keys()
    for key, tensor in policy.state_dict().items():
        torch.testing.assert_close(tensor, before[key], atol=1e-5, rtol=1e-5)
