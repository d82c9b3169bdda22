"""Small synthetic results with numbers that can be checked by hand. Deterministic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.schema import Environment, Evaluation, Result, Run, Runner, Step, UtilisationSeries, Workload

BATCH_SIZE = 4
NUM_STEPS = 12
NUM_WARMUP_STEPS = 2
MAX_AGE = 2


def make_step(
    step: int, step_s: float, *, delta: int = 0, num_steps: int = NUM_STEPS, **changes: Any
) -> Step:
    """A step of B groups with one response each; draws are taken to B + Δ until num_steps × B are drawn."""
    trained = (step + 1) * BATCH_SIZE
    drawn = min(trained + delta, num_steps * BATCH_SIZE)
    values: dict[str, Any] = {
        "step": step,
        "step_s": step_s,
        "generate_s": 0.5 * step_s,
        "score_s": 0.125 * step_s,
        "train_s": 0.25 * step_s,
        "sync_s": 0.0625 * step_s,
        "engine_s": 0.0625 * step_s,
        "tokens_decoded": 100,
        "tokens_trained": 80,
        "responses_trained": BATCH_SIZE,
        "reward_mean": 0.1 * step,
        "kl": 0.01,
        "delta": delta,
        "chunk_tokens": 32,
        "age_mean": 0.5 if delta else 0.0,
        "age_max": 1 if delta else 0,
        "num_deferred": 1 if delta else 0,
        "drawn": drawn,
        "trained": trained,
        "in_flight": drawn - trained,
        "queued": 0,
        "trained_lengths": [10, 20, 20, 30],
    }
    return Step(**(values | changes))


def make_evaluation(step: int, elapsed_train_s: float, accuracy: float | None, **changes: Any) -> Evaluation:
    """One held-out evaluation; the score is twice the accuracy."""
    values: dict[str, Any] = {
        "step": step,
        "elapsed_train_s": elapsed_train_s,
        "responses_trained": step * BATCH_SIZE,
        "accuracy": accuracy,
        "score_mean": None if accuracy is None else 2 * accuracy,
        "length_mean": 20.0,
        "eval_s": 1.0,
    }
    return Evaluation(**(values | changes))


def make_run(
    step_s: Sequence[float],
    *,
    seed: int = 0,
    pair: int = 0,
    delta: int = 0,
    accuracies: Sequence[float | None] = (0.2, 0.5, 0.8),
    utilisation: Sequence[UtilisationSeries] = (),
) -> Run:
    """A run; evaluations stand at equal distances of training time, the first before training."""
    total_s = sum(step_s)
    num_intervals = max(len(accuracies) - 1, 1)
    return Run(
        seed=seed,
        pair=pair,
        num_threads=2,
        started_at="2025-01-01T00:00:00+00:00",
        total_train_s=total_s,
        setup_s=3.0,
        peak_rss_bytes=2**30,
        steps=[make_step(i, s, delta=delta, num_steps=len(step_s)) for i, s in enumerate(step_s)],
        evaluations=[
            make_evaluation(i * len(step_s) // num_intervals, total_s * i / num_intervals, accuracy)
            for i, accuracy in enumerate(accuracies)
        ],
        utilisation=list(utilisation),
    )


def make_result(runs: dict[str, list[Run]], **changes: Any) -> Result:
    """A result of these runs by runner."""
    workload = Workload(
        task="tiny",
        algorithm="ppo",
        model="tiny",
        reward="tiny",
        batch_size=BATCH_SIZE,
        num_steps=NUM_STEPS,
        num_warmup_steps=NUM_WARMUP_STEPS,
        response_length=53,
        temperature=0.7,
        dtype="float32",
        num_eval_problems=256,
        eval_sha256="0" * 64,
        config={"algo": "ppo", "overlap": {"max_age": MAX_AGE}},
    )
    values: dict[str, Any] = {
        "name": "synthetic",
        "command": "oppo-kit bench --algo ppo",
        "is_quick": False,
        "environment": Environment(
            commit="0123456789abcdef",
            is_dirty=False,
            python="3.11.9",
            platform="Linux",
            cpu="Test CPU",
            num_cpu_cores=2,
            memory_bytes=8 * 2**30,
            packages={"torch": "2.6.0", "trl": "1.12.0"},
        ),
        "workload": workload,
        "runners": {
            name: Runner(name=name, description=f"the {name} loop", runs=list(of_runner))
            for name, of_runner in runs.items()
        },
    }
    return Result(**(values | changes))


def without_accuracy(result: Result) -> Result:
    """The same where nobody can tell what is right: scores only."""
    for runner in result.runners.values():
        for run in runner.runs:
            for evaluation in run.evaluations:
                evaluation.accuracy = None
    return result


def make_ladder() -> Result:
    """Three pairs of three runners.

    Seconds per step of pair i, all after the two warm-up steps of 100 s: trl 8, 10, 12; sequential 4, 4, 4;
    overcommit 2, 2, 2 with Δ = 6 > B = 4, whose last two steps are the drain and take 4 s. So trl/sequential
    is 2, 2.5, 3; trl/overcommit over the run's ten measured steps (8 × 2 + 2 × 4 = 24 s) is 80/24, 100/24,
    120/24, and over the steady ones 4, 5, 6.
    """
    runs: dict[str, list[Run]] = {"trl": [], "sequential": [], "overcommit": []}
    for pair, trl_s in enumerate((8.0, 10.0, 12.0)):
        warm = [100.0] * NUM_WARMUP_STEPS
        runs["trl"].append(make_run([*warm, *[trl_s] * 10], seed=pair, pair=pair, accuracies=(0.2, 0.5, 0.7)))
        runs["sequential"].append(
            make_run([*warm, *[4.0] * 10], seed=pair, pair=pair, accuracies=(0.2, 0.5, 0.7))
        )
        finals = (0.71, 0.69, 0.67)
        runs["overcommit"].append(
            make_run(
                [*warm, *[2.0] * 8, 4.0, 4.0],
                seed=pair,
                pair=pair,
                delta=6,
                accuracies=(0.2, 0.45, finals[pair]),
            )
        )
    return make_result(runs)
