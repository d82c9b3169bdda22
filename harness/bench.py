"""``oppo-kit bench``: the same work by every runner, in turn, and what it cost.

    calibrate threads ─► pair 0: A B C ─► pair 1: C B A ─► pair 2: A B C … ─► bound ─► result.json, report.md

Each run is a process of its own. ``result.json`` is written anew after every run, so an interrupt loses one run.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness.cores import Placement, split_cores
from harness.environment import describe_environment, num_usable_cores
from harness.faults import FAULTS
from harness.folders import make_folder, write_atomically
from harness.measurement.bound import StageCosts, best_of, bound_of
from harness.processes import run_in_process
from harness.report import write_report
from harness.runners.base import RunSpec
from harness.runners.oppo import RUNGS, overlap_of
from harness.runners.trl import OVERLAP, TRAINERS, can_run
from harness.schema import Environment, Evaluation, Result, Run, Runner, Workload
from harness.statistics import fill_derived
from harness.workloads.loading import Workload as LoadedWorkload
from harness.workloads.loading import load_workload
from oppo_kit.backends.vllm_engine import require_vllm
from oppo_kit.config import TrainConfig
from oppo_kit.errors import ConfigError, UnknownNameError
from oppo_kit.registry import create_algorithm

RUNNERS = {
    "trl": "TRL's {trainer} on the same work, at its best fair settings",
    "trl_continuous": "the same {trainer}, which generates by transformers' continuous batching",
    "trl_overlap": "the same script with Overlap{trainer}: B + Δ in the air, trained by TRL",
    "sequential": "our backend without overlap: decode all B, score, train",
    "sample": "sequential, but each response is scored when it ends, while others are decoded",
    "chunk": "sequential, but scorers are fed chunks of every response while it is decoded",
    "chunk_auto": "sequential, and when to score is chosen online: at the batch, at the sample, or by chunks",
    "overcommit": "B + Δ in the air, the first B that end are trained, the rest are carried on",
    "both": "overcommit, and when to score is chosen online",
}
DEFAULT_RUNNERS = {
    "shared": ("trl", "sequential", "both"),
    "split": ("sequential", "sample", "chunk", "overcommit", "both"),
}
LADDER = "ladder"


def describe_runner(name: str, algo: str) -> str:
    """What a runner is, for this algorithm."""
    trainer = TRAINERS[algo].name if algo in TRAINERS else "trainer"
    return RUNNERS[name].format(trainer=trainer)


def parse_placement(name: str) -> Placement:
    """A placement by its name.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in DEFAULT_RUNNERS:
        raise UnknownNameError("placement", name, DEFAULT_RUNNERS)
    return "split" if name == "split" else "shared"


def runner_names(text: str | None, placement: str, algo: str = "ppo", backend: str = "hf") -> list[str]:
    """Comma-separated names, ``ladder`` for TRL and all rungs that the placement has, None for its default.

    Where nobody named it, ``trl`` is left out for an algorithm that TRL has not, and beside another backend than hf.
    """
    if text not in (None, LADDER):
        return text.split(",")
    names = DEFAULT_RUNNERS[parse_placement(placement)]
    if text == LADDER:
        names = ("trl", *RUNGS) if placement == "shared" else tuple(RUNGS)
    return [name for name in names if name != "trl" or (can_run(name, algo) and backend == "hf")]


@dataclass(frozen=True)
class BenchPlan:
    """What ``oppo-kit bench`` was asked to do."""

    name: str
    train: TrainConfig
    runners: Sequence[str]
    num_pairs: int
    eval_every: int
    num_eval_problems: int
    num_warmup_steps: int
    is_quick: bool
    folder: Path
    placement: Placement = "shared"
    num_threads: int | None = None
    num_calibration_steps: int = 3
    fault: str | None = None
    command: str = field(default_factory=lambda: shlex.join(["oppo-kit", *sys.argv[1:]]))


def run_bench(plan: BenchPlan, console: Console) -> Result:
    """Carry out a plan; returns the result as it stands in ``result.json``.

    Raises:
        ConfigError: a runner that is unknown or cannot do this workload.
        PartFailedError: a run failed; what was measured before is kept.
    """
    check_runners(plan)
    _check_plan(plan)
    environment = describe_environment()
    loaded = load_workload(plan.train, num_eval_problems=plan.num_eval_problems)
    _check_rungs(plan, loaded)
    workload = _describe_workload(plan, loaded)
    make_folder(plan.folder)
    runners: dict[str, Runner] = {}
    with _progress(console) as progress:
        fixed = 1 if plan.placement == "split" else plan.num_threads
        for name in plan.runners:
            calibration = {} if fixed else _calibrate(plan, name, progress)
            runners[name] = Runner(
                name=name,
                description=describe_runner(name, plan.train.algo),
                calibration_step_s=calibration,
                runs=[],
            )
        for pair in range(plan.num_pairs):
            order = list(plan.runners) if pair % 2 == 0 else list(reversed(plan.runners))
            for name in order:
                num_threads = fixed or _fastest(runners[name].calibration_step_s)
                untrained = _untrained(runners)
                runners[name].runs.append(_run(plan, name, pair, num_threads, untrained, progress))
                _save(_result(plan, environment, workload, runners, None), plan.folder)
        costs = _measure_bound(plan, progress)
    result = _result(plan, environment, workload, runners, costs)
    _save(result, plan.folder)
    write_report(result, plan.folder)
    return result


