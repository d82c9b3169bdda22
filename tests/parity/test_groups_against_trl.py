"""GRPO and RLOO against the real TRL trainers: advantages, loss, gradient and metrics on the same log-probs.

Generation, rewards and the models' forward passes are tables; all else is stock.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from group_batches import make_batch
from torch import Tensor
from trl_tiny import EOS, make_policy, make_tokenizer, require_trl

from algorithms.grpo import GRPO, GRPOConfig
from algorithms.rloo import RLOO, RLOOConfig
from oppo_kit.config import parse_config
from oppo_kit.types import MicroBatch, PolicyOutputs

TOLERANCE = 1e-6
LIMIT = 8
# Two groups of three; the fourth response was cut, the last has no reward.
RESPONSES = [[5, 9, EOS], [EOS], [4, EOS], [7, 3, 5], [6, EOS], [EOS]]
IS_STOPPED = [row[-1] == EOS for row in RESPONSES]
BEHAVIOUR = [[-1.0, -2.0, -0.5], [-0.7], [-1.5, -0.2], [-0.9, -1.1, -0.4], [-2.0, -1.2], [-0.3]]
REFERENCE = [[-1.4, -1.2, -0.5], [-0.2], [-1.5, -0.6], [-0.4, -1.6, -0.4], [-1.0, -1.0], [-0.9]]
POLICY = [[-0.9, -1.6, -0.8], [-0.9], [-1.1, -0.25], [-0.5, -1.4, -0.4], [-2.3, -1.15], [-0.35]]
REWARDS = [1.0, 4.0, 1.0, -2.0, 2.0, None]


def padded(rows: list[list[float]]) -> Tensor:
    return torch.tensor([[*row, *[0.0] * (3 - len(row))] for row in rows])


def trl_trainer(name: str, folder: Path, settings: dict[str, Any], beta: float) -> Any:
    """Stock but for what it would compute with models and functions; ``beta`` is set without a second model."""
    require_trl()
    import trl
    from datasets import Dataset

    stock: Any = getattr(trl, f"{name}Trainer")
    reference = object()

    class Trainer(stock):
        def _generate_single_turn(self, *_: Any, **__: Any) -> Any:
            return RESPONSES if name == "RLOO" else (RESPONSES, None)

        def _calculate_rewards(self, *_: Any) -> Tensor:
            return torch.tensor([[float("nan") if reward is None else reward] for reward in REWARDS])

        def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> Any:
            if model is reference:
                return padded(REFERENCE), None, None
            if torch.is_grad_enabled():
                return self.policy_logprobs, torch.ones(6, 3), None
            return padded(BEHAVIOUR), None, None

    config = getattr(trl, f"{name}Config")(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        per_device_train_batch_size=6,
        num_generations=3,
        max_completion_length=LIMIT,
        beta=0.0,
        **settings,
    )
    trainer = Trainer(
        model=make_policy(0),
        reward_funcs=lambda **_: [0.0] * 6,
        args=config,
        processing_class=make_tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 6}),
    )
    trainer.beta, trainer.ref_model = beta, reference
    trainer.current_gradient_accumulation_steps = 1
    trainer.policy_logprobs = padded(POLICY).requires_grad_()
    trainer.model.train()
    return trainer


def trl_step(trainer: Any) -> tuple[Tensor, float, Tensor, dict[str, float]]:
    """Advantages, loss, gradient and metrics."""
    step = trainer._generate_and_score_completions([{"prompt": "a"}] * 6)
    step.setdefault("old_per_token_logps", padded(BEHAVIOUR))
    loss = trainer._compute_loss(trainer.model, step)
    loss.backward()
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return step["advantages"], float(loss.detach()), trainer.policy_logprobs.grad, metrics


def our_step(algorithm: GRPO | RLOO) -> tuple[Tensor, float, Tensor, dict[str, float]]:
    batch = make_batch(
        BEHAVIOUR,
        REWARDS,
        group_size=3,
        reference=REFERENCE,
        is_stopped=IS_STOPPED,
        limits=[LIMIT, LIMIT],
    )
    train_batch = algorithm.prepare(batch)
    mask = batch.response_mask if train_batch.loss_mask is None else train_batch.loss_mask
    policy = padded(POLICY).requires_grad_()
    loss, metrics = algorithm.loss(
        MicroBatch(mask, train_batch.tensors, int(mask.sum()), int(mask.any(1).sum())),
        PolicyOutputs(policy, torch.ones(6, 3), None),
    )
    loss.backward()
    assert policy.grad is not None
    assert policy.grad.abs().max() > 1e-3, "not a comparison of zeros"
    numbers = train_batch.metrics | {name: float(value) for name, value in metrics.items()}
    return train_batch.tensors["advantages"], float(loss.detach()), policy.grad, numbers


def assert_same(ours: Any, theirs: Any, *, left_out: frozenset[str] = frozenset()) -> None:
    torch.testing.assert_close(ours[0], theirs[0], atol=TOLERANCE, rtol=0)
    assert ours[1] == pytest.approx(theirs[1], abs=TOLERANCE)
    torch.testing.assert_close(ours[2], theirs[2], atol=TOLERANCE, rtol=0)
    shared = set(ours[3]) - left_out
    assert shared <= set(theirs[3]), "every metric has a name of TRL's"
    for name in shared:
        assert ours[3][name] == pytest.approx(theirs[3][name], abs=TOLERANCE), name


SEQUENCE_CLIPS = frozenset({"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"})
GRPO_SETTINGS: list[dict[str, Any]] = [
    {},
    {"mask_truncated_completions": True, "epsilon_high": 0.28},
    {"loss_type": "grpo", "scale_rewards": "none", "epsilon": 0.1, "epsilon_high": 0.4, "delta": 1.45},
    {"loss_type": "dr_grpo", "scale_rewards": "batch", "use_bias_correction_kl": False},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05},
    {"importance_sampling_level": "sequence", "epsilon": 0.05, "scale_rewards": True},
]


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("settings", GRPO_SETTINGS, ids=lambda s: "-".join(map(str, s.values())) or "default")
def test_grpo_gives_trls_advantages_loss_gradient_and_metrics(
    settings: dict[str, Any], beta: float, tmp_path: Path
) -> None:
    ours = our_step(GRPO(parse_config(GRPOConfig, {"num_generations": 3, "beta": beta} | settings)))
    theirs = trl_step(trl_trainer("GRPO", tmp_path, settings, beta))
    # Deviations: see the docstring of algorithms/grpo.py.
    left_out = SEQUENCE_CLIPS if settings.get("importance_sampling_level") == "sequence" else frozenset()
    if settings.get("scale_rewards") == "batch":
        left_out |= {"frac_reward_zero_std"}
    assert_same(ours, theirs, left_out=left_out)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo"])
def test_a_masked_response_leaves_our_denominator_and_stays_in_trls(loss_type: str, tmp_path: Path) -> None:
    settings = {"loss_type": loss_type, "mask_truncated_completions": True}
    ours = our_step(GRPO(parse_config(GRPOConfig, {"num_generations": 3} | settings)))
    theirs = trl_step(trl_trainer("GRPO", tmp_path, settings, 0.0))
    torch.testing.assert_close(ours[2] * 5 / 6, theirs[2], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"epsilon": 0.1, "epsilon_high": 0.3, "normalize_advantages": True},
        {"reward_clip_range": (-1.0, 2.0)},
    ],
    ids=["default", "normalised", "clipped"],
)
def test_rloo_gives_trls_advantages_loss_gradient_and_metrics(
    settings: dict[str, Any], beta: float, tmp_path: Path
) -> None:
    ours = our_step(RLOO(parse_config(RLOOConfig, {"num_generations": 3, "beta": beta} | settings)))
    theirs = trl_step(trl_trainer("RLOO", tmp_path, settings, beta))
    assert_same(ours, theirs)
