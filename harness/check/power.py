"""How often a check ends how: ``python -m harness.check.power --out FOLDER``.

Checks of simulated learning curves with known true differences, at several spreads and numbers of seeds. A curve rises
from its start by a gain and levels off; a seed makes both of its runs gain more or less alike; each run then differs by
its own luck in training, and each of its evaluations by that of evaluating, but for the first, which all runs share.
The run under test gains less than the reference by a number of margins, so that both numbers of the curve differ by
exactly as many margins. Judged by the code that judges results. Writes ``power.json`` (raw counts) and ``power.md``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy
from pydantic import BaseModel, ConfigDict, Field

from harness.check.equivalence import ALPHA, QUANTITIES, curve_numbers, judge, power
from harness.check.pairing import FloatArray
from harness.environment import describe_environment
from harness.formatting import markdown_table
from harness.measurement.output import carry_out, provenance
from harness.schema import Environment

MARGIN = 0.1
# True differences in margins, spreads of one run's gain as shares of it, numbers of seeds.
DIFFERENCES = (0.0, 0.5, 1.0, 1.5, 2.0)
SPREADS = (0.02, 0.05, 0.1)
NUM_SEEDS = (3, 5, 10, 20)
# A curve like those of the embedded model: from 0.2 by 0.5, three quarters of it in the first half.
START, GAIN, RATE = 0.2, 0.5, 3.0
RESPONSES: FloatArray = numpy.linspace(0.0, 1920.0, 7)
# Seeds differ from each other much more than the two runs of a seed do, and evaluations less than runs.
SEED_SPREAD, EVALUATION_SHARE = 0.2, 0.5


@dataclass(frozen=True, slots=True)
class Scenario:
    """One cell: what is true of the simulated curves.

    Attributes:
        spread_frac: standard deviation of a run's gain about its seed's, as a share of the mean gain.
        difference: how many margins less the run gains than the reference.
    """

    num_seeds: int
    spread_frac: float
    difference: float


class Cell(BaseModel):
    """How many simulated checks of one scenario ended how; ``num_refused`` of them because nothing was gained."""

    model_config = ConfigDict(extra="forbid")

    num_seeds: int
    spread_frac: float
    difference: float
    num_equivalent: int
    num_different: int
    num_undecided: int
    num_refused: int


class PowerStudy(BaseModel):
    """A results file: raw counts."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    command: str
    environment: Environment
    scipy: str
    random_seed: int = Field(description="of numpy.random.default_rng, drawn from in the order of the cells")
    num_simulations: int = Field(description="per cell")
    margin: float
    cells: list[Cell]


