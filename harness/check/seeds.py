"""How many seeds a check will need: ``python -m harness.check.seeds RESULT --runner NAME --seeds N --out FOLDER``.

Before a comparison, only its reference has been run. The spread of its curves between seeds, times the root of two, is
how much paired differences spread if the two sides of a check share nothing but their seeds' numbers; whatever a seed
does to both sides alike makes the true spread smaller. From that, the power of checks at several margins. Writes
``seeds.json`` and ``seeds.md``; to be committed before the comparison is run.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from harness.check.command import parse_margin
from harness.check.equivalence import QUANTITIES, TARGET_POWER, Number, curve_numbers, power, seeds_needed
from harness.check.pairing import By, curves_of
from harness.environment import describe_environment
from harness.formatting import ABSENT, format_number, markdown_table
from harness.measurement.output import carry_out, provenance
from harness.schema import Environment, Result, load_result
from oppo_kit.errors import ConfigError, StateError

MARGINS = (0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)


class Spread(BaseModel):
    """One number of the curves, over the seeds that were run.

    Attributes:
        gain: mean, less the mean before training.
        spread: standard deviation between seeds.
    """

    model_config = ConfigDict(extra="forbid")

    by: By
    number: Number
    gain: float
    spread: float

    @property
    def paired_frac(self) -> float:
        """Standard deviation of paired differences if sides share nothing, as a share of the gain."""
        return math.sqrt(2) * self.spread / self.gain


class SeedPlan(BaseModel):
    """A results file: what the reference showed, and the check that is planned."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    command: str
    environment: Environment
    result: str = Field(description="name of the result that was read")
    result_commit: str | None
    runner: str
    num_seeds_seen: int
    num_seeds_planned: int
    margin_planned: float
    spreads: list[Spread]

    def num_needed(self, by: By, margin: float) -> int | None:
        """Seeds with at least 80 % power for final and area together, without a true difference."""
        chosen = [spread for spread in self.spreads if spread.by == by]
        return seeds_needed([spread.paired_frac for spread in chosen], [margin] * len(chosen))

    def least_power(self, by: By, margin: float) -> float:
        """Power of the planned number of seeds, at least: the chances to fail of final and area are added up."""
        chosen = [spread for spread in self.spreads if spread.by == by]
        misses = sum(1 - power(self.num_seeds_planned, spread.paired_frac, margin) for spread in chosen)
        return max(0.0, 1 - misses)


def plan_seeds(folder: Path, *, runner: str, num_seeds: int, margin: float, command: str) -> SeedPlan:
    """Read a reference and say what a check against it can tell.

    Raises:
        StateError: the result cannot be read, has one seed, or gained nothing.
        ConfigError: fewer than two seeds are planned, or the margin is no share.
    """
    if num_seeds < 2 or not 0 < margin < 1:
        raise ConfigError(
            f"a check of {num_seeds} seeds within {margin} of the gain says nothing; plan 2 seeds or more, and a "
            "margin above 0 and below 1"
        )
    result = load_result(folder)
    spreads: list[Spread] = []
    num_seen = 0
    for by in _values_of(result, runner):
        responses, curves = curves_of(result, runner=runner, by=by)
        num_seen = len(curves)
        if num_seen < 2:
            raise StateError(
                f"{folder} has one seed of runner {runner!r}, which shows no spread; run at least 2 seeds"
            )
        numbers, initial = curve_numbers(responses, curves), float(curves[:, 0].mean())
        for name, values in zip(QUANTITIES, numbers.T, strict=True):
            gain = float(values.mean()) - initial
            if gain <= 0:
                raise StateError(
                    f"{folder} gained nothing: held-out {by} {initial:.4g} before training, its {name} "
                    f"{initial + gain:.4g}; take a reference that learns"
                )
            spreads.append(Spread(by=by, number=name, gain=gain, spread=float(values.std(ddof=1))))
    return SeedPlan(
        command=command,
        environment=describe_environment(),
        result=result.name,
        result_commit=result.environment.commit,
        runner=runner,
        num_seeds_seen=num_seen,
        num_seeds_planned=num_seeds,
        margin_planned=margin,
        spreads=spreads,
    )


