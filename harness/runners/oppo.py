"""Our engine as a runner: the rungs of the ladder, from no overlap to all of it.

All run the same backend, learner and algorithm; only when responses are scored and how many are in the air differs.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from harness.faults import break_algorithm
from harness.runners.base import Evaluate, OnStep, Outcome, RunSpec, make_function_scorer
from harness.schema import Evaluation, Step, TimelineSpan
from harness.workloads.base import get_task
from harness.workloads.loading import Workload
from oppo_kit.build import build_engine
from oppo_kit.config import OverlapConfig, TrainConfig, parse_config
from oppo_kit.engine.loop import OverlapEngine
from oppo_kit.errors import ConfigError
from oppo_kit.placement.placing import settle_placement
from oppo_kit.registry import create_algorithm
from oppo_kit.types import StepReport

_NO_OVERCOMMIT = {"schedule": "sequential", "delta": 0}
RUNGS: dict[str, dict[str, Any]] = {
    "sequential": {**_NO_OVERCOMMIT, "score_at": "batch"},
    "sample": {**_NO_OVERCOMMIT, "score_at": "sample"},
    "chunk": {**_NO_OVERCOMMIT, "score_at": "chunk"},
    "chunk_auto": {**_NO_OVERCOMMIT, "score_at": "auto"},
    "overcommit": {"score_at": "batch"},
    "both": {},
}
"""What each rung changes in the configuration's own overlap settings; the last one scores as they say, or else auto."""


def overlap_of(spec: RunSpec) -> OverlapConfig:
    """The settings of a rung. Scorers that overlap leave the actor's thread, to a process on a CPU, and decoding leaves
    them as many cores as they have threads; training has all.

    Where cores are split they have one of their own in every rung, the one without overlap included.
    """
    own = spec.train.overlap
    changes: dict[str, Any] = {"score_at": "auto" if own.score_at == "batch" else own.score_at}
    changes |= RUNGS[spec.runner]
    if changes["score_at"] == "batch":
        changes |= {"placement": "inline", "scorer_cores": None, "stream_critic": False}
    if not has_models_to_score(spec.train):
        if changes["score_at"] in ("chunk", "auto") and spec.runner != "both":
            raise ConfigError(
                f"runner {spec.runner!r} has nobody to stream to: reward functions see whole responses; leave it out"
            )
        # Functions run in threads of their own, and need no core.
        changes |= {"placement": "inline", "stream_critic": False}
        changes["score_at"] = "batch" if changes["score_at"] == "batch" else "sample"
    if changes["score_at"] == "sample":
        changes["stream_critic"] = False
    if spec.cores is not None:
        changes |= {"placement": "process", "scorer_cores": spec.cores[1:], "stream_critic": False}
    overlap = parse_config(
        OverlapConfig, own.model_dump() | changes, source=f"overlap of runner {spec.runner!r}"
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return settle_placement(overlap, device, num_threads=spec.num_threads)


def has_models_to_score(train: TrainConfig) -> bool:
    """Whether a reward model or a reference scores responses, rather than functions alone."""
    reward = train.reward or get_task(train.task).default_reward or ""
    is_function = ":" in reward and not Path(reward).is_dir()
    return not is_function or "reference" in create_algorithm(train.algo, train.algo_config).scorers


def run(spec: RunSpec, workload: Workload, evaluate: Evaluate, on_step: OnStep) -> Outcome:
    """Train by the rung that the specification names."""
    train = spec.train.model_copy(update={"overlap": overlap_of(spec)})
    steps: list[Step] = []
    evaluations: list[Evaluation] = []
    timeline: list[TimelineSpan] = []
    with make_engine(train, workload) as engine:
        if spec.fault is not None:
            break_algorithm(engine.algorithm, spec.fault)

        def evaluate_now() -> None:
            evaluations.append(
                evaluate(
                    engine.learner.policy,
                    step=len(steps),
                    elapsed_train_s=sum(step.step_s for step in steps),
                    responses_trained=sum(step.responses_trained for step in steps),
                )
            )

        if spec.eval_every:
            evaluate_now()
        for report in engine.run():
            steps.append(to_step(report))
            on_step(steps[-1])
            if report.step == train.num_steps // 2:
                timeline = to_timeline(report)
            if spec.eval_every and (len(steps) % spec.eval_every == 0 or len(steps) == train.num_steps):
                evaluate_now()
        if spec.save_to is not None:
            engine.learner.save_pretrained(spec.save_to, workload.tokenizer)
    return Outcome(steps, evaluations, timeline)


def make_engine(train: TrainConfig, workload: Workload, **options: Any) -> OverlapEngine:
    """An engine on freshly loaded models."""
    algorithm = create_algorithm(train.algo, train.algo_config)
    reward = (
        workload.make_reward()
        if workload.reward_path is not None
        else make_function_scorer(workload, train.reward_call_per)
    )
    return build_engine(
        train,
        policy=workload.make_policy(),
        tokenizer=workload.tokenizer,
        prompts=workload.prompts,
        reward=reward,
        critic=workload.make_critic() if algorithm.needs_critic else None,
        reward_tokenizer=workload.reward_tokenizer,
        prompt_column=workload.prompt_column,
        algorithm=algorithm,
        **options,
    )


def to_step(report: StepReport) -> Step:
    """A step report as it stands in the results file, where a number that is not finite is None."""
    metrics = {name: value if math.isfinite(value) else None for name, value in report.metrics.items()}
    return Step(
        step=report.step,
        step_s=report.step_s,
        generate_s=report.generate_s,
        score_s=report.score_s,
        train_s=report.train_s,
        sync_s=report.sync_s,
        engine_s=report.engine_s,
        tokens_decoded=report.tokens_decoded,
        tokens_trained=report.tokens_trained,
        responses_trained=report.responses_trained,
        reward_mean=report.reward_mean,
        kl=metrics.get("objective/kl", metrics.get("kl")),
        score_busy_s=report.score_busy_s,
        tokens_prefetched=report.tokens_prefetched,
        tokens_scored=report.tokens_scored,
        delta=report.delta,
        score_at=report.score_at,
        chunk_tokens=report.chunk_tokens,
        age_mean=report.age_mean,
        age_max=report.age_max,
        num_deferred=report.num_deferred,
        drawn=report.drawn,
        trained=report.trained,
        in_flight=report.in_flight,
        queued=report.queued,
        rejected=report.rejected,
        trained_lengths=report.trained_lengths,
        metrics=metrics,
    )


def to_timeline(report: StepReport) -> list[TimelineSpan]:
    """The spans of a step, from the first one on."""
    start_s = min((span.start_s for span in report.spans), default=0.0)
    return [
        TimelineSpan(
            step=report.step,
            lane=span.lane,
            name=span.name,
            start_s=round(span.start_s - start_s, 6),
            stop_s=round(span.stop_s - start_s, 6),
            num_tokens=span.num_tokens,
        )
        for span in report.spans
    ]
