"""What bounds an overcommitted step: ``python -m harness.measurement.step_profile --model tiny --out FOLDER``.

After two steps that fill the pipeline, one is profiled in its two halves: until B responses are ended and scored, and
the update with the new weights handed over.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from harness.environment import describe_environment
from harness.measurement.operators import Operator, operator_table, slowest_operators
from harness.measurement.output import carry_out, provenance
from harness.runners.oppo import make_engine
from harness.schema import Environment
from harness.settings import load_train_config
from harness.workloads.loading import load_workload
from oppo_kit.types import RolloutBatch, StepReport

_NUM_STEPS_BEFORE = 2


class StepProfile(BaseModel):
    """A results file; the stages' seconds are those of the profiled step, which the profiler slows down."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    model: str
    command: str
    num_threads: int
    environment: Environment
    stages_s: dict[str, float]
    tokens_decoded: int
    tokens_trained: int
    collect: list[Operator]
    update: list[Operator]


def measure(model: str, *, num_threads: int, command: str, overrides: Sequence[str] = ()) -> StepProfile:
    """Profile one step of this model's own workload."""
    torch.set_num_threads(num_threads)
    # More steps than are made, so that the profiled one does not drain the pipeline.
    train = load_train_config(options={"model": model}, overrides=[*overrides, "num_steps=8"])
    workload = load_workload(train, num_eval_problems=0)
    batches: list[RolloutBatch] = []
    reports: list[StepReport] = []
    with make_engine(train, workload) as engine:
        for _ in range(_NUM_STEPS_BEFORE):
            engine.step(engine.collect())
        collect = slowest_operators(lambda: batches.append(engine.collect()))
        update = slowest_operators(lambda: reports.append(engine.step(batches[0])))
    [report] = reports
    return StepProfile(
        model=model,
        command=command,
        num_threads=num_threads,
        environment=describe_environment(),
        stages_s={
            "generate": report.generate_s,
            "score": report.score_s,
            "train": report.train_s,
            "sync": report.sync_s,
        },
        tokens_decoded=report.tokens_decoded,
        tokens_trained=report.tokens_trained,
        collect=collect,
        update=update,
    )


def render(profile: StepProfile) -> str:
    """The file as Markdown."""
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in profile.stages_s.items())
    return "\n\n".join(
        [
            f"# What a step of overcommitted PPO spends its time on, {profile.model}",
            f"One step under the profiler, {profile.num_threads} thread(s): {stages}; "
            f"{profile.tokens_decoded} tokens decoded, {profile.tokens_trained} trained. "
            + provenance(profile.environment, profile.command),
            "Until the batch is ended and scored, operators by their own share of the CPU time:",
            operator_table(profile.collect),
            "The update:",
            operator_table(profile.update) + "\n",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.measurement.step_profile", description="Profile a step."
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    command = (
        f"python -m harness.measurement.step_profile --model {options.model} --threads {options.threads}"
    )
    return carry_out(
        options.out,
        "step_profile",
        lambda: measure(options.model, num_threads=options.threads, command=command),
        render,
    )


if __name__ == "__main__":
    sys.exit(main())
