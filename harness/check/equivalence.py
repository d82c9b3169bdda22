"""Are two sets of learning curves equivalent? Two one-sided t-tests on two numbers of each curve, paired by seed.

**final** is the mean held-out value over the evaluations after 80 % of the trained responses; **area** is the mean
height of the held-out curve against trained responses. Of both, the difference run less reference is taken by seed.
The margin is a share of what the reference gained: of its mean final, or mean area, less its mean initial value.

- **equivalent**: for both numbers, both one-sided tests reject at α = 5 %, that is, the 90 % intervals lie inside the
  margins. Both must, so no correction is needed (intersection-union): at a true difference of a margin or more in
  either number it is concluded in at most about 5 % of checks.
- **different**: for either number, the 95 % interval lies wholly outside the margin. Either suffices, so each is
  tested at α / 2 (Bonferroni): at true differences within the margins it is concluded in at most about 5 %.
- **undecided**: neither.

"About", since the margin is itself estimated from the reference's runs; ``harness.check.power`` measures the rates.
Everything is array-valued over leading axes, so that a simulation of thousands of checks runs the very same code.
Knows nothing of files, runners or seeds' numbers beyond ``compare``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy
from numpy.typing import NDArray
from scipy import integrate, stats

from harness.check.pairing import By, FloatArray, PairedCurves, pair_results
from harness.schema import Result
from oppo_kit.errors import ConfigError, StateError

Verdict = Literal["equivalent", "different", "undecided"]
Number = Literal["final", "area"]

# The last fifth: late enough to be the end, and with several evaluations their noise averages out.
FINAL_AFTER_FRAC = 0.8
ALPHA = 0.05
# What the number of seeds is advised for: the usual four chances in five.
TARGET_POWER = 0.8
# Nobody runs more, and a search must end.
MAX_SEEDS = 1000
# A gain of this share of the values, or a spread of this share of the margin, is rounding.
ROUNDING_FRAC = 1e-9
QUANTITIES: tuple[Number, ...] = ("final", "area")


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """Checks judged at once. ``...`` are leading axes, Q the two numbers (final, area), S seeds.

    Attributes:
        gain: [..., Q] what the reference gained.
        margin: [..., Q] share of the gain.
        differences: [..., Q, S] run less reference.
        low, high: [..., Q] 90 % interval of the mean difference; infinite with one seed.
        wide_low, wide_high: [..., Q] 95 % interval.
        is_inside: [..., Q] both one-sided tests reject.
        is_outside: [..., Q] the 95 % interval lies wholly outside the margin.
    """

    gain: FloatArray
    margin: FloatArray
    differences: FloatArray
    low: FloatArray
    high: FloatArray
    wide_low: FloatArray
    wide_high: FloatArray
    is_inside: NDArray[numpy.bool_]
    is_outside: NDArray[numpy.bool_]

    @property
    def is_equivalent(self) -> NDArray[numpy.bool_]:
        """[...] both numbers are inside."""
        return numpy.asarray(self.is_inside.all(axis=-1))

    @property
    def is_different(self) -> NDArray[numpy.bool_]:
        """[...] either number is outside."""
        return numpy.asarray(self.is_outside.any(axis=-1))


@dataclass(frozen=True, slots=True)
class Quantity:
    """One number of the curves, in the held-out value's own unit.

    Attributes:
        run, reference: means over seeds.
        gain: the reference's mean less its mean before training.
        margin: what a difference may be, either way.
        differences: run less reference, by seed.
        interval: two-sided 90 % of the mean difference, by which equivalence is decided; infinite with one seed.
        wide_interval: two-sided 95 %, by which a difference is decided.
        is_inside, is_outside: see ``Judgement``.
    """

    name: Number
    run: float
    reference: float
    gain: float
    margin: float
    difference: float
    differences: tuple[float, ...]
    interval: tuple[float, float]
    wide_interval: tuple[float, float]
    is_inside: bool
    is_outside: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a check found.

    Attributes:
        margin: as a share of the reference's gain.
        seeds: those that were compared.
        seeds_needed: of an undecided check, about how many seeds would show equivalence with at least 80 % power if
            there is no true difference, at the observed spread; 2 where there is none to observe; None above
            ``MAX_SEEDS``, and where the verdict stands.
    """

    verdict: Verdict
    margin: float
    final: Quantity
    area: Quantity
    seeds: tuple[int, ...]
    seeds_needed: int | None
    curves: PairedCurves = field(repr=False, compare=False)

    @property
    def quantities(self) -> tuple[Quantity, Quantity]:
        """Final, then area."""
        return self.final, self.area