def render(plan: SeedPlan) -> str:
    """``seeds.md``."""
    seen = [
        [
            spread.by,
            spread.number,
            format_number(spread.gain),
            format_number(spread.spread),
            _percent(spread.paired_frac),
        ]
        for spread in plan.spreads
    ]
    bys: list[By] = list(dict.fromkeys(spread.by for spread in plan.spreads))
    needed = [
        [
            _percent(margin),
            *(_count(plan.num_needed(by, margin)) for by in bys),
            *(_percent(plan.least_power(by, margin)) for by in bys),
        ]
        for margin in MARGINS
    ]
    return "\n".join(
        [
            f"# How many seeds a check against {plan.result} needs",
            "",
            f"From {plan.num_seeds_seen} seeds of runner `{plan.runner}` alone. Planned: {plan.num_seeds_planned} "
            f"seeds, a margin of {_percent(plan.margin_planned)} of the gain in held-out score; power at least "
            f"{_percent(plan.least_power('score', plan.margin_planned))}. {_advice(plan)}",
            "",
            markdown_table(
                ["held-out", "number", "gain", "spread between seeds", "of paired differences, of the gain"],
                seen,
            ),
            "",
            f"Spread of paired differences: as if the two sides shared nothing, so a bound. Seeds for "
            f"{_percent(TARGET_POWER)} power without a true difference, and the power of {plan.num_seeds_planned} "
            "seeds, at least:",
            "",
            markdown_table(
                ["margin", *(f"seeds, by {by}" for by in bys), *(f"power, by {by}" for by in bys)], needed
            ),
            "",
            provenance(plan.environment, plan.command),
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m harness.check.seeds", description=__doc__)
    parser.add_argument("result", type=Path, help="folder of a benchmark of the reference alone")
    parser.add_argument("--runner", default="sequential", help="the reference")
    parser.add_argument("--seeds", type=int, required=True, help="how many the check will have")
    parser.add_argument("--margin", default="10%", help="of the check, as a share of the gain: 10%% or 0.1")
    parser.add_argument("--out", type=Path, required=True, help="folder for seeds.json and seeds.md")
    options = parser.parse_args(arguments)
    command = (
        f"python -m harness.check.seeds {options.result} --runner {options.runner} --seeds {options.seeds} "
        f"--margin {options.margin}"
    )

    def measure() -> SeedPlan:
        margin = parse_margin(options.margin)
        return plan_seeds(
            options.result, runner=options.runner, num_seeds=options.seeds, margin=margin, command=command
        )

    return carry_out(options.out, "seeds", measure, render)


def _advice(plan: SeedPlan) -> str:
    """Whether the plan is enough for the usual power, and else what would be."""
    needed = plan.num_needed("score", plan.margin_planned)
    if needed is not None and needed <= plan.num_seeds_planned:
        return f"That is enough: {needed} seeds have {_percent(TARGET_POWER)}."
    wide_enough = [m for m in MARGINS if (plan.num_needed("score", m) or math.inf) <= plan.num_seeds_planned]
    more = "no number of seeds up to 1,000 is enough" if needed is None else f"take {needed} seeds"
    wider = f", or a margin of {_percent(wide_enough[0])}" if wide_enough else ""
    return f"That is not enough for {_percent(TARGET_POWER)}: {more}{wider}, or evaluate on more problems."


def _values_of(result: Result, runner: str) -> list[By]:
    """Score, and accuracy where the task has a checker."""
    runs = result.runners[runner].runs if runner in result.runners else []
    has_checker = all(evaluation.accuracy is not None for run in runs for evaluation in run.evaluations)
    return ["score", "accuracy"] if has_checker else ["score"]


def _percent(frac: float) -> str:
    return f"{100 * frac:.3g} %"


def _count(number: int | None) -> str:
    return ABSENT if number is None else str(number)


if __name__ == "__main__":
    sys.exit(main())
