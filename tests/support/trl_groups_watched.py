"""A watched run of stock TRL's trainers of algorithms with groups, on tiny random models."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl_tiny import EOS, PAD, TinyWorkload, make_policy

from harness.runners import trl as runner
from harness.runners import trl_groups
from harness.runners.base import RunSpec
from harness.schema import Evaluation, Step
from oppo_kit.config import TrainConfig
from oppo_kit.registry import create_algorithm

EVALUATION_S = 1000.0
BATCH_SIZE = 4
GROUP_SIZES = {"grpo": 4, "rloo": 2, "online_dpo": 2}
ALGORITHMS = {
    "grpo": {"num_generations": 4},
    "rloo": {"beta": 0.1},
    "online_dpo": {"missing_eos_penalty": 0.5},
}


def make_spec(algo: str, runner_name: str = "trl", eval_every: int = 0, **train: Any) -> RunSpec:
    values: dict[str, Any] = {
        "algo": algo,
        "algo_config": ALGORITHMS[algo],
        "batch_size": BATCH_SIZE,
        "num_steps": 2,
        "sampling": {"response_length": 12, "temperature": 0.9},
        "learner": {"max_grad_norm": None, "learning_rate": 1e-2},
    }
    save_to = train.pop("save_to", None)
    return RunSpec(
        runner=runner_name,
        seed=3,
        train=TrainConfig(**(values | train)),
        eval_every=eval_every,
        save_to=save_to,
    )


class SavedWorkload(TinyWorkload):
    """The policy stands in a folder, from which TRL loads its reference."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        super().__init__(**changes)
        self.folder = folder
        make_policy(0).save_pretrained(folder)

    def make_policy(self) -> Any:
        policy = AutoModelForCausalLM.from_pretrained(self.folder)
        policy.generation_config.update(repetition_penalty=1.3, min_p=0.2)
        return policy


class Watched:
    """A run, and what was seen of TRL's insides and of the evaluation meanwhile."""

    trainer: Any
    before: dict[str, torch.Tensor]

    def __init__(self, spec: RunSpec, workload: TinyWorkload) -> None:
        self.algo = spec.train.algo
        self.group_size = create_algorithm(self.algo, spec.train.algo_config).group_size
        self.rows: list[tuple[tuple[int, ...], list[int]]] = []
        self.widths: list[int] = []
        self.generation_configs: list[Any] = []
        self.scores: list[float] = []
        self.num_optimizer_steps = 0
        self.progress: list[Step] = []
        self.skew_s = 0.0
        build = trl_groups.build_trainer

        def watched_build(*args: Any, **kwargs: Any) -> Any:
            self.trainer = build(*args, **kwargs)
            self.before = {n: p.detach().clone() for n, p in self.trainer.model.named_parameters()}
            self._watch(self.trainer)
            return self.trainer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trl_groups, "build_trainer", watched_build)
            self.steps, self.evaluations, _ = runner.run(
                spec,
                workload,
                self.evaluate,
                self.progress.append,
                clock=lambda: time.perf_counter() + self.skew_s,
            )

    def _watch(self, trainer: Any) -> None:
        """Below the recorder's timers: on the model, the reward and the optimizer."""
        reward = trainer.reward_funcs[0]
        generate = trainer.model.generate

        def watched_generate(input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
            found = generate(input_ids=input_ids, **options)
            self.generation_configs.append(options["generation_config"])
            width = input_ids.shape[1]
            self.widths.append(found.shape[1] - width)
            for query, row in zip(input_ids.tolist(), found[:, width:].tolist(), strict=True):
                self.rows.append((tuple(token for token in query if token != PAD), row))
            return found

        def watched_reward(**arguments: Any) -> list[float | None]:
            found = reward(**arguments)
            self.scores += [torch.nan if score is None else score for score in found]
            return found

        def count(*_: Any) -> None:
            self.num_optimizer_steps += 1

        trainer.model.generate = watched_generate
        trainer.reward_funcs[0] = watched_reward
        trainer.optimizer.register_step_pre_hook(count)

    def evaluate(
        self, policy: Any, *, step: int, elapsed_train_s: float, responses_trained: int
    ) -> Evaluation:
        policy.eval()
        torch.rand(step + 1)
        self.skew_s += EVALUATION_S
        return Evaluation(
            step=step,
            elapsed_train_s=elapsed_train_s,
            responses_trained=responses_trained,
            accuracy=None,
            score_mean=float(next(policy.parameters()).sum()),
            length_mean=0.0,
            eval_s=EVALUATION_S,
        )

    def responses(self) -> list[tuple[tuple[int, ...], list[int]]]:
        """Prompt and response of each row, without what follows EOS."""
        return [(query, row[: row.index(EOS) + 1] if EOS in row else row) for query, row in self.rows]


def never(*_: Any, **__: Any) -> Any:
    pytest.fail("nothing is evaluated")
