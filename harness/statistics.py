"""Figures derived from the raw samples of a result: ratios, time to reward, learning differences, summaries.

Knows the results file only; measures nothing and draws nothing. The same result always gives the same
figures, so whoever shows a number derives it here again instead of trusting a stored one.

Which steps count, by position in a run's list of steps:

- **measured**: all but the first ``num_warmup_steps``; the drain belongs to them.
- **drain**: the longest row of steps at the end in which the last draw has been taken (``drawn`` has its
  final value) and that leave fewer than Δ groups in flight or queued: the buffer could no longer be filled to
  B + Δ.
- **steady**: measured, less max(3, ``max_age`` + 1) more steps at the front (until ages have settled), less
  the drain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import fmean, median
from typing import Literal

from scipy import stats

from harness.schema import Difference, Evaluation, Ratio, Result, Run, Runner, Step

# From the slowest that one expects to the fastest: every ratio names the earlier one first.
LADDER = (
    "trl",
    "trl_continuous",
    "trl_overlap",
    "sequential",
    "sample",
    "chunk",
    "chunk_auto",
    "overcommit",
    "both",
)
# What the other runners are held against, the first of them that ran.
BASELINES = ("trl", "sequential")
STAGES = ("generate", "score", "train", "sync", "engine")
# Share of the baseline's gain that counts as "reached": the last tenth is mostly noise between evaluations.
REWARD_GAIN_FRAC = 0.9
# A group may be max_age versions old, so the ages' distribution needs about that many steps to settle.
MIN_SETTLING_STEPS = 3

EvaluationField = Literal["accuracy", "score_mean"]


@dataclass(frozen=True, slots=True)
class RunnerSummary:
    """One runner in numbers, over the measured steps of all its runs; None where nothing was measured.

    Attributes:
        step_s: median step time.
        s_per_response: median over runs of seconds per trained response.
        decoded_tokens_per_s: decoded response tokens by wall second of the whole step.
        stage_fracs: by stage, the share of the step time; they sum to 1 when nothing overlaps or is left out.
        score_busy_frac: seconds that scorers worked, by the step time; beside the actor it can exceed the score stage.
        prefetched_frac: share of the tokens that scorers read which they read before the response had ended; None
            where nobody counts.
        delta_mean: mean Δ.
        score_plans: how many steps scored when, as "batch × 12, chunk 32 × 6".
        age_mean: mean over trained responses.
        deferred_frac: share of trained groups that were carried over at least one update.
        untrained_tokens: tokens decoded less tokens trained, over all runs; negative when the measured steps
            trained more tokens than they decoded, because warm-up steps had decoded them.
        final_accuracy: mean over runs of the last held-out accuracy.
        final_score: mean over runs of the last held-out score.
    """

    name: str
    num_runs: int
    num_steps: int
    step_s: float | None
    s_per_response: float | None
    decoded_tokens_per_s: float | None
    stage_fracs: dict[str, float]
    score_busy_frac: float | None
    prefetched_frac: float | None
    delta_mean: float | None
    score_plans: str
    age_mean: float | None
    age_max: int
    deferred_frac: float | None
    untrained_tokens: int
    final_accuracy: float | None
    final_score: float | None


@dataclass(frozen=True, slots=True)
class Violation:
    """A step whose counts break drawn = trained + in flight + queued + rejected."""

    runner: str
    seed: int
    pair: int
    step: int
    drawn: int
    accounted: int


def fill_derived(result: Result) -> Result:
    """A copy whose derived fields are computed from its raw samples, whatever they held before."""
    bound = result.bound
    if bound is not None:
        medians = {name: summarise_runner(result, name).step_s for name in result.runners}
        shares = {name: bound.step_s[name] / s for name, s in medians.items() if s and name in bound.step_s}
        bound = bound.model_copy(update={"share_reached": shares})
    return result.model_copy(
        update={
            "ratios": ratios(result),
            "ratios_steady": ratios(result, steady=True),
            "time_to_reward_s": time_to_reward_s(result),
            "learning_differences": learning_differences(result),
            "bound": bound,
        }
    )


def ratios(result: Result, steady: bool = False) -> dict[str, Ratio]:
    """How many times more seconds per trained response the first runner takes than the second.

    Runs are compared where ``pair`` and seed agree. A whole-run ratio takes the measured steps of either run,
    the drain included; a steady one takes the positions that are steady in both.

    Returns:
        by "trl/sequential", "sequential/both", "overcommit/both", …: each baseline against every later rung, and every
        rung against the next that ran; a ratio without any pair is left out.
    """
    found: dict[str, Ratio] = {}
    for slow, fast in _rungs(result):
        values = [_pair_ratio(result, *runs, steady=steady) for runs in paired_runs(result, slow, fast)]
        pairs = [value for value in values if value is not None]
        if pairs:
            found[f"{slow}/{fast}"] = Ratio(
                median=median(pairs), low=min(pairs), high=max(pairs), pairs=pairs
            )
    return found


def paired_runs(result: Result, first: str, second: str) -> list[tuple[Run, Run]]:
    """Runs of two runners with the same pair and seed, by pair."""
    others = {(run.pair, run.seed): run for run in result.runners[second].runs}
    runs = sorted(result.runners[first].runs, key=lambda run: (run.pair, run.seed))
    return [(run, others[run.pair, run.seed]) for run in runs if (run.pair, run.seed) in others]


def measured_positions(result: Result, run: Run) -> range:
    """Positions of the steps after the warm-up, the drain included."""
    return range(min(result.workload.num_warmup_steps, len(run.steps)), len(run.steps))


def steady_positions(result: Result, run: Run) -> range:
    """Positions of the steady steps; empty in a short run. See the module's text for the definition."""
    first = result.workload.num_warmup_steps + max(MIN_SETTLING_STEPS, max_age(result) + 1)
    end = len(run.steps) - num_drain_steps(run)
    return range(min(first, end), end)


