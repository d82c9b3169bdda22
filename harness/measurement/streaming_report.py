"""What ``harness.measurement.streaming`` found: its file, the ratios, one sentence, a table and a figure.

Several files make one report: ``python -m harness.measurement.streaming_report OUT JSON...``. Everything is derived
from the raw seconds; nothing is measured here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.cores import Placement
from harness.figures import DOTS_PER_INCH
from harness.folders import make_folder, write_atomically
from harness.formatting import markdown_table
from harness.measurement.output import provenance
from harness.schema import Environment
from oppo_kit.errors import OppoError, StateError

STEM = "streaming"
MODES = ("batch", "sample", "chunk 8", "chunk 32", "chunk 128")
CHUNK_MODES = MODES[2:]
MODE_COLOURS = dict(zip(MODES[1:], ("#56B4E9", "#009E73", "#E69F00", "#CC79A7"), strict=True))
# Of two equally fast modes one wins two of two rounds by chance every fourth time: nothing is said of so few.
MIN_ROUNDS = 3


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class ModeRun(_Strict):
    """One mode on the responses of one round."""

    mode: str
    num_actor_threads: int
    seconds: float = Field(description="from the first prompt to the last score")
    generate_s: float
    wait_s: float = Field(description="the actor's seconds of handing over to the scorer and waiting for it")
    score_busy_s: float = Field(description="seconds that the scorer worked")
    tokens_prefetched: int = Field(description="read by the scorer while their response was being decoded")
    tokens_scored: int = Field(description="read by the scorer after their response had ended")


class Round(_Strict):
    """Every mode once, in the order that they ran, on the same prompts with the same sampling noise."""

    num_prompt_tokens: int
    response_lengths: list[int] = Field(description="by draw")
    runs: list[ModeRun]
    score_difference_max: float = Field(description="over responses and modes, from the scores of batch")
    num_other_responses: int = Field(description="whose tokens were not those of batch, by rounding")


class RewardModel(_Strict):
    """Random weights: only its cost counts."""

    cost: float = Field(description="wanted, in matrix products a token, relative to the policy's")
    num_layers: int
    achieved_cost: float


class Case(_Strict):
    """One reward model and one schedule."""

    reward: RewardModel
    delta: int = Field(description="Δ, responses held beyond B; 0: no overcommit")
    num_steps: int
    calibration: list[ModeRun] = Field(
        description="every mode with every thread count of the actor; empty where there is one count only"
    )
    rounds: list[Round]


class Streaming(_Strict):
    """A results file."""

    schema_version: Literal[1] = 1
    model: str
    placement: Placement
    command: str
    environment: Environment
    batch_size: int = Field(description="B, responses per step")
    response_length: int = Field(description="token limit of a response")
    num_policy_layers: int
    num_scorer_threads: int = Field(description="while the actor decodes")
    cases: list[Case]


class PairedRatio(NamedTuple):
    """Seconds of one mode by those of another, round by round."""

    median: float
    low: float
    high: float
    num_rounds: int

    @property
    def is_above(self) -> bool:
        """The other was faster in every one of enough rounds."""
        return self.num_rounds >= MIN_ROUNDS and self.low > 1

    @property
    def is_below(self) -> bool:
        """The other was slower in every one of enough rounds."""
        return self.num_rounds >= MIN_ROUNDS and self.high < 1

    def __str__(self) -> str:
        if self.num_rounds == 1:
            return f"{self.median:.2f}"
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def paired_ratio(case: Case, slow: str, fast: str) -> PairedRatio:
    """Above 1 where ``fast`` is faster than ``slow``."""
    seconds = [{run.mode: run.seconds for run in one.runs} for one in case.rounds]
    ratios = [by_mode[slow] / by_mode[fast] for by_mode in seconds]
    return PairedRatio(median(ratios), min(ratios), max(ratios), len(ratios))


def sentence(results: Sequence[Streaming]) -> str:
    """Where chunks beat scoring each response as it ends, and where that beats scoring the batch."""
    judged = [(result, case) for result, case in _cases(results) if len(case.rounds) >= MIN_ROUNDS]
    num_left_out = sum(1 for _ in _cases(results)) - len(judged)
    left_out = (
        f" {num_left_out} cases of fewer than {MIN_ROUNDS} rounds are not judged." if num_left_out else ""
    )
    if not judged:
        return f"Nothing can be said.{left_out}"
    wins: list[str] = []
    num_slower = 0
    for result, case in judged:
        ratios = {mode: paired_ratio(case, "sample", mode) for mode in CHUNK_MODES if _has_fed(case, mode)}
        faster = {mode: ratio for mode, ratio in ratios.items() if ratio.is_above}
        if faster:
            best = max(faster, key=lambda mode: faster[mode].median)
            wins.append(f"{_case_name(result, case)}: {best}, {faster[best]} times as fast")
        num_slower += bool(ratios) and all(ratio.is_below for ratio in ratios.values())
    num_sample = sum(paired_ratio(case, "batch", "sample").is_above for _, case in judged)
    num = len(judged)
    text = (
        f"Chunks were faster than scoring each response when it ends, in every round, in {len(wins)} of {num} cases: "
        f"{'; '.join(wins)}."
        if wins
        else f"Chunks do not pay: in none of {num} cases was a chunk size faster in every round than scoring each "
        "response when it ends."
    )
    return (
        f"{text} In {num_slower} of {num} every chunk size was slower in every round. Scoring each response when it "
        f"ends was faster than scoring the whole batch in every round in {num_sample} of {num}."
        f"{_noise(judged)}{left_out}"
    )


def _has_fed(case: Case, mode: str) -> bool:
    """Whether any response was long enough for a chunk of this size."""
    return any(run.mode == mode and run.tokens_prefetched for one in case.rounds for run in one.runs)


def _noise(judged: Sequence[tuple[Streaming, Case]]) -> str:
    """What chunks longer than every response, which are scoring at the end under another name, say of the others."""
    idle = [
        (mode, paired_ratio(case, "sample", mode))
        for _, case in judged
        for mode in CHUNK_MODES
        if not _has_fed(case, mode)
    ]
    if not idle:
        return ""
    names = ", ".join(dict.fromkeys(mode for mode, _ in idle))
    low, high = min(ratio.low for _, ratio in idle), max(ratio.high for _, ratio in idle)
    return (
        f" In {len(idle)} of them no response was long enough for {names}, which is then scoring each response when it "
        f"ends: that it was {low:.2f} to {high:.2f} times as fast by round is noise."
    )


def render(results: Sequence[Streaming]) -> str:
    """Markdown of one or several files."""
    parts = [
        f"# Scoring while decoding: {', '.join(_result_name(result) for result in results)}",
        sentence(results),
        "Decoding and scoring alone; nothing is trained. *batch* scores when all B responses are there, *sample* each "
        "response when it ends, *chunk n* feeds unfinished responses to the reward model every n tokens. A ratio is "
        "seconds of one mode by those of another on the same responses: the median over rounds, and the range. "
        + _by_chance(results),
        f"![ratios]({STEM}.png)",
    ]
    for result in results:
        parts += _result_parts(result)
    return "\n\n".join(parts) + "\n"


def figure(results: Sequence[Streaming]) -> Figure:
    """One column a file, one row a schedule: batch / mode by reward cost; the lines are the ranges."""
    drawn = Figure(figsize=(max(6.0, 3.4 * len(results)), 6.2), layout="constrained")
    axes = drawn.subplots(2, len(results), squeeze=False, sharey="row")
    for column, result in enumerate(results):
        for row, has_overcommit in enumerate((False, True)):
            cases = [case for case in result.cases if (case.delta > 0) == has_overcommit]
            _draw_cases(axes[row][column], cases)
            title = f"{_result_name(result)}, {'Δ = B/2' if has_overcommit else 'Δ = 0'}"
            axes[row][column].set_title(title, loc="left", fontsize=10)
            if column == 0:
                axes[row][column].set_ylabel("seconds of batch / of mode\n(above 1: faster)")
        axes[1][column].set_xlabel("reward model's cost / policy's")
    handles, labels = axes[0][0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside upper center", ncols=len(MODES), frameon=False)
    return drawn


def write_figure(results: Sequence[Streaming], folder: Path) -> None:
    """``streaming.png``."""
    drawn = figure(results)
    FigureCanvasAgg(drawn)
    drawn.savefig(folder / f"{STEM}.png", dpi=DOTS_PER_INCH)


def load(file: Path) -> Streaming:
    """Read a results file.

    Raises:
        StateError: it cannot be read, or is something else.
    """
    try:
        return Streaming.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(f"cannot read {file}: {error}; pass files named {STEM}.json") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise StateError(
            f"{file} is no file of harness.measurement.streaming: {where}: {first['msg']}; measure again"
        ) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.measurement.streaming_report", description="One report of several files."
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("files", type=Path, nargs="+", metavar="json")
    options = parser.parse_args(arguments)
    try:
        results = [load(file) for file in options.files]
        folder = make_folder(options.out)
    except OppoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_figure(results, folder)
    write_atomically(folder / f"{STEM}.md", render(results))
    print(sentence(results))
    return 0


def _by_chance(results: Sequence[Streaming]) -> str:
    counts = sorted({len(case.rounds) for _, case in _cases(results)})
    odds = ", ".join(f"all of {count} once in {2**count} times" for count in counts)
    return f"A mode that is equally fast is faster in every round by chance: in {odds}."


def _cases(results: Sequence[Streaming]) -> Iterator[tuple[Streaming, Case]]:
    for result in results:
        for case in result.cases:
            yield result, case


def _result_name(result: Streaming) -> str:
    return f"{result.model} {result.placement}"


def _case_name(result: Streaming, case: Case) -> str:
    return f"{_result_name(result)}, reward model of {case.reward.cost:g} times the policy's cost, Δ = {case.delta}"


def _result_parts(result: Streaming) -> list[str]:
    where = {
        "shared": "both may use all cores",
        "split": "the actor has one core with one thread, the scorer another",
    }[result.placement]
    rounds = [one for case in result.cases for one in case.rounds]
    lengths = [length for one in rounds for length in one.response_lengths]
    rewards = {case.reward.cost: case.reward for case in result.cases}
    models = ", ".join(
        f"{cost:g} ({reward.num_layers} layers, {reward.achieved_cost:.3f})"
        for cost, reward in rewards.items()
    )
    has_choice = any(case.calibration for case in result.cases)
    calibrated = " The actor's thread count is each mode's best of one round." if has_choice else ""
    return [
        f"## {_result_name(result)}",
        f"Placement {result.placement}: {where}; the scoring process uses {result.num_scorer_threads} thread while the "
        f"actor decodes.{calibrated} B = {result.batch_size}; responses of {min(lengths)} to {max(lengths)} tokens, "
        f"median {median(lengths):g}, limit {result.response_length}. Reward models of random weights, cost wanted "
        f"(layers, cost achieved): {models}; the policy has {result.num_policy_layers} layers and an output head. "
        f"Scores of all modes agree to {max(one.score_difference_max for one in rounds):.1e}; "
        f"{sum(one.num_other_responses for one in rounds)} responses differ by rounding. "
        + provenance(result.environment, result.command),
        markdown_table(
            [
                "Cost",
                "Δ",
                "Steps",
                *(f"batch / {mode}" for mode in MODES[1:]),
                *(f"sample / {m}" for m in CHUNK_MODES),
            ],
            [_ratio_row(case) for case in result.cases],
        ),
        "Medians over rounds: seconds of the whole, of decoding, of waiting for the scorer, of the scorer at work, and "
        "the share of tokens that it had read before their response ended.",
        markdown_table(
            [
                "Cost",
                "Δ",
                "Mode",
                "Threads",
                "Whole, s",
                "Decoding, s",
                "Waiting, s",
                "Scorer, s",
                "Read early, %",
            ],
            [_time_row(case, mode) for case in result.cases for mode in MODES],
        ),
    ]


def _ratio_row(case: Case) -> list[str]:
    return [
        f"{case.reward.cost:g}",
        str(case.delta),
        str(case.num_steps),
        *(str(paired_ratio(case, "batch", mode)) for mode in MODES[1:]),
        *(str(paired_ratio(case, "sample", mode)) for mode in CHUNK_MODES),
    ]


def _time_row(case: Case, mode: str) -> list[str]:
    runs = [run for one in case.rounds for run in one.runs if run.mode == mode]
    early = median(run.tokens_prefetched / (run.tokens_prefetched + run.tokens_scored) for run in runs)
    seconds = [
        [run.seconds for run in runs],
        [run.generate_s for run in runs],
        [run.wait_s for run in runs],
        [run.score_busy_s for run in runs],
    ]
    return [
        f"{case.reward.cost:g}",
        str(case.delta),
        mode,
        str(runs[0].num_actor_threads),
        *(f"{median(values):.3g}" for values in seconds),
        f"{100 * early:.0f}",
    ]


def _draw_cases(axis: Axes, cases: Sequence[Case]) -> None:
    width = 0.8 / len(MODE_COLOURS)
    axis.axhline(1.0, color="black", lw=1)
    for index, (mode, colour) in enumerate(MODE_COLOURS.items()):
        ratios = [paired_ratio(case, "batch", mode) for case in cases]
        places = [position + (index - (len(MODE_COLOURS) - 1) / 2) * width for position in range(len(cases))]
        below = [ratio.median - ratio.low for ratio in ratios]
        above = [ratio.high - ratio.median for ratio in ratios]
        axis.bar(
            places,
            [ratio.median for ratio in ratios],
            width=width,
            color=colour,
            label=mode,
            yerr=[below, above],
            ecolor="#333333",
            error_kw={"lw": 1, "capsize": 2},
        )
    axis.set_xticks(range(len(cases)), [f"{case.reward.cost:g}" for case in cases])
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(visible=True, axis="y", color="#dddddd", lw=0.6)
    axis.set_axisbelow(True)


if __name__ == "__main__":
    sys.exit(main())
