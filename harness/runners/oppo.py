"""Our engine as a runner: ``sequential`` without any overlap, ``overcommit`` with B + Δ in the air.

Both run the same backend, learner and algorithm; only the schedule differs.
"""

from __future__ import annotations

import math
from typing import Any

from harness.runners.base import Evaluate, OnStep, RunSpec
from harness.schema import Evaluation, Step
from harness.workloads.loading import Workload
from oppo_kit.backends.function_scorer import FunctionScorer
from oppo_kit.build import build_engine
from oppo_kit.config import OverlapConfig, TrainConfig
from oppo_kit.engine.loop import OverlapEngine
from oppo_kit.registry import create_algorithm
from oppo_kit.types import StepReport


def run_sequential(
    spec: RunSpec, workload: Workload, evaluate: Evaluate, on_step: OnStep
) -> tuple[list[Step], list[Evaluation]]:
    """Decode all B to their end, score, train, again."""
    overlap = OverlapConfig(schedule="sequential", decode_tokens=spec.train.overlap.decode_tokens)
    return _run(spec, overlap, workload, evaluate, on_step)


def run_overcommit(
    spec: RunSpec, workload: Workload, evaluate: Evaluate, on_step: OnStep
) -> tuple[list[Step], list[Evaluation]]:
    """The configuration's own overlap settings."""
    return _run(spec, spec.train.overlap, workload, evaluate, on_step)


def make_engine(train: TrainConfig, workload: Workload, **options: Any) -> OverlapEngine:
    """An engine on freshly loaded models."""
    algorithm = create_algorithm(train.algo, train.algo_config)
    reward = (
        workload.make_reward()
        if workload.reward_path is not None
        else FunctionScorer(
            workload.reward_functions, workload.tokenizer, prompt_column=workload.prompt_column
        )
    )
    return build_engine(
        train,
        policy=workload.make_policy(),
        tokenizer=workload.tokenizer,
        prompts=workload.prompts,
        reward=reward,
        critic=workload.make_critic() if algorithm.needs_critic else None,
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
        kl=metrics.get("objective/kl"),
        delta=report.delta,
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


def _run(
    spec: RunSpec, overlap: OverlapConfig, workload: Workload, evaluate: Evaluate, on_step: OnStep
) -> tuple[list[Step], list[Evaluation]]:
    train = spec.train.model_copy(update={"overlap": overlap})
    steps: list[Step] = []
    evaluations: list[Evaluation] = []
    with make_engine(train, workload) as engine:

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
            if spec.eval_every and (len(steps) % spec.eval_every == 0 or len(steps) == train.num_steps):
                evaluate_now()
        if spec.save_to is not None:
            engine.learner.save_pretrained(spec.save_to, workload.tokenizer)
    return steps, evaluations
