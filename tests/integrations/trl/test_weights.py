"""The generator samples by the weights that are trained, whatever a trainer has hung onto their model."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_causal_lm
from torch import nn
from trl_trainers import make_trainer, overlap_class, watched

from oppo_kit.backends.hf_generator import HFGenerator
from oppo_kit.integrations.trl.weights import bare_twin, generator_dtype
from oppo_kit.types import Prompt, Rollout, RolloutKey

LORA = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj", "up_proj"])
MODES = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True},
    "adapter, checkpointing": {"gradient_checkpointing": True, "trainer_arguments": {"peft_config": LORA}},
    "temperature": {"temperature": 0.6, "top_k": 20, "top_p": 0.9},
    "autocast": {"bf16": True},
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("grpo", "plain"),
        ("rloo", "checkpointing"),
        ("grpo", "adapter, checkpointing"),
        ("rloo", "adapter, checkpointing"),
        ("rloo", "temperature"),
        ("grpo", "autocast"),
    ],
)
def test_what_is_sampled_has_the_logprobs_of_the_model_under_training_after_every_update(
    name, mode, tmp_path
) -> None:
    """Stock computes them anew where updates and rounds are not aligned; nothing is carried here."""
    trainer = make_trainer(
        name,
        tmp_path,
        trainer_class=watched(overlap_class(name)),
        overlap={},
        num_iterations=2,
        max_steps=6,
        learning_rate=3e-2,
        **MODES[mode],
    )
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert any(
        not torch.equal(one, other) for one, other in zip(before, trainer.model.parameters(), strict=True)
    )
    tolerance = 0.3 if mode == "autocast" else 1e-4
    assert len(trainer.seen) == 3
    for batch, output in trainer.seen:
        behaviour, stock = batch.behaviour_logprobs, output[trainer._anchor_name]
        if name == "rloo":
            torch.testing.assert_close(behaviour.sum(1), stock, atol=12 * tolerance, rtol=0)
        else:
            difference = (behaviour - stock[:, : behaviour.shape[1]])[batch.response_mask]
            assert difference.abs().max() < tolerance


def test_a_bare_twin_shares_the_weights_and_none_of_the_instances_forwards() -> None:
    model = get_peft_model(tiny_causal_lm("qwen2"), LORA).train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    ids = torch.arange(5)[None]
    expected = model(input_ids=ids).logits
    model.base_model.model.forward = lambda *args, **kwargs: pytest.fail(
        "the trainer's own forward was called"
    )
    twin = bare_twin(model)
    torch.testing.assert_close(twin(input_ids=ids).logits, expected)
    assert not twin.training
    assert model.training
    assert all(one is other for one, other in zip(twin.parameters(), model.parameters(), strict=True))
    assert not any(getattr(module, "gradient_checkpointing", False) for module in twin.modules())
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    embeddings = model.get_input_embeddings(), twin.get_input_embeddings()
    assert [bool(module._forward_hooks) for module in embeddings] == [True, False]


def test_an_output_head_in_float32_over_half_a_backbone_reads_what_it_is_given() -> None:
    model = tiny_causal_lm("qwen2", tie_word_embeddings=False).to(torch.bfloat16)
    head = model.lm_head.float()
    head.forward = lambda states: nn.functional.linear(states.float(), head.weight)
    twin = bare_twin(model)
    assert twin(input_ids=torch.arange(5)[None]).logits.dtype == torch.float32


def test_the_precision_of_decoding_is_the_trainers() -> None:
    assert generator_dtype(bf16=True, fp16=False) == torch.bfloat16
    assert generator_dtype(bf16=False, fp16=True) == torch.float16
    assert generator_dtype(bf16=False, fp16=False) is None


def test_a_generator_in_another_precision_follows_the_weights() -> None:
    model = tiny_causal_lm("qwen2")
    generator = HFGenerator(model, temperature=1.0, stop_token_ids=[2], seed=0, dtype=torch.bfloat16)
    assert {p.dtype for p in generator._module.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in generator._module.buffers() if b.is_floating_point()} == {torch.float32}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    generator.load_weights(1)
    rollout = Rollout(RolloutKey(0, 0), Prompt(0, (5, 6), 3))
    generator.admit([rollout])
    [chunk] = generator.decode(1)
    assert chunk.behaviour_logprobs == pytest.approx([-torch.log(torch.tensor(62.0)).item()], abs=1e-2)
