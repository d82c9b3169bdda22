"""Two results, one runner of each, their held-out curves paired by seed: or the words why they cannot be compared.

Knows nothing of tests or margins. What is compared must be the same work: the same workload, the same configuration
but for ``FREE_SECTIONS``, the same steps, evaluated at the same points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy
from numpy.typing import NDArray

from harness.schema import Evaluation, Result, Run, load_result
from harness.statistics import EvaluationField
from oppo_kit.config import TrainConfig
from oppo_kit.errors import ConfigError, StateError, UnknownNameError

FloatArray = NDArray[numpy.float64]
By = Literal["score", "accuracy"]
_FIELDS: dict[By, EvaluationField] = {"score": "score_mean", "accuracy": "accuracy"}

SAME_WORK = (
    "task",
    "algorithm",
    "model",
    "reward",
    "critic",
    "batch_size",
    "group_size",
    "num_steps",
    "response_length",
    "temperature",
    "dtype",
    "num_eval_problems",
    "eval_sha256",
)
# How stages overlap, and what samples, is what a check is about; seeds are paired, whatever the first one was.
FREE_SECTIONS = ("overlap", "seed", "backend", "vllm")
_NOT_SET = "not set"
# Two unrelated runs differ in dozens of fields, of which some tell enough.
_NUM_LISTED = 6


@dataclass(frozen=True, slots=True, eq=False)
class PairedCurves:
    """Held-out values of both sides at the same evaluations, by seed.

    Attributes:
        run_label, reference_label: how the two sides are called in what people read; never the same.
        field: what the values are, accuracy or score.
        seeds: those that both sides have, ascending.
        responses: [E] responses trained before each evaluation, ascending from 0.
        run, reference: [S, E] values; a seed that ran more than once counts once, with its mean.
        spare: [S', E] all curves of the side with more seeds, when the other side has one only; else None.
        is_smoke: one of the results is a smoke run.
    """

    run_label: str
    reference_label: str
    field: EvaluationField
    seeds: tuple[int, ...]
    responses: FloatArray
    run: FloatArray
    reference: FloatArray
    spare: FloatArray | None
    is_smoke: bool


@dataclass(frozen=True, slots=True)
class _Side:
    """One runner of one result; ``place`` is how messages call it."""

    place: str
    result: Result
    runner: str
    runs: list[Run]


def pair_results(
    run: Path | Result,
    reference: Path | Result,
    *,
    runner: str | None = None,
    reference_runner: str | None = None,
    by: By = "score",
) -> PairedCurves:
    """Choose a runner of each result and pair their runs by seed.

    Args:
        run, reference: a folder of ``oppo-kit bench``, its ``result.json``, or the result itself.
        runner, reference_runner: which runner of each; needed where a result has more than one.
        by: which held-out value: the mean score by the training reward, or the share right by the task's checker.

    Raises:
        UnknownNameError: there is no such value.
        StateError: a file cannot be read, or the two cannot be compared; names the field and both values.
        ConfigError: a runner must be named, is unknown, or would be compared with itself.
    """
    field = _field(by)
    sides = (
        _side("run", run, runner, "--runner"),
        _side("reference", reference, reference_runner, "--reference-runner"),
    )
    _refuse_the_same(run, reference, sides)
    _check_work(*sides)
    _check_grids(*sides)
    curves = [_curves(side, field) for side in sides]
    seeds = _common_seeds(*curves)
    more = max(curves, key=len)
    first = _ordered(sides[1].runs[0])
    labels = _labels(*sides)
    return PairedCurves(
        run_label=labels[0],
        reference_label=labels[1],
        field=field,
        seeds=seeds,
        responses=numpy.array([evaluation.responses_trained for evaluation in first], dtype=float),
        run=numpy.array([curves[0][seed] for seed in seeds]),
        reference=numpy.array([curves[1][seed] for seed in seeds]),
        spare=numpy.array(list(more.values())) if len(more) > len(seeds) else None,
        is_smoke=any(side.result.is_quick for side in sides),
    )


def curves_of(
    source: Path | Result, *, runner: str | None = None, by: By = "score"
) -> tuple[FloatArray, FloatArray]:
    """Held-out curves of one runner alone, for planning.

    Args:
        source, runner, by: as of ``pair_results``.

    Returns:
        [E] responses trained before each evaluation, and [S, E] values by seed.

    Raises:
        UnknownNameError, StateError, ConfigError: as ``pair_results`` does.
    """
    side = _side("result", source, runner, "--runner")
    _check_grids(side, side)
    responses = numpy.array(_grid(side.runs[0])[1], dtype=float)
    return responses, numpy.array(list(_curves(side, _field(by)).values()))


def _field(by: By) -> EvaluationField:
    if by not in _FIELDS:
        raise UnknownNameError("held-out value", by, _FIELDS)
    return _FIELDS[by]


def _side(place: str, source: Path | Result, runner: str | None, option: str) -> _Side:
    result = source if isinstance(source, Result) else load_result(source)
    names = sorted(result.runners)
    if not names:
        raise StateError(f"the {place} holds no runner; pass a benchmark that has run")
    if runner is None and len(names) > 1:
        raise ConfigError(f"the {place} holds the runners {', '.join(names)}; choose one with {option}")
    if runner is not None and runner not in names:
        raise UnknownNameError(f"runner of the {place}", runner, names)
    name = runner or names[0]
    runs = result.runners[name].runs
    if not runs:
        raise StateError(f"runner {name!r} of the {place} has no runs; pass a benchmark that has run it")
    return _Side(place, result, name, runs)


def _refuse_the_same(run: Path | Result, reference: Path | Result, sides: tuple[_Side, _Side]) -> None:
    """A check of something against itself always passes, so it must not look like one."""
    if not isinstance(run, Path) or not isinstance(reference, Path):
        return
    files = [(path / "result.json" if path.is_dir() else path).resolve() for path in (run, reference)]
    if files[0] == files[1] and sides[0].runner == sides[1].runner:
        raise ConfigError(
            f"runner {sides[0].runner!r} of {run} would be compared with itself; pass another reference, or choose "
            "another runner with --runner or --reference-runner"
        )


def _check_work(run: _Side, reference: _Side) -> None:
    found: dict[str, tuple[object, object]] = {}
    for name in SAME_WORK:
        values = getattr(run.result.workload, name), getattr(reference.result.workload, name)
        if values[0] != values[1]:
            # Of a digest of problems and answers, the first digits tell them apart.
            found[f"workload.{name}"] = values if name != "eval_sha256" else (values[0][:8], values[1][:8])
    leaves = {path.rpartition(".")[2] for path in found}
    for path, values in _config_differences(run.result.workload.config, reference.result.workload.config):
        if path.rpartition(".")[2] not in leaves:
            found[f"workload.config.{path}"] = values
    if found:
        listed = "; ".join(
            f"{path} is {ours!r} in the run, {theirs!r} in the reference"
            for path, (ours, theirs) in list(found.items())[:_NUM_LISTED]
        )
        if len(found) > _NUM_LISTED:
            listed += f"; and {len(found) - _NUM_LISTED} more"
        raise StateError(f"not the same work: {listed}; run both with the same settings")


def _config_differences(
    run: Mapping[str, Any], reference: Mapping[str, Any]
) -> list[tuple[str, tuple[object, object]]]:
    """Where they differ. A key that only one side knows, as after an update, has its default in the other."""
    defaults = _flatten(TrainConfig().model_dump(mode="json"))
    ours, theirs = (
        _flatten({key: value for key, value in config.items() if key not in FREE_SECTIONS})
        for config in (run, reference)
    )
    differences = []
    for path in sorted(ours.keys() | theirs.keys()):
        default = defaults.get(path, _NOT_SET)
        values = ours.get(path, default), theirs.get(path, default)
        if values[0] != values[1]:
            differences.append((path, values))
    return differences


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested mappings by dotted path."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        flat |= (
            _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        )
    return flat


def _check_grids(run: _Side, reference: _Side) -> None:
    """The same number of steps in every run, evaluated at the same points."""
    first = reference.runs[0]
    steps, responses = _grid(first)
    if steps[:1] != [0] or responses[-1] <= 0:
        raise StateError(
            f"{_name(reference, first)} is evaluated after steps {_listed(steps)}; a check needs the evaluation before "
            "training (step 0) and at least one after it"
        )
    for side in (reference, run):
        for each in side.runs:
            if len(each.steps) != len(first.steps):
                raise StateError(
                    f"{_name(side, each)} has {len(each.steps)} steps, {_name(reference, first)} has "
                    f"{len(first.steps)}; run both to the end"
                )
            found = _grid(each)
            if found[0] != steps:
                raise StateError(
                    f"{_name(side, each)} is evaluated after steps {_listed(found[0])}, {_name(reference, first)} "
                    f"after {_listed(steps)}; run both with the same --evaluations"
                )
            if found[1] != responses:
                raise StateError(
                    f"{_name(side, each)} had trained {_listed(found[1])} responses at its evaluations, "
                    f"{_name(reference, first)} {_listed(responses)}: that is not the same work"
                )


def _curves(side: _Side, field: EvaluationField) -> dict[int, list[float]]:
    """Values by seed, ascending; repeats of a seed are averaged, since they are not independent."""
    repeats: dict[int, list[list[float]]] = {}
    for run in side.runs:
        repeats.setdefault(run.seed, []).append([_value(side, run, each, field) for each in _ordered(run)])
    return {seed: [fmean(values) for values in zip(*repeats[seed], strict=True)] for seed in sorted(repeats)}


def _value(side: _Side, run: Run, evaluation: Evaluation, field: EvaluationField) -> float:
    value = getattr(evaluation, field)
    if value is None and field == "accuracy":
        raise StateError(
            f"{_name(side, run)} has no held-out accuracy after step {evaluation.step}, as where a task has no "
            "checker, or a data set replaces its prompts; choose another value with --by"
        )
    if value is None or not math.isfinite(value):
        raise StateError(
            f"{_name(side, run)} has held-out {_noun(field)} {value} after step {evaluation.step}; a check needs "
            "a finite number at every evaluation; choose another value with --by"
        )
    return value


def _common_seeds(run: Mapping[int, object], reference: Mapping[int, object]) -> tuple[int, ...]:
    common = run.keys() & reference.keys()
    if not common:
        raise StateError(
            f"no seed in common: the run has {_listed(run)}, the reference {_listed(reference)}; "
            "run both with the same --seed and --pairs"
        )
    # With a single seed on a side there is no test that leaving seeds out could bend, only an answer how many to run.
    if min(len(run), len(reference)) > 1 and len(common) < max(len(run), len(reference)):
        only = [
            f"seed{'s' if len(seeds) > 1 else ''} {_listed(sorted(seeds))} only in the {place}"
            for place, seeds in (("run", run.keys() - common), ("reference", reference.keys() - common))
            if seeds
        ]
        raise StateError(
            f"{' and '.join(only)}: seeds that are left out could decide the verdict; "
            "run both with the same --seed and --pairs"
        )
    return tuple(sorted(common))


def _labels(run: _Side, reference: _Side) -> tuple[str, str]:
    """The runners' names where these tell the sides apart, else the results' names, else the roles."""
    for ours, theirs in ((run.runner, reference.runner), (run.result.name, reference.result.name)):
        if ours != theirs:
            return ours, theirs
    return "the run", "the reference"


def _ordered(run: Run) -> list[Evaluation]:
    return sorted(run.evaluations, key=lambda evaluation: evaluation.step)


def _grid(run: Run) -> tuple[list[int], list[int]]:
    """Steps and trained responses of its evaluations."""
    ordered = _ordered(run)
    return [each.step for each in ordered], [each.responses_trained for each in ordered]


def _name(side: _Side, run: Run) -> str:
    return f"seed {run.seed} of the {side.place}"


def _noun(field: EvaluationField) -> str:
    return "accuracy" if field == "accuracy" else "score"


def _listed(numbers: Any) -> str:
    return ", ".join(map(str, numbers)) or "none"
