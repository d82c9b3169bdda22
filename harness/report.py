"""The report of one result: ``report.md`` with its figures, for people.

Shows what ``harness.statistics`` derives and decides nothing itself. A quantity that was not measured is
shown as such, never as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from harness.figures import display_unit, write_figures
from harness.formatting import (
    ABSENT,
    format_difference,
    format_number,
    format_percent,
    format_ratio_range,
    format_seconds,
    format_signed,
    markdown_table,
    one_sentence_of,
)
from harness.response_lengths import drawn_lengths, lengths_before_drain, summarise_lengths
from harness.schema import Result, Runner, load_result
from harness.statistics import (
    MIN_SETTLING_STEPS,
    REWARD_GAIN_FRAC,
    STAGES,
    RunnerSummary,
    accounted_groups,
    baseline_name,
    conservation_violations,
    fill_derived,
    judged_by,
    max_age,
    reward_target,
    summarise_runner,
)

REPORT_NAME = "report.md"
# Fewer pairs say nothing about the spread; a full benchmark runs at least this many.
MIN_PAIRS = 3
# Stages are timed one by one, so they may miss the step's time by rounding, not by more.
STAGE_SUM_TOLERANCE_FRAC = 0.01


def report_runs(paths: Sequence[Path]) -> list[Path]:
    """Render the reports of finished runs again, each next to its results file.

    Args:
        paths: run folders or their ``result.json``.

    Returns:
        the report files, in order.

    Raises:
        StateError: a results file is missing or does not fit; every file is read before the first report is
            written.
    """
    results = [(load_result(path), path if path.is_dir() else path.parent) for path in paths]
    return [write_report(result, folder) for result, folder in results]


def write_report(result: Result, folder: Path) -> Path:
    """Write ``report.md`` and its PNG figures; derived figures are computed anew from the raw samples."""
    folder.mkdir(parents=True, exist_ok=True)
    result = fill_derived(result)
    figures = write_figures(result, folder)
    file = folder / REPORT_NAME
    file.write_text(render_report(result, figures), encoding="utf-8")
    return file


def render_report(result: Result, figures: dict[str, str]) -> str:
    """The report's Markdown; ``figures`` holds file names by figure, as ``write_figures`` returns them."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("harness", "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # Markdown, not HTML
        keep_trailing_newline=True,
    )

    def image(name: str, caption: str) -> str:
        return f"![{caption}]({figures[name]})" if name in figures else ""

    text = environment.get_template("report.md.j2").render(
        **_template_values(result), table=markdown_table, image=image
    )
    return _squeeze_blank_lines(text)


def _template_values(result: Result) -> dict[str, Any]:
    summaries = [summarise_runner(result, name) for name in result.runners]
    return {
        "result": result,
        "alarms": _alarms(result, summaries),
        "sentence": one_sentence_of(result),
        "work": _work(result),
        "ratios": _ratio_rows(result.ratios),
        "ratios_steady": _ratio_rows(result.ratios_steady),
        "settling_steps": max(MIN_SETTLING_STEPS, max_age(result) + 1),
        "names": list(result.runners),
        "runners": runner_rows(result, summaries),
        "descriptions": [_describe(name, runner) for name, runner in result.runners.items()],
        "bound_text": _bound_text(result),
        "engine_text": _engine_text(summaries),
        "learning": _learning_rows(result),
        "time_to_reward_text": _time_to_reward_text(result),
        "time_to_reward": _time_to_reward_rows(result),
        "conservation": [_conservation_line(name, runner) for name, runner in result.runners.items()],
        "lengths": _length_rows(result),
        "utilisation": _utilisation_rows(result),
        "absent": _absent_lines(result),
        "has_gpu": any(s.name.startswith("gpu") for _, s in _series(result)),
        "environment": _environment_rows(result),
    }