def check_runners(plan: BenchPlan) -> None:
    """Whether there are such runners, and whether they can do this work; needs none of it.

    Raises:
        ConfigError: none was named, or one that cannot.
        UnknownNameError: a runner or a fault that does not exist.
    """
    for name in plan.runners:
        if name not in RUNNERS:
            raise UnknownNameError("runner", name, RUNNERS)
    if plan.fault is not None and plan.fault not in FAULTS:
        raise UnknownNameError("fault", plan.fault, FAULTS)
    if not plan.runners:
        raise ConfigError(f"no runner was named; choose from {', '.join(RUNNERS)}")
    _check_stock_runners(plan)


def _check_plan(plan: BenchPlan) -> None:
    if plan.train.backend == "vllm":
        require_vllm()
    overcommitted = [name for name in plan.runners if name in (OVERLAP, "overcommit", "both")]
    if overcommitted and plan.train.overlap.delta == 0:
        raise ConfigError(
            f"runner {overcommitted[0]!r} needs overlap.delta > 0: with 0 nothing is overcommitted; "
            f"pass --set overlap.delta={max(1, plan.train.batch_size // 2)}"
        )
    if plan.placement == "split":
        split_cores(plan.placement)
        if plan.num_threads not in (None, 1):
            raise ConfigError(
                f"placement 'split' gives the actor one core, so not {plan.num_threads} threads"
            )
    if plan.train.num_steps <= plan.num_warmup_steps:
        raise ConfigError(
            f"num_steps={plan.train.num_steps} leaves nothing to measure after {plan.num_warmup_steps} warm-up steps; "
            "raise --steps"
        )


def _check_stock_runners(plan: BenchPlan) -> None:
    for name in plan.runners:
        if name in RUNGS:
            continue
        if plan.train.backend != "hf":
            raise ConfigError(
                f"runner {name!r} is TRL's, which generates by transformers, and backend is {plan.train.backend!r}; "
                "leave it out, or use backend 'hf'"
            )
        if plan.fault is not None:
            raise ConfigError(f"runner {name!r} is TRL's, and a fault is put into ours; leave it out")
        if plan.placement == "split":
            raise ConfigError(
                f"runner {name!r} cannot split actor and scorers; leave it out, or use placement 'shared'"
            )
        if not can_run(name, plan.train.algo):
            raise ConfigError(
                f"runner {name!r}: TRL has no such trainer of algorithm {plan.train.algo!r}; leave it out"
            )


def _check_rungs(plan: BenchPlan, loaded: LoadedWorkload) -> None:
    """Every rung's settings, before any of them has run for minutes."""
    if plan.placement == "split" and loaded.reward_path is None:
        raise ConfigError(
            "placement 'split' gives scorers a core of their own, and reward functions run in the actor's process; "
            "use a reward model, or placement 'shared'"
        )
    for name in plan.runners:
        if name in RUNGS:
            overlap_of(_spec(plan, name, 0, 1))


def _describe_workload(plan: BenchPlan, loaded: LoadedWorkload) -> Workload:
    train = plan.train
    held_out = json.dumps([list(prompt.token_ids) for prompt in loaded.eval_prompts])
    algorithm = create_algorithm(train.algo, train.algo_config)
    return Workload(
        task=train.task if train.dataset is None else train.dataset,
        algorithm=train.algo,
        model=train.model,
        reward=train.reward or str(loaded.task.default_reward),
        critic=_critic_of(train, loaded) if algorithm.needs_critic else None,
        backend=train.backend,
        placement=plan.placement,
        batch_size=train.batch_size,
        group_size=algorithm.group_size,
        num_steps=train.num_steps,
        num_warmup_steps=plan.num_warmup_steps,
        response_length=train.sampling.response_length,
        temperature=train.sampling.temperature,
        dtype=train.dtype,
        num_eval_problems=len(loaded.eval_prompts),
        eval_sha256=hashlib.sha256(held_out.encode()).hexdigest(),
        config=train.model_dump(mode="json"),
        fault=plan.fault,
    )