def num_drain_steps(run: Run) -> int:
    """Steps at the end after the last draw that left fewer than Δ groups in flight or queued."""
    count = 0
    for step in reversed(run.steps):
        if step.drawn != run.steps[-1].drawn or step.in_flight + step.queued >= step.delta:
            break
        count += 1
    return count


def max_age(result: Result) -> int:
    """The configured bound on ages; the largest age seen when the configuration does not say."""
    overlap = result.workload.config.get("overlap")
    if isinstance(overlap, dict) and isinstance(overlap.get("max_age"), int):
        return overlap["max_age"]
    return max((s.age_max for r in result.runners.values() for run in r.runs for s in run.steps), default=0)


def s_per_response(run: Run, positions: range) -> float | None:
    """Seconds per trained response over these steps; None when they trained nothing."""
    steps = [run.steps[position] for position in positions]
    num_responses = sum(step.responses_trained for step in steps)
    return sum(step.step_s for step in steps) / num_responses if num_responses else None


def baseline_name(result: Result) -> str | None:
    """The runner that the others are held against: trl, else sequential, else none."""
    return next((name for name in BASELINES if name in result.runners and result.runners[name].runs), None)


def judged_by(result: Result) -> EvaluationField:
    """What a policy is judged by: held-out accuracy, or the held-out score where nobody can tell what is right."""
    evaluations = [e for runner in result.runners.values() for run in runner.runs for e in run.evaluations]
    has_accuracy = any(evaluation.accuracy is not None for evaluation in evaluations)
    return "accuracy" if has_accuracy or not evaluations else "score_mean"


