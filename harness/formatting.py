"""Numbers, tables and sentences for people, the same in every report and in the README.

Absent or non-finite numbers become "n/a"; nothing here computes a statistic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.schema import Difference, Ratio, Result

ABSENT = "n/a"
# The end of the ladder against its start says most, so it makes the headline when both were run.
HEADLINES = (
    "trl/both",
    "trl/overcommit",
    "sequential/both",
    "sequential/overcommit",
    "trl/trl_overlap",
    "trl/sequential",
)


def format_number(value: float | None, *, digits: int = 3) -> str:
    """Three significant digits, thousands in full: 0.0123, 1.23, 1234."""
    if value is None or not math.isfinite(value):
        return ABSENT
    if value == 0:
        return "0"
    num_decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{num_decimals}f}"


def format_seconds(value: float | None) -> str:
    """Seconds with a unit that keeps the number readable: 12.3 µs, 45.6 ms, 1.23 s."""
    if value is None or not math.isfinite(value):
        return ABSENT
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(value) * factor >= 1 or value == 0:
            return f"{format_number(value * factor)} {unit}"
    return f"{format_number(value * 1e6)} µs"


def format_percent(frac: float | None) -> str:
    """A share as per cent with one decimal."""
    return ABSENT if frac is None or not math.isfinite(frac) else f"{100 * frac:.1f} %"


def format_size(num_bytes: float) -> str:
    """Bytes in GiB, or in MiB where that would be less than a tenth."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.1f} MiB"


def format_ratio_range(ratio: Ratio) -> str:
    """The extreme pairs, or that there is only one."""
    return f"{ratio.low:.2f} to {ratio.high:.2f}" if len(ratio.pairs) > 1 else "one pair"


def format_signed(value: float, *, is_accuracy: bool = True) -> str:
    """A difference with its sign: accuracies in percentage points, scores to three significant digits."""
    return f"{100 * value:+.2f}" if is_accuracy else f"{value:+.3g}"


def format_difference(difference: Difference, *, is_accuracy: bool = True) -> tuple[str, str]:
    """Mean and 90 % interval, as ``format_signed`` writes them."""

    def sign(value: float) -> str:
        return format_signed(value, is_accuracy=is_accuracy)

    if difference.low is None or difference.high is None:
        return sign(difference.mean), f"{ABSENT} (one seed)"
    return sign(difference.mean), f"{sign(difference.low)} to {sign(difference.high)}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; bars and line ends inside a cell are made harmless."""
    lines = [list(header), ["---"] * len(header), *map(list, rows)]
    return "\n".join("| " + " | ".join(_cell(text) for text in line) + " |" for line in lines)


def one_sentence_of(result: Result) -> str:
    """The result in plain words: the headline ratio and what it cost or gained in learning."""
    start = "Smoke run, do not quote: per" if result.is_quick else "Per"
    if result.workload.placement == "split":
        start = f"With cores split between actor and scorers, a model of dedicated devices: {start.lower()}"
    if result.workload.fault is not None:
        start = f"With the fault {result.workload.fault}, put in on purpose: {start.lower()}"
    key = next((name for name in HEADLINES if name in result.ratios), None)
    if key is None:
        names = " and ".join(result.runners) or "no runner"
        return f"There is no ratio: {names} ran without a partner to compare with."
    slow, _, fast = key.partition("/")
    ratio = result.ratios[key]
    num_pairs = len(ratio.pairs)
    spread = f"{format_ratio_range(ratio)} over {num_pairs} pairs" if num_pairs > 1 else "one pair"
    return (
        f"{start} trained response, {slow} took {ratio.median:.2f} times as long as {fast} (median of whole "
        f"runs, drain included; {spread}); {_learning(result, slow, fast)}."
    )


def _learning(result: Result, slow: str, fast: str) -> str:
    difference = result.learning_differences.get(f"{fast}-{slow}")
    if difference is None:
        return _learning_by_score(result, slow, fast)
    points = round(100 * difference.mean, 2)
    place = (
        f"{abs(points):.2f} points {'above' if points > 0 else 'below'}"
        if points
        else "within 0.01 points of"
    )
    text = f"{fast}'s final held-out accuracy lay {place} {slow}'s"
    if difference.low is None or difference.high is None:
        return f"{text} (one seed, so no interval)"
    verdict = "contains" if difference.low <= 0 <= difference.high else "excludes"
    interval = format_difference(difference)[1]
    return f"{text} (90 % interval {interval} over {len(difference.pairs)} seeds, which {verdict} zero)"


def _learning_by_score(result: Result, slow: str, fast: str) -> str:
    """Where no checker can tell what is right."""
    difference = result.learning_differences.get(f"{fast}-{slow}/score_mean")
    if difference is None:
        return "held-out accuracy was not measured for both"
    mean, interval = format_difference(difference, is_accuracy=False)
    return f"{fast}'s final held-out score less {slow}'s was {mean} (90 % interval {interval})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
