"""The best cost per token of each stage, measured alone: ``python -m harness.measurement.bound SPEC RESULT``.

The bound of a step is tokens × these costs. A slow run cannot flatter it: decoding is timed on full batches of short
contexts, where a token is cheapest; scoring and training on a real batch; the best repetition counts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel

from harness.cores import Placement
from harness.runners.base import RunSpec
from harness.runners.link import connect_to_parent
from harness.schema import Bound, Runner

_NUM_REPETITIONS = 3
_DECODE_WINDOW_TOKENS = 24


class StageCosts(BaseModel):
    """Seconds per response token of each stage, on its own; the critic's values count to training."""

    decode_s_per_token: float
    score_s_per_token: float
    train_s_per_token: float


def best_of(costs: list[StageCosts]) -> StageCosts:
    """The cheapest of several measurements, stage by stage."""
    return StageCosts(
        **{field: min(getattr(cost, field) for cost in costs) for field in StageCosts.model_fields}
    )


def bound_of(
    costs: StageCosts,
    runners: dict[str, Runner],
    num_warmup_steps: int,
    *,
    placement: Placement = "shared",
) -> Bound:
    """Bound and share reached per runner, at its median step.

    ``shared``: the sum over the stages. ``split``: the slower of actor (decoding and training) and scorers.
    """
    step_s, share = {}, {}
    for name, runner in runners.items():
        steps = [step for run in runner.runs for step in run.steps[num_warmup_steps:]]
        if not steps:
            continue
        decoded = median(step.tokens_decoded for step in steps)
        trained = median(step.tokens_trained for step in steps)
        actor_s = costs.decode_s_per_token * decoded + costs.train_s_per_token * trained
        scorers_s = costs.score_s_per_token * trained
        step_s[name] = max(actor_s, scorers_s) if placement == "split" else actor_s + scorers_s
        share[name] = step_s[name] / median(step.step_s for step in steps)
    return Bound(**costs.model_dump(), step_s=step_s, share_reached=share)


def measure_costs(spec: RunSpec) -> StageCosts:
    """Time each stage alone on this workload, in this process."""
    from harness.runners.oppo import make_engine
    from harness.workloads.loading import load_workload
    from oppo_kit.backends.hf_generator import HFGenerator
    from oppo_kit.backends.vllm_generator import VLLMGenerator
    from oppo_kit.config import OverlapConfig
    from oppo_kit.telemetry.clock import MonotonicClock
    from oppo_kit.types import Rollout, RolloutKey

    clock = MonotonicClock()
    train = spec.train.model_copy(update={"overlap": OverlapConfig(schedule="sequential"), "num_steps": 1})
    workload = load_workload(train, num_eval_problems=0)

    def fastest_s(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(_NUM_REPETITIONS):
            start_s = clock.now_s()
            work()
            seconds.append(clock.now_s() - start_s)
        return min(seconds)

    with make_engine(train, workload) as engine:
        batch = engine.collect()
        num_tokens = int(batch.response_lengths.sum())
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]

        def score() -> None:
            for handle in engine.scorers.values():
                for future in handle.submit(rollouts):
                    future.result()

        score_s = fastest_s(score)
        train_batch = engine.algorithm.prepare(batch)

        def train_once() -> None:
            if engine.algorithm.needs_critic:
                engine.learner.compute_values(batch)
            engine.learner.update(train_batch, engine.algorithm)

        train_s = fastest_s(train_once)
        # No stop token: every row stays, so each window decodes exactly rows × tokens.
        settings: Any = {
            "temperature": train.sampling.temperature,
            "stop_token_ids": (),
            "seed": spec.seed,
        }
        num_rows = (train.batch_size + spec.train.overlap.delta) * engine.algorithm.group_size
        if isinstance(engine.generator, VLLMGenerator):
            vllm = engine.generator.engine
            generator = VLLMGenerator(engine.learner.policy, vllm, **settings)
            num_rows = min(num_rows, vllm.max_requests)
        else:
            generator = HFGenerator(engine.learner.policy, **settings)
        prompts = [workload.prompts.draw(draw_id) for draw_id in range(num_rows)]
        generator.admit([Rollout(RolloutKey(prompt.draw_id, 0), prompt) for prompt in prompts])
        generator.decode(2)
        window = min(_DECODE_WINDOW_TOKENS, max(1, (train.sampling.response_length - 2) // _NUM_REPETITIONS))
        decode_s = fastest_s(lambda: generator.decode(window))
    return StageCosts(
        decode_s_per_token=decode_s / (num_rows * window),
        score_s_per_token=score_s / num_tokens,
        train_s_per_token=train_s / num_tokens,
    )


def main(spec_file: Path, result_file: Path) -> None:
    """Measure in this process, with the specification's thread count."""
    connect_to_parent()
    import torch
    from transformers import set_seed

    from harness.environment import quieten_transformers

    spec = RunSpec.model_validate_json(spec_file.read_text())
    if spec.cores is not None:
        os.sched_setaffinity(0, spec.cores[:1])
    torch.set_num_threads(spec.num_threads)
    set_seed(spec.seed)
    quieten_transformers()
    result_file.write_text(measure_costs(spec).model_dump_json())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
