"""The process of one run: ``python -m harness.gpu_check.child PLAN``, where PLAN is a ChildPlan as JSON.

It tells everything through standard output while it happens, one JSON line an event, so that nothing is lost when it
is killed: ``ready`` once, ``step`` after each step, ``end`` with the reason.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from pydantic import BaseModel

from harness.gpu_check.settings import (
    MIN_MEASURED_STEPS,
    NUM_WARMUP_STEPS,
    SIZES,
    Size,
    get_model,
    train_config,
)
from harness.runners.link import connect_to_parent

if TYPE_CHECKING:
    import torch

    from harness.schema import Step


class ChildPlan(BaseModel):
    """What one process is to do."""

    model: str
    runner: str
    size: Size
    seed: int = 0
    share_s: float


class _ShareUsedUpError(Exception):
    """Leaves the loop of a runner between two steps."""


def main(plan: ChildPlan) -> None:
    """Carry out one run until its share of the time is used up."""
    started_s = time.perf_counter()
    events = connect_to_parent()
    import torch
    from transformers import set_seed

    from harness.environment import quieten_transformers
    from harness.gpu_check.random_models import RandomWorkload, open_device, policy_sum
    from harness.runners.base import RunSpec

    quieten_transformers()
    device = open_device(plan.size)
    model, size = get_model(plan.model), SIZES[plan.size]
    set_seed(plan.seed)
    workload = RandomWorkload(model, plan.size, size, device)
    total = policy_sum(workload.make_policy())
    if device.type == "cuda":
        torch.cuda.empty_cache()
    _tell(events, kind="ready", setup_s=time.perf_counter() - started_s, policy_sum=total)
    train = train_config(model, size).model_copy(update={"seed": plan.seed})
    spec = RunSpec(runner=plan.runner, seed=plan.seed, train=train)
    num_steps = 0

    def on_step(step: Step) -> None:
        nonlocal num_steps
        num_steps += 1
        _tell(events, kind="step", step=step.model_dump(mode="json"), **_peaks(device))
        elapsed_s = time.perf_counter() - started_s
        if elapsed_s >= plan.share_s and num_steps >= NUM_WARMUP_STEPS + MIN_MEASURED_STEPS:
            raise _ShareUsedUpError

    try:
        _run(spec, workload, on_step, device)
    except _ShareUsedUpError:
        reason = f"stopped after the step that used up its {plan.share_s:.0f} s"
    else:
        reason = f"did all {size.max_steps} steps"
    _tell(events, kind="end", reason=reason)


def _run(spec: Any, workload: Any, on_step: Any, device: torch.device) -> None:
    """Call the runner; TRL's times are read when the device has done its work, as ours are by themselves."""
    from harness.runners.child import run_function

    run: Any = run_function(spec.runner)
    options = {"clock": _synchronised_clock(device)} if spec.runner == "trl" else {}
    run(spec, workload, None, on_step, **options)


def _synchronised_clock(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter
    import torch

    def now_s() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now_s


def _peaks(device: torch.device) -> dict[str, int | None]:
    if device.type != "cuda":
        return {"peak_allocated_bytes": None, "peak_reserved_bytes": None}
    import torch

    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def _tell(events: TextIO, **facts: Any) -> None:
    print(json.dumps(facts), file=events, flush=True)


if __name__ == "__main__":
    main(ChildPlan.model_validate_json(sys.argv[1]))
