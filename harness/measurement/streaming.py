"""Is it worth scoring responses in chunks? ``python -m harness.measurement.streaming --model tiny --out FOLDER``.

Decoding and scoring alone, without training: all responses scored at the end, each when it ends, or fed to the reward
model in chunks while they are decoded. The reward models cost 0.25, 1 and 4 times what the policy does. Placement
``shared`` lets actor and scoring process use all cores, ``split`` gives them one each, as a model of devices of their
own. In a round every mode decodes the same prompts with the same noise; modes take turns, every other round backwards.

The engine is the one that trains; only its learner does nothing, and its generator keeps its weights (see
``harness.measurement.untrained``).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from harness.cores import Placement, split_cores
from harness.environment import describe_environment, num_usable_cores
from harness.measurement.output import carry_out
from harness.measurement.streaming_report import (
    MODES,
    STEM,
    Case,
    ModeRun,
    RewardModel,
    Round,
    Streaming,
    render,
    write_figure,
)
from harness.measurement.untrained import (
    FixedWeights,
    NoLearner,
    NoTraining,
    PromptsFrom,
    Response,
    choose_layers,
    make_reward,
    overlap_of,
)
from harness.settings import load_train_config
from harness.workloads.loading import load_workload
from oppo_kit.backends.hf_generator import HFGenerator
from oppo_kit.backends.hf_scorer import HFRewardScorer
from oppo_kit.engine.loop import OverlapEngine
from oppo_kit.errors import ConfigError, PartFailedError
from oppo_kit.placement.process import ProcessPlacement, place_in_process
from oppo_kit.protocols import Generator, PromptSource
from oppo_kit.telemetry.clock import MonotonicClock
from oppo_kit.types import Prompt, Rollout, RolloutKey, Span

REWARD_COSTS = (0.25, 1.0, 4.0)
MODELS = ("tiny", "smollm2-135m")
# Random weights give scores of order one; a score of other tokens differs by tenths.
SCORE_TOLERANCE = 1e-4
_NUM_SCORER_THREADS = 1
# A round repeats to a few per cent; on two cores a second thread of the actor also takes the scorer's core.
_MIN_GAIN_FRAC = 0.05


def measure(
    model: str,
    placement: Placement,
    *,
    num_rounds: int,
    num_steps: int,
    command: str,
    batch_size: int | None = None,
    response_length: int | None = None,
    reward_costs: Sequence[float] = REWARD_COSTS,
) -> Streaming:
    """One reward model after the other, each in a process that lives for all of its rounds.

    Args:
        model: policy.
        placement: of actor and scorer.
        num_rounds: by reward model and schedule.
        num_steps: with overcommit; 1: without it only, since it shows from the second step on.
        command: to be written down.
        batch_size: B; None: the task's.
        response_length: token limit; None: the task's.
        reward_costs: relative to the policy's.

    Raises:
        ConfigError: too few rounds, steps, responses or cores.
        PartFailedError: modes disagree on a score, or tokens were scored twice.
    """
    limits = [] if response_length is None else [f"sampling.response_length={response_length}"]
    train = load_train_config(options={"model": model, "batch_size": batch_size}, overrides=limits)
    if num_rounds < 1 or num_steps < 1 or train.batch_size < 2 or not all(cost > 0 for cost in reward_costs):
        raise ConfigError(
            f"rounds={num_rounds}, steps={num_steps}, batch_size={train.batch_size}, costs={list(reward_costs)}: at "
            "least 1, 1 and 2 are needed, and costs above 0"
        )
    cores = split_cores(placement)
    environment = describe_environment()
    workload = load_workload(train, num_eval_problems=0)
    cases: list[Case] = []
    with _on_core(cores[0] if cores else None):
        policy = workload.make_policy()
        sampler = HFGenerator(
            policy,
            temperature=train.sampling.temperature,
            stop_token_ids=workload.stop_token_ids,
            seed=train.seed,
        )
        generator = FixedWeights(sampler)
        counts = [1] if cores else thread_counts()
        schedules = [(0, 1)]
        if num_steps > 1:
            schedules.append((train.batch_size // 2, num_steps))
        for cost in reward_costs:
            reward = choose_layers(cost, policy)
            with _scoring_process(
                make_reward(policy, reward.num_layers), cores[1:] if cores else None
            ) as handle:
                bench = Bench(generator, workload.prompts, handle, train.batch_size)
                bench.run("chunk 32", delta=0, num_steps=1, first_draw=0, num_threads=1)  # warms all up
                for delta, steps in schedules:
                    say = f"{model} {placement}, reward cost {cost:g}, delta {delta}"
                    cases.append(_case(bench, reward, delta, steps, counts, num_rounds, say))
    return Streaming(
        model=model,
        placement=placement,
        command=command,
        environment=environment,
        batch_size=train.batch_size,
        response_length=train.sampling.response_length,
        num_policy_layers=policy.config.num_hidden_layers,
        num_scorer_threads=_NUM_SCORER_THREADS,
        cases=cases,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.measurement.streaming", description="Time scoring beside decoding."
    )
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--placement", choices=("shared", "split"), default="shared")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="with overcommit; 1: without it only")
    parser.add_argument(
        "--costs", type=float, nargs="+", default=REWARD_COSTS, help="of the reward model, by the policy's"
    )
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--response-length", type=int)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    given = {
        "--model": options.model,
        "--placement": options.placement,
        "--rounds": options.rounds,
        "--steps": options.steps,
        "--batch-size": options.batch_size,
        "--response-length": options.response_length,
        "--costs": " ".join(f"{cost:g}" for cost in options.costs),
    }
    words = [f"{name} {value}" for name, value in given.items() if value is not None]

    def measure_and_draw() -> Streaming:
        result = measure(
            options.model,
            options.placement,
            num_rounds=options.rounds,
            num_steps=options.steps,
            command=" ".join(["python -m harness.measurement.streaming", *words]),
            batch_size=options.batch_size,
            response_length=options.response_length,
            reward_costs=options.costs,
        )
        write_figure([result], options.out)
        return result

    return carry_out(options.out, STEM, measure_and_draw, lambda result: render([result]))


def thread_counts() -> list[int]:
    """What is tried for the actor where cores are shared."""
    return [1] if num_usable_cores() == 1 else [1, 2]


@dataclass(frozen=True, slots=True)
class Bench:
    """All that a run needs; nothing is left in any of it when a run is over."""

    generator: Generator
    prompts: PromptSource
    handle: ProcessPlacement
    batch_size: int

    def run(
        self, mode: str, *, delta: int, num_steps: int, first_draw: int, num_threads: int
    ) -> tuple[ModeRun, list[Response]]:
        """Decode and score B × steps responses; returns them by draw.

        Raises:
            PartFailedError: the scorer did not read every token once.
        """
        algorithm = NoTraining()
        self.generator.load_weights(0)
        engine = OverlapEngine(
            algorithm=algorithm,
            generator=self.generator,
            scorers={"reward": self.handle},
            learner=NoLearner(),
            prompts=PromptsFrom(self.prompts, first_draw),
            batch_size=self.batch_size,
            num_steps=num_steps,
            overlap=overlap_of(mode, delta),
        )
        torch.set_num_threads(num_threads)
        clock = MonotonicClock()
        start_s = clock.now_s()
        reports = list(engine.run())
        stop_s = clock.now_s()
        spans = [span for report in reports for span in report.spans] + self._late_spans()
        spans = [span for span in spans if "reward" in span.name and start_s <= span.start_s < stop_s]
        done = ModeRun(
            mode=mode,
            num_actor_threads=num_threads,
            seconds=stop_s - start_s,
            generate_s=sum(report.generate_s for report in reports),
            wait_s=sum(report.score_s for report in reports),
            score_busy_s=sum(span.stop_s - span.start_s for span in spans),
            tokens_prefetched=_num_tokens(spans, "feed"),
            tokens_scored=_num_tokens(spans, "score"),
        )
        check_read_once(done, algorithm.num_tokens)
        return done, [response for _, response in sorted(algorithm.responses.items())]

    def _late_spans(self) -> list[Span]:
        """The last score may arrive before the span of its work; after another one, that is here."""
        token_ids = self.prompts.draw(0).token_ids
        rollout = Rollout(
            RolloutKey(-1, 0), Prompt(-1, token_ids, 1), token_ids=[token_ids[0]], finish_reason="length"
        )
        for future in self.handle.submit([rollout]):
            future.result()
        return self.handle.take_spans()


def check_read_once(run: ModeRun, num_tokens: int) -> None:
    """Every token of prompts and responses went through the reward model once.

    Raises:
        PartFailedError: it did not.
    """
    num_read = run.tokens_prefetched + run.tokens_scored
    if num_read != num_tokens:
        raise PartFailedError(
            f"mode {run.mode!r}: the reward model read {num_read} tokens, and prompts and responses have {num_tokens}; "
            "some were read twice or not at all, so its time means nothing"
        )


def compare(responses: Mapping[str, Sequence[Response]]) -> tuple[float, int]:
    """Largest difference of a score from that of ``batch``, over responses of equal tokens; and how many are not equal.

    Raises:
        PartFailedError: a score is another one.
    """
    difference, num_others = 0.0, 0
    for mode, of_mode in responses.items():
        for draw, (expected, response) in enumerate(zip(responses["batch"], of_mode, strict=True)):
            if response.token_ids != expected.token_ids:
                num_others += 1
                continue
            gap = abs(response.score - expected.score)
            if not gap <= SCORE_TOLERANCE:
                raise PartFailedError(
                    f"mode {mode!r} scores draw {draw} {response.score:.6g}, and mode 'batch' {expected.score:.6g}; "
                    f"they may differ by {SCORE_TOLERANCE}: the modes do not do the same work"
                )
            difference = max(difference, gap)
    return difference, num_others


def choose_threads(runs: Sequence[ModeRun]) -> dict[str, int]:
    """Each mode's best count; more threads must be faster by more than noise."""
    chosen: dict[str, ModeRun] = {}
    for run in sorted(runs, key=lambda run: run.num_actor_threads):
        best = chosen.get(run.mode)
        if best is None or run.seconds < (1 - _MIN_GAIN_FRAC) * best.seconds:
            chosen[run.mode] = run
    return {mode: run.num_actor_threads for mode, run in chosen.items()}


