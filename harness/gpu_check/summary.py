"""The results of the check as a page of Markdown; nothing is measured or decided here."""

from __future__ import annotations

from collections.abc import Iterable

from harness.formatting import ABSENT, format_number
from harness.gpu_check.schema import CheckedModel, CheckResult, CheckRun, Figures

_GIB = 2**30
_COLUMNS = (
    "runner",
    "steps",
    "s/step",
    "generate",
    "score",
    "train",
    "decoded tokens/s",
    "trained tokens/s",
    "GPU busy",
    "SMs busy",
    "peak memory",
    "x responses/s",
    "x decoded tokens/s",
)


def as_markdown(result: CheckResult) -> str:
    """The whole page."""
    environment = result.environment
    commit = environment.commit or result.bundle_commit
    versions = ", ".join(f"{name} {version}" for name, version in environment.packages.items())
    lines = [
        f"# GPU check, size {result.size}",
        "",
        f"- {', '.join(environment.gpus) or 'no GPU that NVML shows'}; {environment.cpu}; {environment.platform}; "
        f"Python {environment.python}",
        f"- {versions}; commit {commit or 'unknown'}{' with changes' if environment.is_dirty else ''}",
        f"- {result.started_at}; {result.wall_s:.0f} s of {result.budget_s:.0f} s; `{result.command}`",
        f"- random weights; response lengths log-normal: {_lengths(result)}; steps left out of every run as "
        f"warm-up: {result.num_warmup_steps}",
    ]
    for model in result.models:
        lines += ["", *_model_section(model, [run for run in result.runs if run.model == model.name])]
    lines += [
        "",
        "The last two columns compare with the first runner measured. In its first steps overcommit trains the short "
        "responses and carries the long ones on, so of a few steps `responses/s` flatters it; `decoded tokens/s` "
        "counts every token in the step that decoded it. GPU busy is the share of time in which any kernel ran, SMs "
        "busy the mean share of multiprocessors with work (NVML).",
        "",
    ]
    return "\n".join(lines)


def _lengths(result: CheckResult) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in result.response_lengths.items())


def _model_section(model: CheckedModel, runs: list[CheckRun]) -> list[str]:
    first = next((run.figures for run in runs if run.figures is not None), None)
    rows = [_row(run, first) for run in runs]
    lines = [f"## {model.title} ({model.num_parameters / 1e9:.2f} billion parameters)", "", *_table(rows)]
    lines += [f"\n{run.runner}: **{run.status}**: {run.reason}" for run in runs if run.status != "measured"]
    sums = {run.policy_sum for run in runs if run.policy_sum is not None}
    if len(sums) > 1:
        lines.append(f"\n**The runners did not start from the same policy**: {sorted(sums)}")
    return lines


def _table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [
        f"| {' | '.join(_COLUMNS)} |",
        f"|{'---|' * len(_COLUMNS)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _row(run: CheckRun, first: Figures | None) -> tuple[str, ...]:
    figures = run.figures
    if figures is None or first is None:
        return (run.runner, run.status, *[ABSENT] * (len(_COLUMNS) - 2))
    means = {
        summary.name.partition("/")[2]: summary.mean for summary in run.utilisation if summary.num_samples
    }
    peak = None if run.peak_allocated_bytes is None else run.peak_allocated_bytes / _GIB
    return (
        run.runner,
        str(figures.num_steps),
        format_number(figures.step_s),
        format_number(figures.generate_s),
        format_number(figures.score_s),
        format_number(figures.train_s),
        format_number(figures.decoded_tokens_per_s),
        format_number(figures.trained_tokens_per_s),
        _percent(means.get("utilisation_frac")),
        _percent(means.get("sm_activity_frac")),
        ABSENT if peak is None else f"{peak:.0f} GiB",
        f"{figures.responses_per_s / first.responses_per_s:.2f}",
        f"{figures.decoded_tokens_per_s / first.decoded_tokens_per_s:.2f}",
    )


def _percent(value: float | None) -> str:
    return ABSENT if value is None else f"{100 * value:.0f} %"