def _alarms(result: Result, summaries: Sequence[RunnerSummary]) -> list[str]:
    """What makes the figures below worthless or doubtful, in capitals."""
    alarms: list[str] = []
    violations = conservation_violations(result)
    if violations:
        first = violations[0]
        num_steps = sum(len(run.steps) for runner in result.runners.values() for run in runner.runs)
        alarms.append(
            f"CONSERVATION VIOLATED in {len(violations)} of {num_steps} steps, first in {first.runner}, "
            f"seed {first.seed}, pair {first.pair}, step {first.step}: drawn {first.drawn}, but trained + in "
            f"flight + queued + rejected = {first.accounted}. Groups were lost or counted twice; do not use "
            "these figures."
        )
    totals = {
        name: sorted({sum(step.responses_trained for step in run.steps) for run in runner.runs})
        for name, runner in result.runners.items()
    }
    if len({total for of_runner in totals.values() for total in of_runner}) > 1:
        listed = "; ".join(f"{name} {', '.join(map(str, of_runner))}" for name, of_runner in totals.items())
        alarms.append(f"NOT THE SAME WORK: responses trained per run differ ({listed}).")
    for summary in summaries:
        total_frac = sum(summary.stage_fracs.values())
        if summary.stage_fracs and abs(total_frac - 1) > STAGE_SUM_TOLERANCE_FRAC:
            alarms.append(
                f"STAGES DO NOT ADD UP: {summary.name}'s stages are {total_frac:.0%} of its step time."
            )
    num_pairs = min((len(ratio.pairs) for ratio in result.ratios.values()), default=MIN_PAIRS)
    if num_pairs < MIN_PAIRS and not result.is_quick:
        alarms.append(f"FEW PAIRS: {num_pairs} of at least {MIN_PAIRS}; the range says little.")
    return alarms


def _work(result: Result) -> str:
    work = result.workload
    return (
        f"Every runner did the same work: {work.algorithm} on task {work.task}, policy {work.model}, reward "
        f"{work.reward}, {work.num_steps} steps of B = {work.batch_size} groups of {work.group_size} response"
        f"{'' if work.group_size == 1 else 's'}, at most {work.response_length} tokens at temperature "
        f"{format_number(work.temperature)}, {work.dtype}, placement {work.placement}, backend "
        f"{work.backend}; {work.num_eval_problems} held-out problems."
    )


def _ratio_rows(ratios: dict[str, Any]) -> list[list[str]]:
    return [
        [
            name,
            f"{ratio.median:.2f}",
            format_ratio_range(ratio),
            str(len(ratio.pairs)),
            ", ".join(f"{value:.2f}" for value in ratio.pairs),
        ]
        for name, ratio in ratios.items()
    ]


def runner_rows(result: Result, summaries: Sequence[RunnerSummary]) -> list[list[str]]:
    """What each runner did and cost, one row a quantity: its label, then one cell a runner."""
    bound = result.bound
    rows: list[tuple[str, Callable[[RunnerSummary], str]]] = [
        ("Runs", lambda s: str(s.num_runs)),
        ("Measured steps, all runs", lambda s: str(s.num_steps)),
        (
            "Threads",
            lambda s: ", ".join(sorted({str(run.num_threads) for run in result.runners[s.name].runs})),
        ),
        ("Median step time", lambda s: format_seconds(s.step_s)),
        ("Time per trained response", lambda s: format_seconds(s.s_per_response)),
        ("Decoded tokens/s", lambda s: format_number(s.decoded_tokens_per_s)),
        ("Decoded less trained (tokens)", lambda s: f"{s.untrained_tokens:+d}"),
        *((f"{stage.capitalize()} share", _stage_cell(stage)) for stage in STAGES),
        ("Scorers busy, share of the step", lambda s: format_percent(s.score_busy_frac)),
        ("Scored tokens read before the end", lambda s: format_percent(s.prefetched_frac)),
        ("Mean Δ", lambda s: format_number(s.delta_mean)),
        ("Scored at (steps)", lambda s: s.score_plans),
        ("Mean age (versions)", lambda s: format_number(s.age_mean)),
        ("Largest age (versions)", lambda s: str(s.age_max)),
        ("Deferred groups", lambda s: format_percent(s.deferred_frac)),
        ("Final held-out accuracy", lambda s: format_percent(s.final_accuracy)),
        ("Final held-out score", lambda s: format_number(s.final_score)),
        ("Peak memory, largest run", lambda s: _peak_memory(result.runners[s.name])),
        ("Lower bound on the step", lambda s: format_seconds(bound.step_s.get(s.name) if bound else None)),
        ("Bound / median step", lambda s: format_percent(bound.share_reached.get(s.name) if bound else None)),
    ]
    return [[label, *(cell(summary) for summary in summaries)] for label, cell in rows]