def simulate(
    scenario: Scenario, num_simulations: int, generator: numpy.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """Held-out curves of run and reference, each [num_simulations, num_seeds, E] at ``RESPONSES``."""
    shape = (num_simulations, scenario.num_seeds)
    of_seed = 1 + SEED_SPREAD * generator.standard_normal(shape)
    rise = _rise()

    def draw(gain: float) -> FloatArray:
        own = scenario.spread_frac * generator.standard_normal(shape)
        evaluating = EVALUATION_SHARE * scenario.spread_frac * generator.standard_normal((*shape, len(rise)))
        evaluating[..., 0] = 0.0
        return START + GAIN * ((gain * of_seed + own)[..., None] * rise + evaluating)

    return draw(1 - MARGIN * scenario.difference), draw(1.0)


def count(scenario: Scenario, num_simulations: int, generator: numpy.random.Generator) -> Cell:
    """Judge simulated checks."""
    judged = judge(RESPONSES, *simulate(scenario, num_simulations, generator), MARGIN)
    is_usable = (judged.gain > 0).all(axis=-1)
    num_equivalent = int((judged.is_equivalent & is_usable).sum())
    num_different = int((judged.is_different & is_usable).sum())
    num_usable = int(is_usable.sum())
    return Cell(
        num_seeds=scenario.num_seeds,
        spread_frac=scenario.spread_frac,
        difference=scenario.difference,
        num_equivalent=num_equivalent,
        num_different=num_different,
        num_undecided=num_usable - num_equivalent - num_different,
        num_refused=num_simulations - num_usable,
    )


def stated_power(num_seeds: int, spread_frac: float) -> tuple[float, float]:
    """What ``power`` says of a scenario without a difference: at least, and at most, since both numbers must pass."""
    # Both numbers are sums of the values, so the values' weights in them give their spread exactly.
    weights = curve_numbers(RESPONSES, numpy.eye(len(RESPONSES)))
    rise = _rise()
    chances = []
    for index in range(len(QUANTITIES)):
        weight = weights[:, index]
        variance = (rise @ weight) ** 2 + EVALUATION_SHARE**2 * float((weight[1:] ** 2).sum())
        spread = math.sqrt(2 * variance) * GAIN * spread_frac
        chances.append(power(num_seeds, spread, MARGIN * GAIN * float(rise @ weight)))
    return max(0.0, 1 - sum(1 - chance for chance in chances)), min(chances)


def measure(num_simulations: int, random_seed: int, *, command: str) -> PowerStudy:
    """All cells."""
    generator = numpy.random.default_rng(random_seed)
    cells = [
        count(Scenario(num_seeds, spread_frac, difference), num_simulations, generator)
        for spread_frac in SPREADS
        for num_seeds in NUM_SEEDS
        for difference in DIFFERENCES
    ]
    return PowerStudy(
        command=command,
        environment=describe_environment(),
        scipy=version("scipy"),
        random_seed=random_seed,
        num_simulations=num_simulations,
        margin=MARGIN,
        cells=cells,
    )


def render(study: PowerStudy) -> str:
    """``power.md``."""
    by_row: dict[tuple[float, int], list[Cell]] = {}
    for cell in study.cells:
        by_row.setdefault((cell.spread_frac, cell.num_seeds), []).append(cell)
    differences = [cell.difference for cell in next(iter(by_row.values()))]
    header = ["spread", "seeds", *(f"{difference:g} margins" for difference in differences), "stated power"]
    rows = [
        [
            f"{100 * spread_frac:g} %",
            str(num_seeds),
            *(_rates(cell, study.num_simulations) for cell in cells),
            "{:.1f} to {:.1f}".format(*(100 * chance for chance in stated_power(num_seeds, spread_frac))),
        ]
        for (spread_frac, num_seeds), cells in by_row.items()
    ]
    beyond = [cell.num_equivalent for cell in study.cells if cell.difference >= 1]
    within = [cell.num_different for cell in study.cells if cell.difference <= 1]
    standard_error = 100 * math.sqrt(ALPHA * (1 - ALPHA) / study.num_simulations)
    num_refused = sum(cell.num_refused for cell in study.cells)
    return "\n".join(
        [
            "# How often `oppo-kit check` ends how",
            "",
            f"Per cell, of {study.num_simulations} simulated checks with a margin of {100 * study.margin:g} % of the "
            "gain: per cent that end as equivalent (exit 0) / different (exit 1) / cannot tell (exit 2). Columns: the "
            "true difference. Spread: standard deviation of a run's gain about its seed's, as a share of the gain. "
            "Stated power: what `power()` says of exit 0 without a difference, at least and at most, since both "
            "numbers of a curve must pass.",
            "",
            markdown_table(header, rows),
            "",
            f"Largest rate of exit 0 at a true difference of a margin or more: "
            f"{_percent(max(beyond, default=0), study)} %. Largest rate of exit 1 at a true difference of a margin or "
            f"less: {_percent(max(within, default=0), study)} %. Both are meant to be at most about "
            f"{100 * ALPHA:g} %; the standard error of such a rate is {standard_error:.2f} points. "
            f"{num_refused} checks were refused, because the reference gained nothing.",
            "",
            f"numpy seed {study.random_seed}, numpy {study.environment.packages.get('numpy')}, scipy {study.scipy}; "
            f"{provenance(study.environment, study.command)}",
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m harness.check.power", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for power.json and power.md")
    parser.add_argument("--simulations", type=int, default=10_000, help="checks per cell")
    parser.add_argument("--seed", type=int, default=0, help="numpy's")
    options = parser.parse_args(arguments)
    command = f"python -m harness.check.power --simulations {options.simulations} --seed {options.seed}"
    return carry_out(
        options.out, "power", lambda: measure(options.simulations, options.seed, command=command), render
    )


def _rise() -> FloatArray:
    """[E] share of its gain that a curve has reached; 0 at first, 1 at the end."""
    progress = RESPONSES / RESPONSES[-1]
    return (1 - numpy.exp(-RATE * progress)) / (1 - math.exp(-RATE))


def _rates(cell: Cell, num_simulations: int) -> str:
    counts = cell.num_equivalent, cell.num_different, cell.num_undecided
    return " / ".join(f"{100 * number / num_simulations:.1f}" for number in counts)


def _percent(number: int, study: PowerStudy) -> str:
    return f"{100 * number / study.num_simulations:.1f}"


if __name__ == "__main__":
    sys.exit(main())
