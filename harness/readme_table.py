"""The README's table of results, generated from the committed results files: no number is typed by hand.

``python -m harness.readme_table README.md results/`` rewrites the block between the two markers; with
``--check`` it writes nothing and exits 1 when the block is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from harness.formatting import ABSENT, format_difference, format_ratio_range, format_seconds, markdown_table
from harness.schema import Ratio, Result, load_result
from harness.statistics import fill_derived
from oppo_kit.errors import OppoError, StateError

BEGIN = "<!-- results:begin -->"
END = "<!-- results:end -->"
RATIOS = ("trl/sequential", "sequential/overcommit", "sequential/both", "trl/both", "trl/trl_overlap")
HEADER = (
    "Result",
    "Work",
    "Machine",
    *RATIOS,
    "Final accuracy (points), else score, last rung less baseline",
    "Time to reward",
)
NO_RESULTS = "No results are committed yet."
NOTE = (
    "Ratios: how many times more seconds per trained response the first takes than the second; whole runs "
    "without warm-up, drain included; median over pairs (lowest to highest). Difference: mean over paired "
    "seeds (90 % interval). Time to reward: training time to 90 % of the baseline's gain; not reached: by half of "
    "the runs or more. Each runner has its own fastest number of threads. One pair tells little."
)


def render_table(results_dir: Path) -> str:
    """A Markdown table of every ``results_dir``/*/result.json with one of ``RATIOS``, no smoke run and without fault.

    Raises:
        StateError: a results file does not fit.
    """
    files = sorted(results_dir.glob("*/result.json"))
    loaded = [(file, fill_derived(load_result(file))) for file in files]
    rows = [
        _row(result, f"{results_dir.name}/{file.parent.name}")
        for file, result in loaded
        if not result.is_quick and result.workload.fault is None and set(RATIOS) & set(result.ratios)
    ]
    return f"{markdown_table(HEADER, rows)}\n\n{NOTE}" if rows else NO_RESULTS


def replace_block(text: str, table: str, *, source: str) -> str:
    """``text`` with ``table`` between the markers.

    Raises:
        StateError: the markers are not there exactly once, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise StateError(
            f"{source} has {BEGIN} {text.count(BEGIN)} times and {END} {text.count(END)} times; the table "
            "needs each exactly once, in this order: add the two lines where it belongs"
        )
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 0 up to date or rewritten, 1 out of date, 2 failed."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.readme_table", description="Rewrite the table of results."
    )
    parser.add_argument("readme", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when the README is out of date"
    )
    options = parser.parse_args(arguments)
    try:
        text = options.readme.read_text(encoding="utf-8")
        renewed = replace_block(text, render_table(options.results), source=str(options.readme))
    except (OppoError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if renewed == text:
        return 0
    if options.check:
        command = f"python -m harness.readme_table {options.readme} {options.results}"
        print(f"{options.readme} is out of date; run: {command}", file=sys.stderr)
        return 1
    options.readme.write_text(renewed, encoding="utf-8")
    return 0


def _row(result: Result, folder: str) -> list[str]:
    work = result.workload
    placement = (
        "" if work.placement == "shared" else f", placement {work.placement} (no speed-up over a normal loop)"
    )
    size = f"B = {work.batch_size}" + (f" × {work.group_size}" if work.group_size > 1 else "")
    backend = "" if work.backend == "hf" else f", backend {work.backend}"
    return [
        f"[{result.name}]({folder}/report.md)",
        f"{work.algorithm}, {work.model}, {size}, {work.num_steps} steps{backend}{placement}",
        _machine(result),
        *(_ratio(result.ratios.get(name)) for name in RATIOS),
        _difference(result),
        _times(result),
    ]


def _machine(result: Result) -> str:
    where = result.environment
    machine = ", ".join(where.gpus) or f"{where.cpu}, {where.num_cpu_cores} cores"
    return f"{machine} (uncommitted changes)" if where.is_dirty else machine


def _ratio(ratio: Ratio | None) -> str:
    return ABSENT if ratio is None else f"{ratio.median:.2f} ({format_ratio_range(ratio)})"


def _difference(result: Result) -> str:
    candidates = product(("", "/score_mean"), ("both", "overcommit"), ("trl", "sequential"))
    for ending, rung, baseline in candidates:
        difference = result.learning_differences.get(f"{rung}-{baseline}{ending}")
        if difference is not None:
            mean, interval = format_difference(difference, is_accuracy=not ending)
            return f"{mean} ({interval}), {'score, ' if ending else ''}{rung} less {baseline}"
    return ABSENT


def _times(result: Result) -> str:
    """By runner; nothing where there was no gain to reach."""
    times = result.time_to_reward_s
    if all(seconds is None for seconds in times.values()):
        return ABSENT
    return ", ".join(
        f"{name} {'not reached' if s is None else format_seconds(s)}" for name, s in times.items()
    )


if __name__ == "__main__":
    sys.exit(main())