def _case(
    bench: Bench,
    reward: RewardModel,
    delta: int,
    num_steps: int,
    counts: Sequence[int],
    num_rounds: int,
    name: str,
) -> Case:
    calibration, num_threads = _calibrate(bench, delta, num_steps, counts)
    rounds: list[Round] = []
    for index in range(num_rounds):
        rounds.append(_round(bench, delta, num_steps, index, num_threads))
        print(f"{name}: round {index + 1} of {num_rounds}", file=sys.stderr, flush=True)
    return Case(reward=reward, delta=delta, num_steps=num_steps, calibration=calibration, rounds=rounds)


def _calibrate(
    bench: Bench, delta: int, num_steps: int, counts: Sequence[int]
) -> tuple[list[ModeRun], dict[str, int]]:
    """Every mode with every thread count, where there are several, and the choice."""
    if len(counts) == 1:
        return [], dict.fromkeys(MODES, counts[0])
    runs = [
        bench.run(mode, delta=delta, num_steps=num_steps, first_draw=0, num_threads=count)[0]
        for mode in MODES
        for count in counts
    ]
    return runs, choose_threads(runs)


def _round(bench: Bench, delta: int, num_steps: int, index: int, num_threads: Mapping[str, int]) -> Round:
    num_draws = bench.batch_size * num_steps
    first = index * num_draws
    runs: list[ModeRun] = []
    responses: dict[str, list[Response]] = {}
    for mode in MODES if index % 2 == 0 else reversed(MODES):
        run, responses[mode] = bench.run(
            mode, delta=delta, num_steps=num_steps, first_draw=first, num_threads=num_threads[mode]
        )
        runs.append(run)
    difference, num_others = compare(responses)
    return Round(
        num_prompt_tokens=sum(len(bench.prompts.draw(first + draw).token_ids) for draw in range(num_draws)),
        response_lengths=[len(response.token_ids) for response in responses["batch"]],
        runs=runs,
        score_difference_max=difference,
        num_other_responses=num_others,
    )


@contextmanager
def _scoring_process(reward: nn.Module, cores: Sequence[int] | None) -> Iterator[ProcessPlacement]:
    scorer = HFRewardScorer(reward)
    handle = place_in_process({"reward": scorer}, num_threads=_NUM_SCORER_THREADS, cores=cores)["reward"]
    try:
        yield handle
    finally:
        handle.close()


@contextmanager
def _on_core(core: int | None) -> Iterator[None]:
    """Pin this thread, and what it starts; threads and cores are as before in the end."""
    num_threads = torch.get_num_threads()
    before = os.sched_getaffinity(0) if core is not None else None
    if core is not None:
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        if before is not None:
            os.sched_setaffinity(0, before)
        torch.set_num_threads(num_threads)


def _num_tokens(spans: Sequence[Span], kind: str) -> int:
    return sum(span.num_tokens for span in spans if span.name == f"{kind} reward")


if __name__ == "__main__":
    sys.exit(main())
