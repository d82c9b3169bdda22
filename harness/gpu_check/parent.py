"""Starts the processes of the check, one after the other, watches the GPU meanwhile, and keeps what they tell.

    for each model, for each runner:  start ─► follow its events ─► it ends by itself, or is killed at the deadline

Waits for: the child's lines. Unblocked by: the child, also when it dies, and a timer that kills it at the deadline. The
samples of the GPU are taken here, so that they disturb no run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.gpu_check.child import ChildPlan
from harness.gpu_check.schema import CheckRun, UtilisationSummary, figures_of
from harness.gpu_check.settings import MIN_MEASURED_STEPS, NUM_WARMUP_STEPS
from harness.measurement.utilisation import summarise, to_results
from harness.runners.link import PARENT_VARIABLE
from harness.schema import Step, UtilisationSeries
from oppo_kit.protocols import Clock
from oppo_kit.telemetry.utilisation import UtilisationSampler

_NUM_LOG_LINES = 12
_SAMPLE_INTERVAL_S = 0.5


@dataclass
class _Followed:
    """What a child has told so far, with the seconds since its start."""

    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    step_times_s: list[float] = field(default_factory=list)


def run_child(
    plan: ChildPlan,
    log_file: Path,
    *,
    deadline_s: float,
    clock: Clock,
    on_step: Callable[[Step], None] | None = None,
) -> CheckRun:
    """One run, whatever becomes of it.

    Args:
        plan: what to run.
        log_file: takes what the process prints.
        deadline_s: reading of the clock at which the process is killed.
        clock: monotonic seconds.
        on_step: called with each step when it ends.
    """
    started_s = clock.now_s()
    followed = _Followed()
    with (
        log_file.open("w") as log,
        UtilisationSampler(interval_s=_SAMPLE_INTERVAL_S, clock=clock, origin_s=started_s) as sampler,
        _start(plan, log) as child,
    ):
        is_late = threading.Event()

        def kill_late() -> None:
            is_late.set()
            child.kill()

        timer = threading.Timer(max(deadline_s - clock.now_s(), 0.0), kill_late)
        timer.daemon = True
        timer.start()
        try:
            _follow(child, followed, lambda: clock.now_s() - started_s, on_step)
        finally:
            timer.cancel()
            if child.poll() is None:
                child.kill()
    status, reason = _outcome(followed, child.returncode, is_late.is_set(), log_file)
    samples = [series for series in to_results(sampler.series()) if series.name.startswith("gpu")]
    facts = followed.facts
    return CheckRun(
        model=plan.model,
        runner=plan.runner,
        status=status,
        reason=reason,
        share_s=plan.share_s,
        wall_s=clock.now_s() - started_s,
        setup_s=facts.get("setup_s"),
        policy_sum=facts.get("policy_sum"),
        peak_allocated_bytes=facts.get("peak_allocated_bytes"),
        peak_reserved_bytes=facts.get("peak_reserved_bytes"),
        steps=followed.steps,
        figures=figures_of(followed.steps, NUM_WARMUP_STEPS) if _is_enough(followed) else None,
        utilisation=_summaries(samples, followed),
        samples=samples,
    )


def _start(plan: ChildPlan, log: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "harness.gpu_check.child", plan.model_dump_json()]
    environment = os.environ | {
        # The GPU works; more CPU threads only disturb each other.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "PYTHONUNBUFFERED": "1",
        PARENT_VARIABLE: "1",
    }
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
    )


def _follow(
    child: subprocess.Popen[str],
    followed: _Followed,
    elapsed_s: Callable[[], float],
    on_step: Callable[[Step], None] | None,
) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        if not line.endswith("\n"):
            break  # killed in the middle of it
        event = json.loads(line)
        followed.facts |= {name: value for name, value in event.items() if name not in {"kind", "step"}}
        if event["kind"] == "step":
            followed.steps.append(Step.model_validate(event["step"]))
            followed.step_times_s.append(elapsed_s())
            if on_step is not None:
                on_step(followed.steps[-1])
    child.wait()


def _is_enough(followed: _Followed) -> bool:
    return len(followed.steps) >= NUM_WARMUP_STEPS + MIN_MEASURED_STEPS


def _outcome(followed: _Followed, code: int, was_late: bool, log_file: Path) -> tuple[Any, str]:
    """Status and reason."""
    if code == 0 and _is_enough(followed):
        return "measured", followed.facts["reason"]
    num_steps = len(followed.steps)
    if was_late and code < 0:
        status = "measured" if _is_enough(followed) else "missing"
        return status, f"the time of the whole check was used up after {num_steps} steps of this run"
    lines = [line for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    end = "\n".join(lines[-_NUM_LOG_LINES:]) or "(its log is empty)"
    return "failed", f"the process ended with code {code} after {num_steps} steps; end of its log:\n{end}"


def _summaries(samples: list[UtilisationSeries], followed: _Followed) -> list[UtilisationSummary]:
    """Over the measured steps: from the end of the warm-up to the end of the last step."""
    times_s = followed.step_times_s
    if len(times_s) <= NUM_WARMUP_STEPS:
        return []
    start_s, end_s = times_s[NUM_WARMUP_STEPS - 1], times_s[-1]
    summaries = []
    for series in samples:
        window = summarise(series, start_s, end_s)
        summaries.append(UtilisationSummary(name=series.name, unit=series.unit, **asdict(window)))
    return summaries
