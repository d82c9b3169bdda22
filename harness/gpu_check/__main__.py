"""``python -m harness.gpu_check``: the check itself. The results are written anew after every run."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from harness.environment import describe_environment
from harness.folders import make_folder, write_atomically
from harness.gpu_check.child import ChildPlan
from harness.gpu_check.memory import estimate, num_parameters
from harness.gpu_check.parent import run_child
from harness.gpu_check.random_models import load_shape, require_gpu
from harness.gpu_check.schema import CheckedModel, CheckResult, CheckRun
from harness.gpu_check.settings import (
    MODELS,
    NUM_WARMUP_STEPS,
    RUNNERS,
    SIZES,
    CheckModel,
    Size,
    get_model,
    train_config,
)
from harness.gpu_check.start import COMMIT_VARIABLE
from harness.gpu_check.summary import as_markdown
from harness.schema import Step
from oppo_kit.errors import OppoError
from oppo_kit.telemetry.clock import MonotonicClock

RESULT_NAME = "gpu-check.json"
SUMMARY_NAME = "gpu-check.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; 0 if every run was measured."""
    options = _parser().parse_args(arguments)
    try:
        models = [get_model(name.strip()) for name in options.models.split(",") if name.strip()]
        result = run_check(options.out, options.size, models, options.budget_s)
    except OppoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    missing = [run for run in result.runs if run.status != "measured"]
    print(f"\n{as_markdown(result)}\nresults: {options.out / RESULT_NAME}")
    return 1 if missing else 0


def run_check(folder: Path, size_name: Size, models: Sequence[CheckModel], budget_s: float) -> CheckResult:
    """Every runner on every model, as far as the time goes.

    Raises:
        ConfigError: no GPU, or a folder that cannot be written.
    """
    clock = MonotonicClock()
    started_s = clock.now_s()
    require_gpu(size_name)
    logs = make_folder(folder / "logs")
    result = _empty_result(size_name, models, budget_s)
    _save(result, folder)
    for model in models:
        for runner in RUNNERS:
            text = estimate(model, size_name, SIZES[size_name], runner).as_text()
            print(f"{model.name} {runner}: {text}", flush=True)
    pending = [(model, runner) for model in models for runner in RUNNERS]
    for index, (model, runner) in enumerate(pending):
        remaining_s = started_s + budget_s - clock.now_s()
        if remaining_s > 0:
            weights = [later.time_weight for later, _ in pending[index:]]
            plan = ChildPlan(
                model=model.name,
                runner=runner,
                size=size_name,
                share_s=remaining_s * weights[0] / sum(weights),
            )
            result.runs[index] = run_child(
                plan,
                logs / f"{model.name}-{runner}.txt",
                deadline_s=started_s + budget_s,
                clock=clock,
                on_step=lambda step, label=f"{model.name} {runner}": _tell(label, step),
            )
        result.wall_s = clock.now_s() - started_s
        _save(result, folder)
        print(f"{model.name} {runner}: {result.runs[index].status}", flush=True)
    return result


def _tell(label: str, step: Step) -> None:
    print(f"{label}: step {step.step}, {step.step_s:.2f} s, {step.tokens_decoded} tokens", flush=True)


def _empty_result(size_name: Size, models: Sequence[CheckModel], budget_s: float) -> CheckResult:
    """All that is known beforehand; every run is missing."""
    not_begun = f"not begun: the {budget_s:.0f} s of the whole check were used up before"
    return CheckResult(
        size=size_name,
        command=shlex.join(["python", "-m", "harness.gpu_check", *sys.argv[1:]]),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        budget_s=budget_s,
        wall_s=0.0,
        num_warmup_steps=NUM_WARMUP_STEPS,
        response_lengths=asdict(SIZES[size_name].lengths),
        environment=describe_environment(),
        bundle_commit=os.environ.get(COMMIT_VARIABLE),
        models=[_describe(model, size_name) for model in models],
        runs=[
            CheckRun(model=model.name, runner=runner, status="missing", reason=not_begun)
            for model in models
            for runner in RUNNERS
        ],
    )


def _describe(model: CheckModel, size_name: Size) -> CheckedModel:
    size = SIZES[size_name]
    policy = load_shape(model.policy[size_name])
    return CheckedModel(
        name=model.name,
        title=model.title if size_name == "full" else f"small stand-in for {model.title}",
        is_lora=model.is_lora,
        policy=policy,
        critic=load_shape(model.critic[size_name]) | {"vocab_size": policy["vocab_size"]},
        num_parameters=num_parameters(policy),
        estimated_peak_bytes={
            runner: estimate(model, size_name, size, runner).total_bytes for runner in RUNNERS
        },
        config=train_config(model, size).model_dump(mode="json"),
    )


def _save(result: CheckResult, folder: Path) -> None:
    write_atomically(folder / RESULT_NAME, result.model_dump_json(indent=1))
    write_atomically(folder / SUMMARY_NAME, as_markdown(result))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m harness.gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"), help="folder for the results")
    parser.add_argument("--size", choices=sorted(SIZES), default="full", help="small: seconds on a CPU")
    parser.add_argument("--models", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    parser.add_argument("--budget-s", type=float, default=330.0, help="seconds for all runs together")
    return parser


if __name__ == "__main__":
    sys.exit(main())
