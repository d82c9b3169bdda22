"""The figures of a report, as PNG files.

Uses matplotlib's objects without pyplot, so no global state and no display. Colours are from the Okabe-Ito
set, which the colour-blind can tell apart; every runner has a line style of its own too, for print.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from harness.figure_parts import STAGE_COLOURS, legend, new_figure
from harness.response_lengths import drawn_lengths, lengths_before_drain
from harness.schema import Result, Run, UtilisationSeries
from harness.statistics import (
    STAGES,
    measured_positions,
    num_drain_steps,
    summarise_runner,
)
from harness.timeline import timeline_figure

RUNNER_COLOURS = {
    "trl": "#4d4d4d",
    "trl_continuous": "#999999",
    "trl_overlap": "#882255",
    "sequential": "#0072B2",
    "sample": "#56B4E9",
    "chunk": "#009E73",
    "chunk_auto": "#CC79A7",
    "overcommit": "#E69F00",
    "both": "#D55E00",
}
RUNNER_STYLES = {
    "trl": "--",
    "trl_continuous": "--",
    "trl_overlap": "-",
    "sequential": "-.",
    "sample": ":",
    "chunk": ":",
    "chunk_auto": ":",
    "both": "-",
}
OTHER_COLOURS = ("#009E73", "#CC79A7", "#56B4E9")
DOTS_PER_INCH = 130
QUICK_NOTE = "smoke run: do not quote"
# Above this many steps the training reward is too noisy to read, so the thick line is a moving average.
SMOOTH_ABOVE_STEPS = 20

Curve = tuple[list[float], list[float]]


def write_figures(result: Result, folder: Path) -> dict[str, str]:
    """Draw what the result has samples for.

    Returns:
        file names inside ``folder`` by figure: reward, step_time, stages, lengths, timeline, utilisation.
    """
    makers: dict[str, Callable[[Result], Figure | None]] = {
        "reward": reward_figure,
        "step_time": step_time_figure,
        "stages": stages_figure,
        "lengths": lengths_figure,
        "timeline": timeline_figure,
        "utilisation": utilisation_figure,
    }
    written: dict[str, str] = {}
    for name, make in makers.items():
        figure = make(result)
        file = folder / f"{name}.png"
        file.unlink(missing_ok=True)
        if figure is None:
            continue
        if result.is_quick:
            figure.supxlabel(QUICK_NOTE, color="#D55E00", fontsize=11, weight="bold")
        FigureCanvasAgg(figure)
        figure.savefig(file, dpi=DOTS_PER_INCH)
        written[name] = file.name
    return written


def reward_figure(result: Result) -> Figure:
    """Held-out accuracy (else held-out score) and training reward, against step and against training time."""
    field, label, factor = _evaluation_quantity(result)
    figure, axes = new_figure(rows=2, columns=2, width=10, height=6.6)
    window = _smoothing_window(result)
    for column, by_time in enumerate((False, True)):
        for index, name in enumerate(result.runners):
            runs = result.runners[name].runs
            held_out = [_evaluation_curve(run, field, factor, by_time=by_time) for run in runs]
            training = [_training_curve(run, by_time=by_time) for run in runs]
            _draw_curves(axes[0][column], held_out, name, index, marker="o")
            _draw_curves(axes[1][column], training, name, index, window=window)
        for row, text in enumerate((label, "training reward (batch mean)")):
            _name_steps(axes[row][column], "training time (s), evaluation excluded" if by_time else "step")
            axes[row][column].set_ylabel(text if column == 0 else "")
            if not axes[row][column].has_data():
                _say(axes[row][column], "not measured")
    axes[0][0].set_title("Against step; thin: one run; thick: mean of runs", loc="left", fontsize=10)
    axes[0][1].set_title("Against training time", loc="left", fontsize=10)
    if window > 1:
        axes[1][0].set_title(f"thick: moving average of {window} steps", loc="left", fontsize=10)
    legend(figure, axes[0][0])
    return figure


def step_time_figure(result: Result) -> Figure:
    """Step time against step, and its spread over the measured steps."""
    figure, (row,) = new_figure(rows=1, columns=2, width=10, height=4, widths=(2.2, 1))
    over_steps, spread = row
    names = list(result.runners)
    for index, name in enumerate(names):
        curves = [_per_step(run, lambda step: step.step_s) for run in result.runners[name].runs]
        _draw_curves(over_steps, curves, name, index, middle=median)
    num_warmup_steps = result.workload.num_warmup_steps
    if num_warmup_steps:
        over_steps.axvspan(
            0.5, num_warmup_steps + 0.5, color="#999999", alpha=0.2, lw=0, label="warm-up (left out)"
        )
    drains = [num_drain_steps(run) for runner in result.runners.values() for run in runner.runs]
    num_steps = max((len(run.steps) for runner in result.runners.values() for run in runner.runs), default=0)
    if any(drains):
        start = num_steps - max(drains) + 0.5
        over_steps.axvspan(start, num_steps + 0.5, color="#F0E442", alpha=0.35, lw=0, label="drain (counted)")
    _name_steps(over_steps, "step")
    over_steps.set_ylabel("step time (s)")
    over_steps.set_title("Thin: one run; thick: median of runs", loc="left", fontsize=10)
    _draw_spread(spread, result, names)
    # A first step that compiles or loads would flatten all others: warm-up may leave the frame.
    top_s = max(_measured_step_s(result), default=0.0)
    for axis in row:
        axis.set_ylim(0, 1.1 * top_s or None)
    legend(figure, over_steps)
    return figure


def stages_figure(result: Result) -> Figure | None:
    """Mean seconds of a measured step by stage, stacked, with each share."""
    summaries = [summarise_runner(result, name) for name in result.runners]
    summaries = [summary for summary in summaries if summary.stage_fracs]
    if not summaries:
        return None
    figure, ((axis,),) = new_figure(rows=1, columns=1, width=10, height=1.7 + 0.6 * len(summaries))
    means = [_mean_step_s(result, summary.name) for summary in summaries]
    starts = [0.0] * len(summaries)
    for stage in STAGES:
        widths = [
            summary.stage_fracs[stage] * mean_s for summary, mean_s in zip(summaries, means, strict=True)
        ]
        bars = axis.barh(
            [s.name for s in summaries], widths, left=starts, color=STAGE_COLOURS[stage], label=stage
        )
        # A label needs room: below 6 % of the longest bar it would spill over its neighbour.
        texts = [
            f"{summary.stage_fracs[stage]:.0%}" if width > 0.06 * max(means) else ""
            for summary, width in zip(summaries, widths, strict=True)
        ]
        colour = "white" if stage in ("engine", "train") else "black"
        axis.bar_label(bars, texts, label_type="center", color=colour, fontsize=9)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.set(xlabel="mean time of a measured step (s); per cent of the step", ylabel="")
    legend(figure, axis)
    return figure


def lengths_figure(result: Result) -> Figure | None:
    """Response lengths: drawn against trained before the drain, and the trained mean by step."""
    figure, (row,) = new_figure(rows=1, columns=2, width=10, height=4)
    cumulative, over_steps = row
    for index, (name, runner) in enumerate(result.runners.items()):
        colour, style = _look(name, index)
        drawn, trained = drawn_lengths(runner), lengths_before_drain(runner)
        if drawn:
            cumulative.ecdf(drawn, color=colour, ls=style, lw=2, label=f"{name}, drawn")
        if trained and len(trained) < len(drawn):
            cumulative.ecdf(trained, color=colour, ls=":", lw=2, label=f"{name}, trained before the drain")
        curves = [_per_step(run, lambda step: _mean_length(step.trained_lengths)) for run in runner.runs]
        _draw_curves(over_steps, curves, name, index)
    cumulative.set(xlabel="response length (tokens)", ylabel="share of responses not longer", ylim=(0, 1.02))
    _name_steps(over_steps, "step")
    over_steps.set_ylabel("mean trained length (tokens)")
    if not cumulative.has_data():
        return None
    cumulative.set_title("All responses of all runs", loc="left", fontsize=10)
    over_steps.set_title("Thin: one run; thick: mean of runs", loc="left", fontsize=10)
    over_steps.set_ylim(bottom=0)
    legend(figure, cumulative)
    return figure


def utilisation_figure(result: Result) -> Figure | None:
    """Every sampled quantity over the first run of each runner; None when nothing was sampled."""
    firsts = {name: runner.runs[0] for name, runner in result.runners.items() if runner.runs}
    quantities = sorted({s.name for run in firsts.values() for s in run.utilisation if _has_values(s)})
    if not quantities:
        return None
    height = 1.1 + 1.7 * len(quantities)
    figure, axes = new_figure(rows=len(quantities), columns=1, width=10, height=height)
    for quantity, (axis,) in zip(quantities, axes, strict=True):
        label = quantity
        for index, (name, run) in enumerate(firsts.items()):
            series = next((s for s in run.utilisation if s.name == quantity and _has_values(s)), None)
            if series is None:
                continue
            unit, factor = display_unit(series.unit)
            label = unit
            values = [numpy.nan if value is None else value * factor for value in series.values]
            colour, style = _look(name, index)
            axis.plot(series.times_s, values, color=colour, ls=style, lw=1.2, label=name)
        axis.set(ylabel=label)
        axis.set_title(quantity, loc="left", fontsize=10)
        axis.set_ylim(0, 105 if label == "%" else None)
    axes[-1][0].set_xlabel("seconds since the run began (first run of each runner)")
    legend(figure, axes[0][0])
    return figure


def display_unit(unit: str) -> tuple[str, float]:
    """The unit to show and the factor to it: shares as per cent, bytes as GiB."""
    return {"frac": ("%", 100.0), "bytes": ("GiB", 2.0**-30)}.get(unit, (unit, 1.0))


def _look(name: str, index: int) -> tuple[str, str]:
    colour = RUNNER_COLOURS.get(name, OTHER_COLOURS[index % len(OTHER_COLOURS)])
    return colour, RUNNER_STYLES.get(name, "-")


def _draw_curves(
    axis: Axes,
    curves: Sequence[Curve],
    name: str,
    index: int,
    *,
    marker: str = "",
    window: int = 1,
    middle: Callable[[Sequence[float]], float] = fmean,
) -> None:
    """One thin line a run and a thick one through the middle of the points that all runs have."""
    curves = [curve for curve in curves if curve[0]]
    if not curves:
        return
    colour, style = _look(name, index)
    if len(curves) > 1 or window > 1:
        for xs, ys in curves:
            axis.plot(xs, ys, color=colour, lw=0.7, alpha=0.45)
    num_points = min(len(xs) for xs, _ in curves)
    xs = [fmean(curve[0][i] for curve in curves) for i in range(num_points)]
    ys = _moving_average([middle([curve[1][i] for curve in curves]) for i in range(num_points)], window)
    axis.plot(xs, ys, color=colour, ls=style, lw=2.2, marker=marker, ms=4, label=name)


def _draw_spread(axis: Axes, result: Result, names: Sequence[str]) -> None:
    samples = [
        [run.steps[p].step_s for run in result.runners[name].runs for p in measured_positions(result, run)]
        for name in names
    ]
    shown = [(name, values) for name, values in zip(names, samples, strict=True) if values]
    if not shown:
        _say(axis, "no measured steps")
        return
    boxes = axis.boxplot(
        [values for _, values in shown],
        tick_labels=[name for name, _ in shown],
        widths=0.5,
        patch_artist=True,
        flierprops={"marker": ".", "markeredgecolor": "#666666"},
    )
    for index, (name, _) in enumerate(shown):
        boxes["boxes"][index].set(facecolor=_look(name, index)[0], alpha=0.5)
        boxes["medians"][index].set(color="black", lw=1.5)
    axis.set_title("Measured steps: quartiles", loc="left", fontsize=10)


def _name_steps(axis: Axes, label: str) -> None:
    axis.set_xlabel(label)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))


def _say(axis: Axes, text: str) -> None:
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", color="#666666")
    axis.set(xticks=[], yticks=[])


def _evaluation_quantity(result: Result) -> tuple[str, str, float]:
    evaluations = [e for runner in result.runners.values() for run in runner.runs for e in run.evaluations]
    if any(e.accuracy is not None for e in evaluations) or all(e.score_mean is None for e in evaluations):
        return "accuracy", "held-out accuracy (%)", 100.0
    return "score_mean", "held-out score (mean)", 1.0


def _evaluation_curve(run: Run, field: str, factor: float, *, by_time: bool) -> Curve:
    points = [e for e in sorted(run.evaluations, key=lambda e: e.step) if getattr(e, field) is not None]
    return [e.elapsed_train_s if by_time else float(e.step) for e in points], [
        getattr(e, field) * factor for e in points
    ]


def _training_curve(run: Run, *, by_time: bool) -> Curve:
    steps, values = _per_step(run, lambda step: step.reward_mean)
    if by_time:
        ends_s = numpy.cumsum([step.step_s for step in run.steps])
        return [float(ends_s[int(step) - 1]) for step in steps], values
    return steps, values


def _per_step(run: Run, value: Callable[[Any], float | None]) -> Curve:
    """Steps counted from 1, as evaluations are, whatever the runner calls its first one."""
    points = [
        (float(position), found)
        for position, step in enumerate(run.steps, 1)
        if (found := value(step)) is not None
    ]
    return [position for position, _ in points], [found for _, found in points]


def _smoothing_window(result: Result) -> int:
    """An odd number of steps, so that a centred average has one."""
    num_steps = max((len(run.steps) for runner in result.runners.values() for run in runner.runs), default=0)
    return 2 * (num_steps // 20) + 1 if num_steps > SMOOTH_ABOVE_STEPS else 1


def _moving_average(values: Sequence[float], window: int) -> list[float]:
    """Centred; at the ends over the values that there are."""
    half = window // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _mean_step_s(result: Result, name: str) -> float:
    runs = result.runners[name].runs
    return fmean(run.steps[p].step_s for run in runs for p in measured_positions(result, run))


def _measured_step_s(result: Result) -> list[float]:
    runs = [run for runner in result.runners.values() for run in runner.runs]
    return [run.steps[position].step_s for run in runs for position in measured_positions(result, run)]


def _mean_length(lengths: Sequence[int]) -> float | None:
    return fmean(lengths) if lengths else None


def _has_values(series: UtilisationSeries) -> bool:
    return any(value is not None for value in series.values)