def reward_target(result: Result) -> float | None:
    """What it is ``judged_by`` at 90 % of the baseline's mean gain; None without a baseline or a gain."""
    baseline = baseline_name(result)
    if baseline is None:
        return None
    curves = [_curve(run, judged_by(result)) for run in result.runners[baseline].runs]
    ends = [(curve[0][1], curve[-1][1]) for curve in curves if len(curve) > 1]
    if not ends:
        return None
    gain = fmean(final - initial for initial, final in ends)
    return fmean(initial for initial, _ in ends) + REWARD_GAIN_FRAC * gain if gain > 0 else None


def time_to_reward_s(result: Result) -> dict[str, float | None]:
    """By runner, the median over its runs of the training seconds until ``reward_target`` is first met.

    Linear between evaluations. A run that never meets it counts as infinitely slow, so the median is None
    when half of the runs or more never do.
    """
    target = reward_target(result)
    found: dict[str, float | None] = {}
    for name, runner in result.runners.items():
        times = (
            [_first_crossing(_curve(run, judged_by(result)), target) for run in runner.runs]
            if target is not None
            else []
        )
        middle = median(times) if times else float("inf")
        found[name] = middle if middle < float("inf") else None
    return found


def learning_differences(result: Result) -> dict[str, Difference]:
    """Final held-out differences of the later rung less the earlier one, paired by seed.

    Returns:
        accuracy under "overcommit-trl", "both-sequential", …, as in ``ratios``; the held-out score under the same
        with "/score_mean"; a difference without any pair is left out.
    """
    found: dict[str, Difference] = {}
    for earlier, later in _rungs(result):
        accuracy = _paired_difference(result.runners[later], result.runners[earlier], "accuracy")
        score = _paired_difference(result.runners[later], result.runners[earlier], "score_mean")
        found |= {f"{later}-{earlier}": accuracy} if accuracy else {}
        found |= {f"{later}-{earlier}/score_mean": score} if score else {}
    return found


def mean_difference(differences: Sequence[float], *, confidence: float = 0.9) -> Difference:
    """Mean ± t((1 + confidence) / 2, n - 1) · s / √n; no interval with fewer than two pairs."""
    mean, num_pairs = fmean(differences), len(differences)
    if num_pairs < 2:
        return Difference(mean=mean, low=None, high=None, pairs=list(differences))
    half = float(stats.t.ppf((1 + confidence) / 2, num_pairs - 1) * stats.sem(differences))
    return Difference(mean=mean, low=mean - half, high=mean + half, pairs=list(differences))


def summarise_runner(result: Result, name: str) -> RunnerSummary:
    """One runner in numbers; see ``RunnerSummary``."""
    runs = result.runners[name].runs
    steps = [run.steps[position] for run in runs for position in measured_positions(result, run)]
    total_s = sum(step.step_s for step in steps)
    num_responses = sum(step.responses_trained for step in steps)
    per_response = [
        s for run in runs if (s := s_per_response(run, measured_positions(result, run))) is not None
    ]
    num_deferred = sum(step.num_deferred for step in steps)
    tokens_decoded = sum(step.tokens_decoded for step in steps)
    return RunnerSummary(
        name=name,
        num_runs=len(runs),
        num_steps=len(steps),
        step_s=median(step.step_s for step in steps) if steps else None,
        s_per_response=median(per_response) if per_response else None,
        decoded_tokens_per_s=tokens_decoded / total_s if total_s else None,
        stage_fracs={
            stage: sum(getattr(s, f"{stage}_s") for s in steps) / total_s for stage in STAGES if total_s
        },
        score_busy_frac=sum(step.score_busy_s for step in steps) / total_s if total_s else None,
        prefetched_frac=_prefetched_frac(steps),
        delta_mean=fmean(step.delta for step in steps) if steps else None,
        score_plans=_score_plans(steps),
        age_mean=sum(s.age_mean * s.responses_trained for s in steps) / num_responses
        if num_responses
        else None,
        age_max=max((step.age_max for step in steps), default=0),
        deferred_frac=num_deferred * result.workload.group_size / num_responses if num_responses else None,
        untrained_tokens=tokens_decoded - sum(step.tokens_trained for step in steps),
        final_accuracy=_mean_or_none([f for run in runs if (f := final_value(run, "accuracy")) is not None]),
        final_score=_mean_or_none([f for run in runs if (f := final_value(run, "score_mean")) is not None]),
    )