def compare(
    run: Path | Result,
    reference: Path | Result,
    *,
    runner: str | None = None,
    reference_runner: str | None = None,
    margin: float = 0.1,
    by: By = "score",
) -> Comparison:
    """Judge whether a run learned as a reference did.

    Args:
        run, reference: a folder of ``oppo-kit bench``, its ``result.json``, or the result itself.
        runner, reference_runner: which runner of each; needed where a result has more than one.
        margin: share of the reference's gain that a difference may be, above 0 and below 1.
        by: the held-out value to judge by: the mean score by the training reward, which is what is learned, or the
            share right by the task's own checker, which is noisier where the reward is another one.

    Raises:
        StateError: a file cannot be read, the two are not the same work, or the reference gained nothing.
        ConfigError: the margin is out of range, a runner must be named, or a name is unknown.
    """
    if not 0 < margin < 1:
        meant = f"; {margin:g} percent is {margin:g}%" if 1 <= margin < 100 else ""
        raise ConfigError(
            f"margin={margin} must be a share of the reference's gain above 0 and below 1, for example 0.1 or 10%"
            f"{meant}"
        )
    curves = pair_results(run, reference, runner=runner, reference_runner=reference_runner, by=by)
    judged = judge(curves.responses, curves.run, curves.reference, margin)
    _check_gain(curves, judged.gain)
    verdict: Verdict = "undecided"
    if judged.is_equivalent:
        verdict = "equivalent"
    elif judged.is_different:
        verdict = "different"
    final, area = (_quantity(curves, judged, index) for index in range(2))
    needed = seeds_needed(_spreads(curves, judged), judged.margin) if verdict == "undecided" else None
    return Comparison(
        verdict=verdict,
        margin=margin,
        final=final,
        area=area,
        seeds=curves.seeds,
        seeds_needed=needed,
        curves=curves,
    )


def curve_numbers(responses: FloatArray, values: FloatArray) -> FloatArray:
    """Final and area of curves.

    Args:
        responses: [E] responses trained before each evaluation, ascending.
        values: [..., E] held-out values.

    Returns:
        [..., Q]
    """
    is_late = responses > FINAL_AFTER_FRAC * responses[-1]
    final = values[..., is_late].mean(axis=-1)
    area = integrate.trapezoid(values, responses, axis=-1) / (responses[-1] - responses[0])
    return numpy.stack([final, area], axis=-1)


def judge(responses: FloatArray, run: FloatArray, reference: FloatArray, margin: float) -> Judgement:
    """Judge one or many checks.

    Args:
        responses: [E] responses trained before each evaluation, ascending from 0.
        run, reference: [..., S, E] held-out values by seed.
        margin: share of the reference's gain.
    """
    ours, theirs = curve_numbers(responses, run), curve_numbers(responses, reference)
    gain = theirs.mean(axis=-2) - reference[..., 0].mean(axis=-1)[..., None]
    allowed = margin * gain
    differences = numpy.swapaxes(ours - theirs, -1, -2)
    mean = differences.mean(axis=-1)
    num_seeds = differences.shape[-1]
    if num_seeds < 2:
        infinite, nowhere = numpy.full_like(mean, numpy.inf), numpy.zeros_like(mean, dtype=bool)
        return Judgement(
            gain, allowed, differences, -infinite, infinite, -infinite, infinite, nowhere, nowhere
        )
    is_flat = numpy.ptp(differences, axis=-1) <= ROUNDING_FRAC * numpy.abs(allowed)
    # Without a spread there is no t: such rows are judged by their mean, and any other numbers stand in for the tests.
    spread_out = numpy.where(is_flat[..., None], numpy.arange(num_seeds, dtype=float), differences)
    below: Any = stats.ttest_1samp(spread_out - allowed[..., None], 0.0, axis=-1, alternative="less")
    above: Any = stats.ttest_1samp(spread_out + allowed[..., None], 0.0, axis=-1, alternative="greater")
    both_ways = stats.ttest_1samp(spread_out, 0.0, axis=-1)
    narrow = both_ways.confidence_interval(1 - 2 * ALPHA)
    wide = both_ways.confidence_interval(1 - ALPHA)
    low, high, wide_low, wide_high = (
        numpy.where(is_flat, mean, bound) for bound in (narrow.low, narrow.high, wide.low, wide.high)
    )
    rejects_both = (below.pvalue < ALPHA) & (above.pvalue < ALPHA)
    return Judgement(
        gain=gain,
        margin=allowed,
        differences=differences,
        low=low,
        high=high,
        wide_low=wide_low,
        wide_high=wide_high,
        is_inside=numpy.where(is_flat, numpy.abs(mean) < allowed, rejects_both),
        is_outside=(wide_low > allowed) | (wide_high < -allowed),
    )


