"""Results with given held-out curves, for checks of convergence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
from results_factory import NUM_STEPS, make_result, make_run

from harness.schema import Result

# With three evaluations: before training, in the middle, at the end; gains 0.4 in final and 0.25 in area.
REFERENCE = (0.2, 0.5, 0.6)


def make_checked(
    curves: Mapping[int, Sequence[float | None]] | Sequence[Sequence[float | None]],
    *,
    runner: str = "both",
    **changes: Any,
) -> Result:
    """One runner with a held-out accuracy curve by seed; a plain sequence has seeds 0, 1, …"""
    by_seed = curves if isinstance(curves, Mapping) else dict(enumerate(curves))
    runs = [
        make_run([1.0] * NUM_STEPS, seed=seed, pair=pair, accuracies=values)
        for pair, (seed, values) in enumerate(by_seed.items())
    ]
    return make_result({runner: runs}, **changes)


def make_pair(
    final_differences: Sequence[float], *, reference: Sequence[float] = REFERENCE
) -> tuple[Result, Result]:
    """Both's runs end by these differences above trl's, one seed each, and are equal before."""
    runs = [(*reference[:-1], reference[-1] + difference) for difference in final_differences]
    return make_checked(runs), make_checked([reference] * len(runs), runner="trl")


def random_curves(
    seed: int, *, num_seeds: int = 5, spread: float = 0.02
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """[S, E] curves of run and reference about the same rise, so noisy that all three verdicts occur."""
    generator = numpy.random.default_rng(seed)
    shift = generator.choice([0.0, -0.03, -0.15])
    rise = numpy.array([0.2, 0.4, 0.5, 0.55, 0.6])
    noise = generator.normal(0.0, spread, size=(2, num_seeds, len(rise)))
    noise[..., 0] = 0.0
    run, reference = rise + noise
    run[:, 1:] += shift
    return run, reference


def save(result: Result, folder: Path) -> Path:
    """Write the result as ``oppo-kit bench`` does."""
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(result.model_dump_json(), encoding="utf-8")
    return folder