def _prefetched_frac(steps: Sequence[Step]) -> float | None:
    prefetched = sum(step.tokens_prefetched for step in steps)
    num_read = prefetched + sum(step.tokens_scored for step in steps)
    return prefetched / num_read if num_read else None


def _score_plans(steps: Sequence[Step]) -> str:
    plans = Counter(f"{s.score_at} {s.chunk_tokens}" if s.score_at == "chunk" else s.score_at for s in steps)
    return ", ".join(f"{plan} × {count}" for plan, count in plans.most_common())


def final_value(run: Run, field: EvaluationField) -> float | None:
    """The last held-out value; None if that evaluation, or all, lack it."""
    last = max(run.evaluations, key=lambda evaluation: evaluation.step, default=None)
    return None if last is None else getattr(last, field)


def conservation_violations(result: Result) -> list[Violation]:
    """Every step in which drawn = trained + in flight + queued + rejected does not hold."""
    return [
        Violation(name, run.seed, run.pair, step.step, step.drawn, accounted_groups(step))
        for name, runner in result.runners.items()
        for run in runner.runs
        for step in run.steps
        if step.drawn != accounted_groups(step)
    ]


def accounted_groups(step: Step) -> int:
    """Trained + in flight + queued + rejected."""
    return step.trained + step.in_flight + step.queued + sum(step.rejected.values())


def _rungs(result: Result) -> list[tuple[str, str]]:
    names = [name for name in LADDER if name in result.runners]
    steps = set(pairwise(names))
    return [pair for pair in combinations(names, 2) if pair[0] in BASELINES or pair in steps]


def _pair_ratio(result: Result, slow: Run, fast: Run, *, steady: bool) -> float | None:
    if steady:
        both = [steady_positions(result, run) for run in (slow, fast)]
        common = range(max(p.start for p in both), min(p.stop for p in both))
        slow_s, fast_s = s_per_response(slow, common), s_per_response(fast, common)
    else:
        slow_s = s_per_response(slow, measured_positions(result, slow))
        fast_s = s_per_response(fast, measured_positions(result, fast))
    return slow_s / fast_s if slow_s is not None and fast_s else None


def _curve(run: Run, field: EvaluationField) -> list[tuple[float, float]]:
    """(training seconds, value) by step, evaluations without the value left out."""
    ordered: list[Evaluation] = sorted(run.evaluations, key=lambda evaluation: evaluation.step)
    return [(e.elapsed_train_s, getattr(e, field)) for e in ordered if getattr(e, field) is not None]


def _first_crossing(curve: Sequence[tuple[float, float]], target: float) -> float:
    if curve and curve[0][1] >= target:
        return curve[0][0]
    for (before_s, before), (after_s, after) in pairwise(curve):
        if after >= target:
            return before_s + (after_s - before_s) * (target - before) / (after - before)
    return float("inf")


def _paired_difference(first: Runner, second: Runner, field: EvaluationField) -> Difference | None:
    firsts, seconds = _finals_by_seed(first, field), _finals_by_seed(second, field)
    differences = [firsts[seed] - seconds[seed] for seed in sorted(firsts.keys() & seconds.keys())]
    return mean_difference(differences) if differences else None


def _finals_by_seed(runner: Runner, field: EvaluationField) -> dict[int, float]:
    """A seed that ran more than once counts once, with its mean: repeats of a seed are not independent."""
    found: dict[int, list[float]] = {}
    for run in runner.runs:
        value = final_value(run, field)
        if value is not None:
            found.setdefault(run.seed, []).append(value)
    return {seed: fmean(values) for seed, values in found.items()}


def _mean_or_none(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
