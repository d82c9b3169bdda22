"""The embedded task: ``rewrite_chain`` problems, which the embedded models know. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any

from harness.workloads import rewrite_chain
from harness.workloads.base import Row
from oppo_kit.errors import DataError

# More than a full run draws (steps × B), so that no problem text is trained for many epochs by accident.
NUM_TRAIN_PROBLEMS = 8192


class TinyTask:
    """Rewrite chains; see ``rewrite_chain``."""

    name = "tiny"
    default_reward: str | None = "tiny"
    # The longest right response has 252 tokens. At this size a rate of 1.2e-4 learns and 3e-4 collapses.
    default_overrides: Mapping[str, Any] = MappingProxyType(
        {
            "model": "tiny",
            "batch_size": 32,
            "sampling": {"temperature": 1.0, "response_length": 256},
            "learner": {"learning_rate": 1.2e-4, "lr_scheduler_type": "constant", "max_grad_norm": None},
            "num_steps": 20,
        }
    )
    # One pass with four optimizer steps, and little pull towards the start: the policy is to improve in 20 steps. As
    # many responses a step as PPO, or twice as many where they are compared with each other.
    algorithm_overrides: Mapping[str, Mapping[str, Any]] = MappingProxyType(
        {
            "ppo": {"algo_config": {"num_ppo_epochs": 1, "num_mini_batches": 4, "kl_coef": 0.01}},
            "grpo": {"batch_size": 8, "algo_config": {"num_generations": 8, "num_mini_batches": 4}},
            # Unclipped, scores from -4 to 3 make it please the reward model (-0.92 to +0.26) without being right more
            # often (0.285 to 0.293 of 512 problems); clipped it is (to 0.455).
            "rloo": {
                "batch_size": 16,
                "algo_config": {
                    "num_generations": 4,
                    "num_mini_batches": 4,
                    "beta": 0.01,
                    "reward_clip_range": (-1.0, 1.0),
                },
            },
            # TRL's takes one optimizer step a batch.
            "online_dpo": {"batch_size": 32},
        }
    )

    def train_rows(self, seed: int) -> list[Row]:
        """The first problems of the seed's training stream."""
        problems = rewrite_chain.iterate_problems(seed, "train")
        return [{"prompt": problem} for problem in islice(problems, NUM_TRAIN_PROBLEMS)]

    def eval_rows(self, num_rows: int) -> list[Row]:
        """Held-out problems, the same for every seed.

        Raises:
            DataError: more than there are.
        """
        try:
            return [{"prompt": problem} for problem in rewrite_chain.held_out_problems(num_rows)]
        except ValueError as error:
            raise DataError(f"{num_rows} evaluation problems: {error}") from error

    def check(self, row: Row, response_text: str, is_stopped: bool) -> bool | None:
        """Whether the chain is finished and every step that stands is right."""
        return rewrite_chain.is_correct(row["prompt"], _with_end(response_text, is_stopped))


def chain_reward(
    prompts: list[str], completions: list[str], is_stopped: list[bool] | None = None, **_: Any
) -> list[float | None]:
    """1 for a finished chain of right steps, else 0: the true checker in place of the reward model."""
    stopped = [True] * len(prompts) if is_stopped is None else is_stopped
    return [
        float(rewrite_chain.is_correct(prompt, _with_end(text, is_ended)))
        for prompt, text, is_ended in zip(prompts, completions, stopped, strict=True)
    ]


def _with_end(text: str, is_stopped: bool) -> str:
    has_end = rewrite_chain.EOS_TEXT in text
    return text + rewrite_chain.EOS_TEXT if is_stopped and not has_end else text