def _stage_cell(stage: str) -> Callable[[RunnerSummary], str]:
    return lambda summary: format_percent(summary.stage_fracs.get(stage))


def _peak_memory(runner: Runner) -> str:
    peaks = [run.peak_rss_bytes for run in runner.runs if run.peak_rss_bytes is not None]
    return f"{max(peaks) / 2**30:.2f} GiB" if peaks else ABSENT


def _describe(name: str, runner: Runner) -> str:
    line = f"**{name}**: {runner.description}."
    if runner.calibration_step_s:
        tried = ", ".join(
            f"{threads} thread{'' if threads == '1' else 's'} {'/'.join(format_seconds(s) for s in seconds)}"
            for threads, seconds in runner.calibration_step_s.items()
        )
        line += f" Calibration steps: {tried}."
    return line


def _bound_text(result: Result) -> str:
    bound = result.bound
    if bound is None:
        return "No lower bound was measured."
    over_stages = "summed over stages that take turns, as without overlap"
    if result.workload.placement == "split":
        over_stages = "of the slower of actor (decoding and training) and scorers"
    return (
        f"The lower bound is tokens times the best separately measured cost per token, {over_stages}. "
        f"Per token: decode {format_seconds(bound.decode_s_per_token)}, score "
        f"{format_seconds(bound.score_s_per_token)}, train {format_seconds(bound.train_s_per_token)}."
    )


def _engine_text(summaries: Sequence[RunnerSummary]) -> str:
    shares = [f"{s.name} {format_percent(s.stage_fracs['engine'])}" for s in summaries if s.stage_fracs]
    if not shares:
        return "There are no measured steps."
    return f"The engine's own time, which no part accounts for: {', '.join(shares)} of the step."


def _learning_rows(result: Result) -> list[list[str]]:
    rows: list[list[str]] = []
    for key, difference in result.learning_differences.items():
        pair, _, field = key.partition("/")
        later, _, earlier = pair.partition("-")
        mean, interval = format_difference(difference, is_accuracy=not field)
        seeds = [format_signed(value, is_accuracy=not field) for value in difference.pairs]
        quantity = "score" if field else "accuracy (points)"
        rows.append(
            [f"{later} less {earlier}, {quantity}", mean, interval, str(len(seeds)), ", ".join(seeds)]
        )
    return rows


def _time_to_reward_text(result: Result) -> str:
    baseline, target = baseline_name(result), reward_target(result)
    if baseline is None:
        return "Without trl or sequential there is no baseline gain, so no time to reward."
    if target is None:
        return f"{baseline} has no gain in held-out {_judged(result)}, so there is no time to reward."
    goal = format_percent(target) if judged_by(result) == "accuracy" else format_number(target)
    return (
        f"Time to reward: training time, evaluation excluded, to a held-out {_judged(result)} of {goal}, which is "
        f"{REWARD_GAIN_FRAC:.0%} of {baseline}'s mean gain; median over runs, linear between evaluations."
    )


def _judged(result: Result) -> str:
    return "accuracy" if judged_by(result) == "accuracy" else "score"


def _time_to_reward_rows(result: Result) -> list[list[str]]:
    if reward_target(result) is None:
        return []
    return [
        [name, format_seconds(seconds) if seconds is not None else "not reached by half of its runs or more"]
        for name, seconds in result.time_to_reward_s.items()
    ]