def _critic_of(train: TrainConfig, loaded: LoadedWorkload) -> str:
    """What the critic starts from, in words."""
    return train.critic or (
        "from the policy" if loaded.critic_path == loaded.policy_path else "from the reward model"
    )


def _spec(plan: BenchPlan, runner: str, pair: int, num_threads: int) -> RunSpec:
    return RunSpec(
        runner=runner,
        seed=plan.train.seed + pair,
        pair=pair,
        num_threads=num_threads,
        cores=split_cores(plan.placement),
        train=plan.train,
        eval_every=plan.eval_every,
        num_eval_problems=plan.num_eval_problems,
        num_warmup_steps=plan.num_warmup_steps,
        fault=plan.fault,
    )


def _thread_counts() -> list[int]:
    cores = num_usable_cores()
    return [count for count in (1, 2, 4, 8) if count <= cores] or [1]


def _calibrate(plan: BenchPlan, runner: str, progress: Progress) -> dict[str, list[float]]:
    """Seconds of a few steps by thread count, the first step left out."""
    counts = _thread_counts()
    if len(counts) == 1:
        return {str(counts[0]): []}
    measured: dict[str, list[float]] = {}
    for count in counts:
        train = plan.train.model_copy(
            update={"num_steps": min(plan.num_calibration_steps, plan.train.num_steps)}
        )
        spec = _spec(plan, runner, 0, count).model_copy(
            update={"train": train, "eval_every": 0, "num_eval_problems": 0}
        )
        label = f"{runner}: {count} thread{'s' if count > 1 else ''}"
        run = _run_with_bar(spec, plan.folder / "calibration" / f"{runner}-{count}", label, progress)
        measured[str(count)] = [step.step_s for step in run.steps[1:]]
    return measured


def _fastest(calibration: dict[str, list[float]]) -> int:
    """The thread count with the shortest step; without samples the only one.

    The steps are the same ones for every count, and so few that a median would follow whatever disturbed one of them.
    """
    return int(min(calibration, key=lambda count: min(calibration[count], default=0.0)))


def _untrained(runners: dict[str, Runner]) -> Evaluation | None:
    """The first evaluation of all: mostly every run starts from the same policy."""
    evaluations = (run.evaluations for runner in runners.values() for run in runner.runs)
    return next((found[0] for found in evaluations if found and found[0].step == 0), None)


def _run(
    plan: BenchPlan, name: str, pair: int, num_threads: int, untrained: Evaluation | None, progress: Progress
) -> Run:
    spec = _spec(plan, name, pair, num_threads).model_copy(update={"untrained": untrained})
    label = f"{name}, seed {spec.seed}"
    return _run_with_bar(spec, plan.folder / "runs" / f"{name}-seed{spec.seed}", label, progress)


def _run_with_bar(spec: RunSpec, folder: Path, label: str, progress: Progress) -> Run:
    bar = progress.add_task(label, total=spec.train.num_steps, note="loading")

    def on_progress(facts: dict) -> None:
        reward = facts["reward_mean"]
        note = f"{facts['step_s']:.2f} s/step" + ("" if reward is None else f", reward {reward:.2f}")
        progress.update(bar, advance=1, note=note)

    run = run_in_process(spec, folder, Run, on_progress=on_progress)
    note = f"{run.total_train_s:.0f} s of training"
    progress.update(bar, note=note)
    if (
        not progress.console.is_terminal
    ):  # bars are shown at the very end there, and a log that stands still looks hung
        progress.console.print(f"{label}: {len(run.steps)} steps, {note}", markup=False, highlight=False)
    return run


def _measure_bound(plan: BenchPlan, progress: Progress) -> StageCosts:
    counts = (
        [1] if plan.placement == "split" else [plan.num_threads] if plan.num_threads else _thread_counts()
    )
    bar = progress.add_task("bound: each stage alone", total=len(counts), note="")
    costs = []
    for count in counts:
        folder = plan.folder / "calibration" / f"bound-{count}"
        spec = _spec(plan, "sequential", 0, count)
        costs.append(run_in_process(spec, folder, StageCosts, module="harness.measurement.bound"))
        progress.update(bar, advance=1)
    return best_of(costs)


def _result(
    plan: BenchPlan,
    environment: Environment,
    workload: Workload,
    runners: dict[str, Runner],
    costs: StageCosts | None,
) -> Result:
    finished = {name: runner for name, runner in runners.items() if runner.runs}
    result = Result(
        name=plan.name,
        command=plan.command,
        is_quick=plan.is_quick,
        environment=environment,
        workload=workload,
        runners=finished,
        bound=None
        if costs is None
        else bound_of(costs, finished, plan.num_warmup_steps, placement=plan.placement),
    )
    return fill_derived(result)


def _save(result: Result, folder: Path) -> None:
    write_atomically(folder / "result.json", result.model_dump_json(indent=1))


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )
