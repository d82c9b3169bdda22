"""What people read of a check: one sentence, a small table, Markdown for a pull request, an assertion for a test.

Decides nothing and computes nothing: it words what ``harness.check.equivalence`` found.
"""

from __future__ import annotations

import math
from pathlib import Path

from rich.table import Table

from harness.check.equivalence import (
    ALPHA,
    FINAL_AFTER_FRAC,
    MAX_SEEDS,
    TARGET_POWER,
    Comparison,
    Quantity,
    compare,
)
from harness.check.pairing import By
from harness.formatting import ABSENT, format_signed, markdown_table
from harness.schema import Result

_NARROW, _WIDE = f"{100 * (1 - 2 * ALPHA):g} % interval", f"{100 * (1 - ALPHA):g} % interval"
_HEADINGS = {
    "equivalent": "Equivalent",
    "different": "Different",
    "undecided": "Cannot tell",
}


def assert_equivalent(
    run: Path | Result,
    reference: Path | Result,
    *,
    margin: float = 0.1,
    runner: str | None = None,
    reference_runner: str | None = None,
    by: By = "score",
) -> None:
    """Fail unless the run learned as the reference did; arguments as of ``compare``.

    Raises:
        AssertionError: different or undecided; holds the sentence and the table.
        StateError, ConfigError: as ``compare`` does.
    """
    require_equivalent(
        compare(run, reference, runner=runner, reference_runner=reference_runner, margin=margin, by=by)
    )


def require_equivalent(comparison: Comparison) -> None:
    """Fail unless the verdict is that both are equivalent.

    Raises:
        AssertionError: holds the sentence and the table.
    """
    if comparison.verdict != "equivalent":
        raise AssertionError(f"{sentence_of(comparison)}\n\n{markdown_table(*table_of(comparison))}")


def sentence_of(comparison: Comparison) -> str:
    """The verdict in plain words, with the numbers that it rests on."""
    curves = comparison.curves
    ours, theirs = curves.run_label, curves.reference_label
    num_seeds = len(comparison.seeds)
    over = f"over {num_seeds} seed{'' if num_seeds == 1 else 's'}"
    if comparison.verdict == "equivalent":
        text = (
            f"{ours} learned as {theirs} did, to within {_share(comparison)} of its gain: "
            f"{' and '.join(_narrow_place(comparison, q) for q in comparison.quantities)}, {over}."
        )
    elif comparison.verdict == "different":
        outside = [
            f"{_place(comparison, q)} ({_WIDE} {_interval(comparison, q.wide_interval)}, wholly outside the "
            f"margin of {_margin(comparison, q)})"
            for q in comparison.quantities
            if q.is_outside
        ]
        text = f"{ours} did not learn as {theirs} did: {' and '.join(outside)}, {over}."
    else:
        open_ones = [_narrow_place(comparison, q) for q in comparison.quantities if not q.is_inside]
        text = (
            f"whether {ours} learned as {theirs} did stays open: {' and '.join(open_ones)}, {over}; "
            f"{_advice(comparison)}."
        )
    smoke = " (smoke run, do not quote)" if curves.is_smoke else ""
    return f"{_HEADINGS[comparison.verdict]}{smoke}: {text}"