def _conservation_line(name: str, runner: Runner) -> str:
    steps = [step for run in runner.runs for step in run.steps]
    if not steps:
        return f"{name}: no steps."
    num_broken = sum(step.drawn != accounted_groups(step) for step in steps)
    ends = [run.steps[-1] for run in runner.runs if run.steps]
    rejected: dict[str, int] = {}
    for step in ends:
        for reason, count in step.rejected.items():
            rejected[reason] = rejected.get(reason, 0) + count
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(rejected.items()))
    sign = "=" if sum(map(accounted_groups, ends)) == sum(step.drawn for step in ends) else "≠"
    verdict = f"holds in all {len(steps)} steps."
    if num_broken:
        verdict = f"**VIOLATED in {num_broken} of {len(steps)} steps.**"
    return (
        f"{name}: {sum(s.drawn for s in ends)} groups drawn {sign} {sum(s.trained for s in ends)} trained + "
        f"{sum(s.in_flight for s in ends)} in flight + {sum(s.queued for s in ends)} queued + "
        f"{sum(rejected.values())} rejected{f' ({reasons})' if reasons else ''} at the end of {len(ends)} "
        f"run{'' if len(ends) == 1 else 's'}; {verdict}"
    )


def _length_rows(result: Result) -> list[list[str]]:
    rows: list[list[str]] = []
    for name, runner in result.runners.items():
        drawn, before = drawn_lengths(runner), lengths_before_drain(runner)
        lists = [(f"{name}, drawn", drawn)]
        if len(before) != len(drawn):
            lists.append((f"{name}, trained before the drain", before))
        for label, lengths in lists:
            found = summarise_lengths(lengths)
            if found is not None:
                values = [f"{value:.1f}" for value in (found.mean, found.p50, found.p90)]
                rows.append([label, str(found.num_responses), *values, str(found.max)])
    return rows


def _series(result: Result) -> list[tuple[str, Any]]:
    return [
        (name, s) for name, runner in result.runners.items() for run in runner.runs for s in run.utilisation
    ]


def _utilisation_rows(result: Result) -> list[list[str]]:
    rows: list[list[str]] = []
    for quantity in sorted({series.name for _, series in _series(result)}):
        for name in result.runners:
            samples = [s for n, s in _series(result) if n == name and s.name == quantity]
            values = [value for series in samples for value in series.values]
            present = [value for value in values if value is not None]
            if not present:
                continue
            unit, factor = display_unit(samples[0].unit)
            cells = [
                f"{format_number(v * factor)} {unit}" for v in (sum(present) / len(present), max(present))
            ]
            rows.append([quantity, name, *cells, str(len(present)), str(len(values) - len(present))])
    return rows


def _absent_lines(result: Result) -> list[str]:
    """One line per quantity and reason, with the runners it is absent from."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, series in _series(result):
        if all(value is None for value in series.values):
            runners = found.setdefault((series.name, series.absent_reason or "no reason recorded"), [])
            if name not in runners:
                runners.append(name)
    return [
        f"{quantity} is absent ({', '.join(names)}): {reason}"
        for (quantity, reason), names in sorted(found.items())
    ]


def _environment_rows(result: Result) -> list[list[str]]:
    where = result.environment
    dirty = {True: " with uncommitted changes", False: "", None: ""}[where.is_dirty]
    seeds = sorted({run.seed for runner in result.runners.values() for run in runner.runs})
    return [
        ["Commit", f"{where.commit or 'outside a checkout'}{dirty}"],
        ["CPU", f"{where.cpu}, {where.num_cpu_cores} cores, {where.memory_bytes / 2**30:.1f} GiB"],
        ["GPU", ", ".join(where.gpus) or "none seen"],
        ["Platform", f"{where.platform}, Python {where.python}"],
        ["Packages", ", ".join(f"{name} {version}" for name, version in sorted(where.packages.items()))],
        ["Seeds", ", ".join(map(str, seeds))],
        [
            "Held-out set",
            f"{result.workload.num_eval_problems} problems, sha256 {result.workload.eval_sha256[:16]}",
        ],
    ]


def _squeeze_blank_lines(text: str) -> str:
    lines: list[str] = []
    for line in text.splitlines():
        if line.strip() or (lines and lines[-1]):
            lines.append(line.rstrip())
    return "\n".join(lines).rstrip() + "\n"
