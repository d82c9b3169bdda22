"""TRL as a runner: its trainer of the same algorithm, on the same work as our runners.

It finds the installed TRL, imports the trainer's module and hands it on: PPO to ``trl_ppo``, the algorithms with
groups to ``trl_groups``, which say what makes the comparison fair. The harness imports TRL nowhere else. The runner
``trl_overlap`` is the same script with another class name: our drop-in trainer in place of the stock one.
"""

from __future__ import annotations

import functools
import importlib
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import set_seed

from harness.runners.base import Outcome
from harness.runners.trl_groups import train_groups
from oppo_kit.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from harness.runners.base import Evaluate, OnStep, RunSpec
    from harness.workloads.loading import Workload

CONTINUOUS = "trl_continuous"
"""The runner whose generation is transformers' continuous batching."""
OVERLAP = "trl_overlap"
"""The runner whose trainer is our drop-in one."""


class StockTrainer(NamedTuple):
    """Where TRL keeps a trainer.

    Attributes:
        name: of the class; the config has ``Config`` where this has ``Trainer``.
        module: that has both.
        series: of TRL that are known to have it as it is used here; PPO's last one is 1.12.
    """

    name: str
    module: str
    series: tuple[str, ...]


_GROUP_SERIES = ("1.12", "1.13", "1.14", "1.15", "1.16")
TRAINERS = MappingProxyType(
    {
        "ppo": StockTrainer("PPOTrainer", "trl.experimental.ppo.ppo_trainer", ("1.12",)),
        "grpo": StockTrainer("GRPOTrainer", "trl", _GROUP_SERIES),
        "rloo": StockTrainer("RLOOTrainer", "trl", _GROUP_SERIES),
        "online_dpo": StockTrainer("OnlineDPOTrainer", "trl.experimental.online_dpo", _GROUP_SERIES),
    }
)
"""By our algorithm's name."""
ALGORITHMS = MappingProxyType(
    {
        "trl": frozenset(TRAINERS),
        CONTINUOUS: frozenset({"grpo", "rloo"}),  # no other trainer has continuous batching
        OVERLAP: frozenset({"grpo", "rloo", "online_dpo"}),
    }
)
"""What each runner runs."""


def can_run(runner: str, algo: str) -> bool:
    """Whether there is a trainer of this algorithm for a runner of ``ALGORITHMS``."""
    return algo in ALGORITHMS[runner]


def run(
    spec: RunSpec,
    workload: Workload,
    evaluate: Evaluate,
    on_step: OnStep,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome:
    """Train by TRL.

    Args:
        spec: seed, configuration and when to evaluate.
        workload: models, prompts and stop tokens.
        evaluate: called with the policy at step 0, every ``spec.eval_every`` steps and at the end; 0: never.
        on_step: called after each step, outside its time.
        clock: monotonic seconds.

    Returns:
        the steps and the evaluations, in order; no timeline.

    Raises:
        MissingExtraError: TRL is not installed.
        ConfigError: it has no such trainer, another series of it is installed, or it cannot do what the configuration
            asks for.
    """
    algo = spec.train.algo
    if not can_run(spec.runner, algo):
        known = ", ".join(sorted(ALGORITHMS[spec.runner]))
        raise ConfigError(
            f"algo is {algo!r}, and the {spec.runner} runner runs {known} only; leave the {spec.runner} runner out"
        )
    module = import_module(algo)
    set_seed(spec.seed)
    if algo == "ppo":
        from harness.runners.trl_ppo import train_ppo  # which loads our PPO

        return train_ppo(module, spec, workload, evaluate, on_step, clock)
    name = TRAINERS[algo].name
    trainer_class: Any = getattr(module, name)
    if spec.runner == OVERLAP:
        from harness.runners.oppo import overlap_of  # which loads our engine
        from oppo_kit.integrations import trl as ours

        overlapping = getattr(ours, f"Overlap{name}")
        # The reward is a function of token ids for both classes, so there is nobody to stream to.
        overlap = overlap_of(spec.model_copy(update={"runner": "overcommit"}))
        trainer_class = functools.partial(overlapping, overlap=overlap)
    return train_groups(
        trainer_class,
        getattr(module, name.replace("Trainer", "Config")),
        spec,
        workload,
        evaluate,
        on_step,
        clock,
        is_continuous=spec.runner == CONTINUOUS,
        is_overlapping=spec.runner == OVERLAP,
    )


def import_module(algo: str) -> Any:
    """TRL's module of this algorithm's trainer.

    Raises:
        MissingExtraError: TRL is not installed.
        ConfigError: another series is.
    """
    try:
        installed = metadata.version("trl")
    except metadata.PackageNotFoundError as error:
        raise MissingExtraError("trl", "baseline") from error
    trainer = TRAINERS[algo]
    if ".".join(installed.split(".")[:2]) not in trainer.series:
        first, last = trainer.series[0], trainer.series[-1]
        wanted = f"{first}.x" if first == last else f"{first}.x to {last}.x"
        why = f", the last series with {trainer.name}" if first == last else f" for its {trainer.name}"
        raise ConfigError(
            f"trl {installed} is installed, and the trl runner needs {wanted}{why}; install it with: "
            "pip install 'oppo-kit[baseline]'"
        )
    with warnings.catch_warnings():
        # TRL warns that its experimental part may change; the series are checked above.
        warnings.filterwarnings("ignore", message=".*trl.experimental.*")
        return importlib.import_module(trainer.module)