def table_of(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Header and rows; one column a number, one row a seed at the end."""
    unit = "accuracy, points" if _is_accuracy(comparison) else "score"
    header = [f"held-out {unit}", "final", "area"]
    curves = comparison.curves
    both = comparison.quantities
    rows = [
        [curves.run_label, *(_level(comparison, q.run) for q in both)],
        [curves.reference_label, *(_level(comparison, q.reference) for q in both)],
        ["difference", *(_signed(comparison, q.difference) for q in both)],
        [_NARROW, *(_interval(comparison, q.interval) for q in both)],
        [_WIDE, *(_interval(comparison, q.wide_interval) for q in both)],
        [f"margin, {_share(comparison)} of the gain", *(_margin(comparison, q) for q in both)],
        ["finding", *(_finding(q) for q in both)],
    ]
    for index, seed in enumerate(comparison.seeds):
        rows.append([f"seed {seed}", *(_signed(comparison, q.differences[index]) for q in both)])
    return header, rows


def terminal_table(comparison: Comparison) -> Table:
    """``table_of`` for the terminal."""
    header, rows = table_of(comparison)
    curves = comparison.curves
    title = (
        f"{curves.run_label} against {curves.reference_label}: {_HEADINGS[comparison.verdict].lower()}"
        f"{' (smoke run, do not quote)' if curves.is_smoke else ''}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column(header[0])
    for name in header[1:]:
        table.add_column(name, justify="right")
    num_seeds = len(comparison.seeds)
    for index, row in enumerate(rows):
        table.add_row(*row, end_section=index == len(rows) - num_seeds - 1)
    return table


def markdown_of(comparison: Comparison) -> str:
    """A comment for a pull request."""
    curves = comparison.curves
    return (
        f"### Convergence of {curves.run_label} against {curves.reference_label}: "
        f"{_HEADINGS[comparison.verdict].lower()}\n\n"
        f"{sentence_of(comparison)}\n\n"
        f"{markdown_table(*table_of(comparison))}\n\n"
        f"final: mean of the evaluations after {_percent(FINAL_AFTER_FRAC)} of the trained responses; area: mean "
        f"height of the held-out curve against trained responses. Differences are {curves.run_label} less "
        f"{curves.reference_label}, paired by seed. Equivalent: both {_NARROW}s inside the margins (two one-sided "
        f"t-tests at {_percent(ALPHA)}); different: either {_WIDE} wholly outside.\n"
    )


def _advice(comparison: Comparison) -> str:
    """How many seeds would tell."""
    num_seeds, needed, spare = len(comparison.seeds), comparison.seeds_needed, comparison.curves.spare
    with_power = f"with {_percent(TARGET_POWER)} power"
    if num_seeds == 1 and spare is None:
        return "one seed shows no spread, so run at least 2 seeds on both sides"
    if needed is None:
        return (
            f"at this spread more than {MAX_SEEDS} seeds would be needed; evaluate on more problems, train on, or "
            "allow a wider --margin"
        )
    if spare is not None:
        return (
            f"one seed shows no spread; by that of the other side's {len(spare)} seeds, about {needed} seeds on both "
            f"sides would tell, {with_power}, if there is no difference"
        )
    if needed > num_seeds:
        return f"about {needed} seeds would tell, {with_power}, if there is no difference"
    return (
        f"at this spread {needed} seeds would have been enough, {with_power}, if there were no difference, so there "
        "may well be one; more seeds would tell whether it exceeds the margin"
    )


def _narrow_place(comparison: Comparison, quantity: Quantity) -> str:
    return (
        f"{_place(comparison, quantity)} ({_NARROW} {_interval(comparison, quantity.interval)}, margin "
        f"{_margin(comparison, quantity)})"
    )


def _place(comparison: Comparison, quantity: Quantity) -> str:
    """Where the run's number lay."""
    noun = "accuracy" if _is_accuracy(comparison) else "score"
    subject = (
        f"its final held-out {noun}"
        if quantity.name == "final"
        else f"its held-out {noun} over the whole curve"
    )
    amount = _unsigned(comparison, quantity.difference)
    if float(amount) == 0:
        return f"{subject} lay level"
    points = " points" if _is_accuracy(comparison) else ""
    return f"{subject} lay {amount}{points} {'above' if quantity.difference > 0 else 'below'}"


def _finding(quantity: Quantity) -> str:
    if quantity.is_inside:
        return "inside"
    return "outside" if quantity.is_outside else "open"


def _interval(comparison: Comparison, interval: tuple[float, float]) -> str:
    if not all(map(math.isfinite, interval)):
        return f"{ABSENT} (one seed)"
    return f"{_signed(comparison, interval[0])} to {_signed(comparison, interval[1])}"


def _margin(comparison: Comparison, quantity: Quantity) -> str:
    return f"±{_unsigned(comparison, quantity.margin)}"


def _share(comparison: Comparison) -> str:
    return _percent(comparison.margin)


def _percent(frac: float) -> str:
    return f"{100 * frac:g} %"


def _signed(comparison: Comparison, value: float) -> str:
    return format_signed(value, is_accuracy=_is_accuracy(comparison))


def _unsigned(comparison: Comparison, value: float) -> str:
    return _signed(comparison, abs(value)).removeprefix("+")


def _level(comparison: Comparison, value: float) -> str:
    return f"{100 * value:.2f}" if _is_accuracy(comparison) else f"{value:.4g}"


def _is_accuracy(comparison: Comparison) -> bool:
    return comparison.curves.field == "accuracy"