def power(num_seeds: int, spread: float, margin: float, difference: float = 0.0) -> float:
    """Probability that both one-sided tests of one number reject.

    P(|d̄| < margin - t(1 - α, n - 1) s / √n), with d̄ normal and s = spread · χ(n - 1) / √(n - 1) independent of it,
    integrated over χ. Exact for normal differences and a known margin.

    Args:
        num_seeds: n, pairs.
        spread: standard deviation of the paired differences.
        margin: what a difference may be, either way.
        difference: the true one.
    """
    if num_seeds < 2:
        return 0.0
    if spread <= ROUNDING_FRAC * margin:
        return float(abs(difference) < margin)
    freedom = num_seeds - 1
    error = spread / math.sqrt(num_seeds)
    half_width = float(stats.t.isf(ALPHA, freedom)) * error / math.sqrt(freedom)
    # Beyond the first bounds lie 2e-12 of the probability; above the last the interval is wider than the margins.
    low, high = (
        float(stats.chi.ppf(1e-12, freedom)),
        min(float(stats.chi.isf(1e-12, freedom)), margin / half_width),
    )
    if high <= low:
        return 0.0

    def density(root: FloatArray) -> FloatArray:
        room = margin - half_width * root
        falls_inside = stats.norm.cdf((room - difference) / error) - stats.norm.cdf(
            (-room - difference) / error
        )
        return falls_inside * stats.chi.pdf(root, freedom)

    # Smooth between the bounds; 200 nodes agree with adaptive quadrature to seven decimals.
    return float(integrate.fixed_quad(density, low, high, n=200)[0])


def seeds_needed(spreads: Sequence[float] | FloatArray, margins: Sequence[float] | FloatArray) -> int | None:
    """The fewest seeds with at least 80 % power for all numbers together, if there is no true difference.

    Numbers of one curve depend on each other in unknown ways, so their chances to fail are added up.

    Args:
        spreads: standard deviation of the paired differences, by number.
        margins: by number.

    Returns:
        None above ``MAX_SEEDS``.
    """

    def is_enough(num_seeds: int) -> bool:
        misses = sum(
            1 - power(num_seeds, float(spread), float(margin))
            for spread, margin in zip(spreads, margins, strict=True)
        )
        return misses <= 1 - TARGET_POWER

    counts = range(2, MAX_SEEDS + 1)
    position = bisect_left(counts, True, key=is_enough)
    return counts[position] if position < len(counts) else None


def _spreads(curves: PairedCurves, judged: Judgement) -> FloatArray:
    """[Q] standard deviations of paired differences: observed, or as large as if the sides shared nothing, or 0."""
    if len(curves.seeds) > 1:
        return judged.differences.std(axis=-1, ddof=1)
    if curves.spare is None:
        return numpy.zeros(len(QUANTITIES))
    return math.sqrt(2) * curve_numbers(curves.responses, curves.spare).std(axis=0, ddof=1)


def _check_gain(curves: PairedCurves, gain: FloatArray) -> None:
    scale = float(numpy.abs(curves.reference).max())
    initial = float(curves.reference[:, 0].mean())
    for value, part in zip(gain, ("at the end", "on average over the curve"), strict=True):
        if value <= ROUNDING_FRAC * scale:
            raise StateError(
                f"the reference gained nothing: its mean held-out {curves.field.removesuffix('_mean')} was "
                f"{initial:.4g} before training and {initial + value:.4g} {part}; the margin is a share of the gain, "
                "so take a reference that learns"
            )


def _quantity(curves: PairedCurves, judged: Judgement, index: int) -> Quantity:
    ours, theirs = (
        float(curve_numbers(curves.responses, values)[:, index].mean())
        for values in (curves.run, curves.reference)
    )
    return Quantity(
        name=QUANTITIES[index],
        run=ours,
        reference=theirs,
        gain=float(judged.gain[index]),
        margin=float(judged.margin[index]),
        difference=float(judged.differences[index].mean()),
        differences=tuple(map(float, judged.differences[index])),
        interval=(float(judged.low[index]), float(judged.high[index])),
        wide_interval=(float(judged.wide_low[index]), float(judged.wide_high[index])),
        is_inside=bool(judged.is_inside[index]),
        is_outside=bool(judged.is_outside[index]),
    )
