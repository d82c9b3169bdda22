"""Loss, metrics and every gradient of online DPO against TRL's ``OnlineDPOTrainer``, at temperature 1, in float32.

Its ``_generate`` is replaced by fixed responses, its reward by a table; all else is stock.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trl_tiny import EOS, PAD, make_policy, make_tokenizer, require_trl

from algorithms.online_dpo import OnlineDPO, OnlineDPOConfig
from oppo_kit.backends.forward import response_logprobs
from oppo_kit.config import LearnerConfig
from oppo_kit.learner.learner import AccelerateLearner
from oppo_kit.ops.batching import pad_prompts_and_responses
from oppo_kit.types import Group, Prompt, Rollout, RolloutBatch, RolloutKey

TOLERANCE = 1e-4
PROMPTS = [[3, 4, 5], [6, 7, 3], [9, 4, 4]]
# Pairs: the first better; the second better and cut, which the penalty turns into worse; a tie.
SCORES = [[2.0, 1.0], [0.5, 1.0], [0.25, 0.25]]
MIXED = [[[5, 9, EOS], [7, 7, 3, 12]], [[8, EOS], [9, 10, 11, 3]], [[EOS], [4, 5, EOS]]]
FULL = [[[5, 9, 4, EOS], [7, 7, 3, 12]], [[8, 3, 3, EOS], [9, 10, 11, 3]], [[13, 3, 4, EOS], [4, 5, 8, EOS]]]
OF_SCORES = {"objective/scores", "objective/scores_margin", "val/contain_eos_token", "beta"}
OF_LOSS = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"} | {
    "logps/chosen",
    "logps/rejected",
}
# TRL sums these over the padding too, so they can only be compared where there is none.
UNMASKED = {"objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward"}
SETTINGS = [
    {"beta": 0.1, "loss_type": "sigmoid"},
    {"beta": 0.4, "loss_type": "ipo", "missing_eos_penalty": 1.5},
]


def trl_step(
    responses: list[Any], settings: dict[str, Any], folder: Path
) -> tuple[float, dict[str, float], list[Tensor]]:
    """Loss, logged numbers and gradients of TRL's ``training_step``."""
    from datasets import Dataset
    from trl.experimental.online_dpo import OnlineDPOConfig as TrlConfig
    from trl.experimental.online_dpo import OnlineDPOTrainer

    # TRL's rows: all first responses, then all second ones.
    rows = [pair[member] for member in range(2) for pair in responses]
    width = max(map(len, rows))

    class Trainer(OnlineDPOTrainer):
        def _generate(self, model: Any, prompts: Any, images: Any = None) -> Any:
            prompt_ids = torch.tensor(PROMPTS * 2)
            completion_ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
            mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
            return prompt_ids, torch.ones_like(prompt_ids), completion_ids, mask

    trainer = Trainer(
        model=make_policy(0),
        ref_model=make_policy(1),
        reward_funcs=lambda **columns: [pair[member] for member in range(2) for pair in SCORES],
        args=TrlConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            **settings,
        ),
        processing_class=make_tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": ["a", "b", "c"]}),
    )
    loss = trainer.training_step(trainer.model, {"prompt": ["a", "b", "c"]})
    gradients = [parameter.grad for parameter in trainer.model.parameters()]
    return float(loss), {name: values[-1] for name, values in trainer.stats.items() if values}, gradients


def our_step(responses: list[Any], settings: dict[str, Any]) -> tuple[float, dict[str, float], list[Tensor]]:
    """The same of our algorithm under the real learner, in micro-batches of one pair."""
    policy = make_policy(0)
    groups = []
    for draw, (prompt_ids, pair) in enumerate(zip(PROMPTS, responses, strict=True)):
        prompt = Prompt(draw, tuple(prompt_ids), 4)
        rows = pad_prompts_and_responses([prompt_ids] * 2, pair)
        with torch.no_grad():
            behaviour, _ = response_logprobs(policy, rows, temperature=1.0)
            reference, _ = response_logprobs(make_policy(1), rows, temperature=1.0)
        rollouts = []
        for member, token_ids in enumerate(pair):
            logprobs = behaviour[member, : len(token_ids)].tolist()
            scores = {
                "reward": SCORES[draw][member],
                "reference": reference[member, : len(token_ids)].tolist(),
            }
            rollouts.append(
                Rollout(
                    RolloutKey(draw, member),
                    prompt,
                    token_ids,
                    logprobs,
                    [0] * len(token_ids),
                    logprobs,
                    logprobs,
                    finish_reason="stop" if token_ids[-1] == EOS else "length",
                    scores=scores,  # type: ignore[arg-type]
                )
            )
        groups.append(Group(prompt, rollouts, admitted_step=0))
    algorithm = OnlineDPO(OnlineDPOConfig.model_validate(settings))
    batch = algorithm.prepare(RolloutBatch.from_groups(groups, 0))
    config = LearnerConfig(max_grad_norm=None, micro_batch_tokens=1)
    learner = AccelerateLearner(policy, None, config=config, temperature=1.0, num_steps=1)
    gradients: list[Tensor] = []
    learner._optimizer.optimizer.register_step_pre_hook(
        lambda *_: gradients.extend(parameter.grad.clone() for parameter in policy.parameters())
    )
    metrics = learner.update(batch, algorithm) | batch.metrics
    return metrics["loss"], metrics, gradients


@pytest.mark.parametrize("settings", SETTINGS, ids=["sigmoid", "ipo-penalty"])
@pytest.mark.parametrize("responses", [MIXED, FULL], ids=["mixed", "full"])
def test_one_step_is_trls(responses: list[Any], settings: dict[str, Any], tmp_path: Path) -> None:
    require_trl()
    loss, metrics, gradients = trl_step(responses, settings, tmp_path)
    our_loss, our_metrics, our_gradients = our_step(responses, settings)
    assert our_loss == pytest.approx(loss, rel=TOLERANCE)
    assert len(gradients) == len(our_gradients) > 20
    scale = max(float(gradient.abs().max()) for gradient in gradients)
    assert scale > 0.01, "not a comparison of zeros"
    for theirs, ours in zip(gradients, our_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=1e-5 * scale)
    compared = OF_SCORES | OF_LOSS | (UNMASKED if responses is FULL else set())
    assert set(metrics) == OF_SCORES | OF_LOSS | UNMASKED
    for name in compared:
        assert our_metrics[name] == pytest.approx(metrics[name], rel=TOLERANCE, abs=1e-5), name
