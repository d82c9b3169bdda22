"""The real SmolLM2-135M through the generator, against one plain forward pass a row; run by ``make test-smollm2``."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.packaged_models import smollm2_policy
from harness.workloads.reviews import ReviewsTask
from oppo_kit.backends.hf_generator import HFGenerator
from oppo_kit.ops.noise import gumbel_noise, stream_key, token_keys
from oppo_kit.types import Prompt, Rollout, RolloutKey

TEMPERATURE, SEED, LIMITS = 0.7, 5, (3, 24, 9, 17, 30, 12)


@pytest.mark.smollm2
@torch.no_grad()
def test_rows_that_enter_and_leave_sample_what_they_would_sample_alone() -> None:
    folder = smollm2_policy()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rollouts = []
    for draw_id, (row, limit) in enumerate(zip(ReviewsTask().train_rows(0), LIMITS, strict=False)):
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        rollouts.append(Rollout(RolloutKey(draw_id, 0), Prompt(draw_id, tuple(ids), limit)))
    generator = HFGenerator(
        model, temperature=TEMPERATURE, stop_token_ids=[tokenizer.eos_token_id], seed=SEED
    )
    generator.admit(rollouts[:4])
    for chunk in generator.decode(5):
        rollouts[chunk.key.draw_id].append(chunk, base_tick=0)
    generator.admit(rollouts[4:])
    while generator.num_live:
        for chunk in generator.decode(7):
            rollouts[chunk.key.draw_id].append(chunk, base_tick=0)
    for rollout in rollouts:
        num_tokens, num_prompt = len(rollout.token_ids), len(rollout.prompt.token_ids)
        logits = model(torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids]])).logits
        logprobs = (logits[0, num_prompt - 1 : -1] / TEMPERATURE).log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        assert rollout.behaviour_logprobs == pytest.approx(chosen.tolist(), abs=1e-4)
        keys = token_keys([stream_key(SEED, *rollout.key)], [0], num_tokens)[:, 0]
        alone = (logprobs + gumbel_noise(keys, logprobs.shape[1])).argmax(-1)
        assert rollout.token_ids == alone.tolist()
        assert rollout.finish_reason == ("length" if num_tokens == rollout.prompt.max_new_tokens else "stop")
