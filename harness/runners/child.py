"""The process of one run: ``python -m harness.runners.child SPEC RESULT``.

Threads and seeds are set before any model is made. Progress goes to standard output, one JSON line a step; the run
itself is written to RESULT at the end.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from harness.runners.base import RunFunction, RunSpec
from harness.runners.link import connect_to_parent


def main(spec_file: Path, result_file: Path) -> None:
    """Carry out one run."""
    progress = connect_to_parent()
    spec = RunSpec.model_validate_json(spec_file.read_text())
    if spec.cores is not None:
        os.sched_setaffinity(0, spec.cores[:1])  # before any model is made
    os.environ["OMP_NUM_THREADS"] = str(spec.num_threads)
    # Rows of one batch differ in length all the time; tokenizers' own threads only disturb the count we set.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch
    from transformers import set_seed

    from harness.environment import quieten_transformers
    from harness.measurement.utilisation import to_results
    from harness.runners.base import HeldOutEvaluator
    from harness.schema import Run, Step
    from harness.workloads.loading import load_workload
    from oppo_kit.telemetry.clock import MonotonicClock
    from oppo_kit.telemetry.utilisation import UtilisationSampler

    torch.set_num_threads(spec.num_threads)
    set_seed(spec.seed)
    quieten_transformers()
    clock = MonotonicClock()
    started_at, start_s = datetime.now(UTC), clock.now_s()
    train = spec.train.model_copy(update={"seed": spec.seed})
    spec = spec.model_copy(update={"train": train})
    workload = load_workload(train, num_eval_problems=spec.num_eval_problems)
    evaluator = HeldOutEvaluator(workload, train, spec.untrained)
    setup_s = clock.now_s() - start_s

    def on_step(step: Step) -> None:
        facts = {"step": step.step, "step_s": step.step_s, "reward_mean": step.reward_mean}
        print(json.dumps(facts), file=progress, flush=True)

    with UtilisationSampler(clock=clock, interval_s=0.5) as sampler:
        steps, evaluations, timeline = run_function(spec.runner)(spec, workload, evaluator, on_step)
    run = Run(
        seed=spec.seed,
        pair=spec.pair,
        num_threads=spec.num_threads,
        started_at=started_at.isoformat(timespec="seconds"),
        total_train_s=sum(step.step_s for step in steps),
        setup_s=setup_s,
        peak_rss_bytes=_peak_rss_bytes(),
        steps=steps,
        evaluations=evaluations,
        utilisation=to_results(sampler.series()),
        timeline=timeline,
    )
    result_file.write_text(run.model_dump_json())


def run_function(name: str) -> RunFunction:
    """The function behind a runner's name; only its module is imported."""
    if name.startswith("trl"):
        from harness.runners.trl import run

        return run
    from harness.runners.oppo import run

    return run


def _peak_rss_bytes() -> int | None:
    """Of this process and its largest child, the scorers'."""
    if sys.platform == "win32":
        return None
    import resource

    peak = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
