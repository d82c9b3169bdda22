"""When responses are scored in the next step, decided from what steps cost per decoded token.

Pure state machines: they know no clock, no tensors, no engine. The loop reads ``plan`` before a step and calls
``observe`` after it. "No overlap" is a candidate like the others, so overlap switches itself off where it costs.
"""

# pyright: reportReturnType=false
# A method of a protocol is its docstring.
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations_with_replacement, pairwise
from statistics import median
from typing import Any, Literal, Protocol, TypeGuard

from oppo_kit.errors import ConfigError, StateError, UnknownNameError

ChunkControl = Literal["fixed", "paper", "robust"]

# The paper's period.
PAPER_PERIOD_STEPS = 50

# Counted steps of a candidate in each round. The first two rounds drop what is far off, soon; the later ones hold
# only what is close, where measuring costs little and every change of plan costs a step. With 15 % noise 8 counted
# steps know a cost to 5 %, 14 to 4 %.
ROUND_STEPS = (2, 2, 4, 6)
# Sigmas between all of one candidate's costs and all of another's that drop the slower in the first round. The nearest
# of two and two equal ones lie 1.1 sigma on the other side of each other, so 1.5 is passed by 1 pair in 100, and one
# twice as slow (0.69 in logarithms) is dropped at 15 % noise in 9 of 10 races.
FIRST_DROP_SIGMAS = 1.5
# Noise of log costs that is assumed at least in the first round, whose few differences may be equal by chance.
MIN_FIRST_NOISE = 0.1
# Standard errors that drop a candidate in a later round: of some ten comparisons one errs in one race of ten to
# twenty, and then about a candidate that hardly differs from the best.
DROP_ERRORS = 2.5
# Standard errors after the last round within which the simpler candidate wins: few, since a candidate 10 % slower
# must not win by its place in the list. At 1.0 the best of (1, 0.95, 0.9, 0.85) is missed by 10 % 3 times as often.
TIE_ERRORS = 0.5
# A gain below 2 % is not worth a plan with more parts.
TIE_FRAC = 0.02
# The median of |a − b| of two independent standard Gaussians.
MEDIAN_GAUSSIAN_DIFFERENCE = 0.954
# Lengths beside one another of which the median is taken: one odd batch must not reopen a race.
LENGTH_STEPS = 5
# A response half as long again, or two thirds, spends another share of its time in prefill and in the tail. A race
# costs 15 steps at least, so less drift is not worth one.
LENGTH_DRIFT = 1.5


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """When the scorers see a response.

    Attributes:
        score_at: "batch", all responses once the batch is chosen (no overlap); "sample", each as it ends;
            "chunk", its tokens while it is decoded.
        chunk_tokens: tokens of a response between two feeds; 0 unless score_at is "chunk".
    """

    score_at: Literal["batch", "sample", "chunk"]
    chunk_tokens: int = 0

    def __post_init__(self) -> None:
        if (self.chunk_tokens > 0) != (self.score_at == "chunk") or self.chunk_tokens < 0:
            raise ConfigError(
                f"score_at={self.score_at!r} with chunk_tokens={self.chunk_tokens}: at least 1 for 'chunk', else 0"
            )


class ChunkController(Protocol):
    """Sets the plan of each step."""

    @property
    def plan(self) -> ChunkPlan:
        """What the next step uses."""

    def observe(self, cost_s_per_token: float, length_mean: float) -> None:
        """Take the outcome of a step that used ``plan``.

        Args:
            cost_s_per_token: seconds of the step by tokens decoded in it; one that is not finite and positive is
                ignored, and the step with it.
            length_mean: mean tokens of the trained responses.
        """

    def state_dict(self) -> dict[str, Any]:
        """Primitives only."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            StateError: it is of another kind of controller or other candidates, lacks a field, or one is damaged.
        """


class FixedChunk:
    """One plan, whatever it costs."""

    def __init__(self, plan: ChunkPlan) -> None:
        self.plan = plan

    def observe(self, cost_s_per_token: float, length_mean: float) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, Any]:
        """Kind and plan."""
        return {"kind": "fixed", "candidates": _packed([self.plan])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the state has the same plan.

        Raises:
            StateError: another kind or plan.
        """
        _check_state(state, "fixed", [self.plan])


class PaperChunk:
    """Every N steps each candidate on one step, then the fastest (arXiv 2509.25762, chunk size).

    For comparison: one measurement decides, so that a noisy step does, too. Not in the paper: the first trial is
    at the first step.
    """

    def __init__(self, candidates: Sequence[ChunkPlan], *, period_steps: int = PAPER_PERIOD_STEPS) -> None:
        _check_candidates(candidates)
        if period_steps <= len(candidates):
            raise ConfigError(
                f"period_steps={period_steps} must exceed the {len(candidates)} candidates that it tries"
            )
        self._candidates = list(candidates)
        self._period_steps = period_steps
        self._step = 0
        self._costs: list[float] = []

    @property
    def plan(self) -> ChunkPlan:
        """What the next step uses."""
        if len(self._costs) < len(self._candidates):
            return self._candidates[len(self._costs)]
        return self._candidates[self._costs.index(min(self._costs))]

    def observe(self, cost_s_per_token: float, length_mean: float) -> None:  # noqa: ARG002
        """Count the step; in a trial, note its cost."""
        if not _is_positive(cost_s_per_token):
            return
        if len(self._costs) < len(self._candidates):
            self._costs.append(float(cost_s_per_token))
        self._step += 1
        if self._step == self._period_steps:
            self._step, self._costs = 0, []

    def state_dict(self) -> dict[str, Any]:
        """Kind, candidates, the step of the period and the costs of its trials."""
        return {
            "kind": "paper",
            "candidates": _packed(self._candidates),
            "step": self._step,
            "costs": list(self._costs),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            StateError: another kind or candidates, or a missing or damaged field.
        """
        _check_state(state, "paper", self._candidates)
        step = _index(state, "step", self._period_steps)
        costs = _floats(state, "costs")
        if len(costs) != min(step, len(self._candidates)):
            raise StateError(
                f"saved chunk controller has {len(costs)} costs at step {step} of its period; it is damaged"
            )
        self._step, self._costs = step, costs


class RobustChunk:
    """A race with repeated measurements: each round measures the candidates left, then drops the surely slower.

    Costs are compared as logarithms, y = log(s per token). A candidate's location is the Hodges-Lehmann estimate,
    the median of (y_i + y_j)/2 over i <= j; the noise σ is the median of |y_i − y_{i−1}| over all candidates by
    that of a Gaussian with σ = 1. With b the candidate of the lowest location, c is dropped, but never for less than
    TIE_FRAC, when
        first round:  min(y_c) − max(y_a) > FIRST_DROP_SIGMAS · σ for some a  (one outlier of two decides nothing)
        later:        loc(c) − loc(b) > DROP_ERRORS · σ · √(2/n)               (n measurements each)
    After the last round the earliest candidate wins with loc(c) − loc(b) <= max(TIE_FRAC, TIE_ERRORS · σ · √(2/n)).

    The first step after a change of plan is not counted: what is in flight was begun under the other one. When
    the responses' mean length has moved by LENGTH_DRIFT since the race was opened, it is opened again. Replaces
    the paper's rule (see ``PaperChunk``), which one noisy step fools and which tries a bad candidate for ever.
    """

    def __init__(self, candidates: Sequence[ChunkPlan]) -> None:
        _check_candidates(candidates)
        self._candidates = list(candidates)
        self._open()

    @property
    def plan(self) -> ChunkPlan:
        """What the next step uses."""
        return self._candidates[self._current]

    def observe(self, cost_s_per_token: float, length_mean: float) -> None:
        """Count the step; at the end of a visit go to the next candidate, at the end of a round drop some."""
        if not _is_positive(cost_s_per_token):
            return
        if _is_positive(length_mean):
            self._note_length(float(length_mean))
        if self._has_drifted():
            self._open()
            return
        if len(self._alive) == 1:
            return
        if self._is_first_step:
            self._is_first_step = False
            return
        self._log_costs[self._current].append(math.log(cost_s_per_token))
        if len(self._log_costs[self._current]) < sum(ROUND_STEPS[: self._round + 1]):
            return
        later = [index for index in self._alive if index > self._current]
        if later:
            self._visit(later[0])
        else:
            self._end_round()

    def state_dict(self) -> dict[str, Any]:
        """Kind, candidates, and where the race stands."""
        return {
            "kind": "robust",
            "candidates": _packed(self._candidates),
            "alive": list(self._alive),
            "log_costs": [list(costs) for costs in self._log_costs],
            "first_lengths": list(self._first_lengths),
            "last_lengths": list(self._last_lengths),
            "round": self._round,
            "current": self._current,
            "is_first_step": self._is_first_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            StateError: another kind or candidates, or a missing or damaged field.
        """
        _check_state(state, "robust", self._candidates)
        num_candidates = len(self._candidates)
        current = _index(state, "current", num_candidates)
        race_round = _index(state, "round", len(ROUND_STEPS) + 1)
        first, last = _floats(state, "first_lengths"), _floats(state, "last_lengths")
        alive, log_costs = state.get("alive"), state.get("log_costs")
        if (
            not isinstance(alive, list)
            or current not in alive
            or alive != [index for index in range(num_candidates) if index in alive]
            or not isinstance(log_costs, list)
            or len(log_costs) != num_candidates
            or not all(_are_floats(costs) for costs in log_costs)
            or (len(alive) > 1 and not _are_of_round([len(log_costs[index]) for index in alive], race_round))
            or max(len(first), len(last)) > LENGTH_STEPS
            or min(first + last, default=1) <= 0
            or not isinstance(state.get("is_first_step"), bool)
        ):
            raise StateError(
                f"saved chunk controller does not add up: candidates {alive!r} left of {num_candidates}, {current} "
                f"measured in round {race_round}, costs {log_costs!r}, lengths {first} and {last}, is_first_step "
                f"{state.get('is_first_step')!r}; it is damaged"
            )
        self._alive, self._log_costs = list(alive), [list(costs) for costs in log_costs]
        self._first_lengths, self._last_lengths = first, last
        self._round, self._current, self._is_first_step = race_round, current, state["is_first_step"]

    def _open(self) -> None:
        """Forget everything; the race begins with the first candidate."""
        self._alive = list(range(len(self._candidates)))
        self._log_costs: list[list[float]] = [[] for _ in self._candidates]
        self._first_lengths: list[float] = []
        self._last_lengths: list[float] = []
        self._round = 0
        self._current = 0
        self._is_first_step = True

    def _visit(self, index: int) -> None:
        self._current = index
        self._is_first_step = True

    def _end_round(self) -> None:
        costs = {index: self._log_costs[index] for index in self._alive}
        noise = self._noise()
        is_last = self._round == len(ROUND_STEPS) - 1
        if self._round == 0:
            places = {index: min(costs[index]) for index in costs}
            reference = min(max(costs[index]) for index in costs)
            bound = FIRST_DROP_SIGMAS * max(noise, MIN_FIRST_NOISE)
        else:
            places = {index: _location(costs[index]) for index in costs}
            reference = min(places.values())
            # Every candidate left has the same number of measurements.
            error = noise * math.sqrt(2 / len(self._log_costs[self._alive[0]]))
            bound = max(TIE_FRAC, (TIE_ERRORS if is_last else DROP_ERRORS) * error)
        self._alive = [index for index in self._alive if places[index] - reference <= bound]
        if is_last:
            self._alive = self._alive[:1]
        self._round += 1
        self._visit(self._alive[0])

    def _noise(self) -> float:
        """Robust σ of the log costs; successive differences leave out what the candidates differ by."""
        changes = [abs(b - a) for costs in self._log_costs for a, b in pairwise(costs)]
        return median(changes) / MEDIAN_GAUSSIAN_DIFFERENCE

    def _note_length(self, length: float) -> None:
        if len(self._first_lengths) < LENGTH_STEPS:
            self._first_lengths.append(length)
        self._last_lengths = [*self._last_lengths, length][-LENGTH_STEPS:]

    def _has_drifted(self) -> bool:
        if len(self._first_lengths) < LENGTH_STEPS:
            return False
        change = median(self._last_lengths) / median(self._first_lengths)
        return not 1 / LENGTH_DRIFT <= change <= LENGTH_DRIFT


def create_chunk_controller(
    kind: ChunkControl, *, plan: ChunkPlan, candidates: Sequence[ChunkPlan]
) -> ChunkController:
    """The controller that a config names: ``fixed`` keeps ``plan``, the others choose among ``candidates``.

    Raises:
        UnknownNameError: there is no such kind.
        ConfigError: no candidate, or one twice.
    """
    if kind == "fixed":
        return FixedChunk(plan)
    if kind == "paper":
        return PaperChunk(candidates)
    if kind == "robust":
        return RobustChunk(candidates)
    raise UnknownNameError("chunk controller", kind, ["fixed", "paper", "robust"])


def _location(log_costs: Sequence[float]) -> float:
    """Hodges-Lehmann: as precise as the mean under Gaussian noise, and unmoved by a quarter of outliers."""
    return median((a + b) / 2 for a, b in combinations_with_replacement(log_costs, 2))


def _is_positive(quantity: float) -> bool:
    return math.isfinite(quantity) and quantity > 0


def _check_candidates(candidates: Sequence[ChunkPlan]) -> None:
    if not candidates or len(set(candidates)) != len(candidates):
        raise ConfigError(f"chunk candidates {list(candidates)} must be at least one, and none of them twice")


def _packed(candidates: Sequence[ChunkPlan]) -> list[dict[str, Any]]:
    return [asdict(plan) for plan in candidates]


def _check_state(state: Mapping[str, Any], kind: str, candidates: Sequence[ChunkPlan]) -> None:
    if state.get("kind") != kind or state.get("candidates") != _packed(candidates):
        raise StateError(
            f"saved chunk controller is {state.get('kind')!r} over {state.get('candidates')}, this one is {kind!r} "
            f"over {_packed(candidates)}; set score_at, chunk_control and the chunk sizes as saved, or start anew"
        )


def _index(state: Mapping[str, Any], name: str, num_allowed: int) -> int:
    value = state.get(name)
    if type(value) is not int or not 0 <= value < num_allowed:
        raise StateError(
            f"saved chunk controller has {name}={value!r}, allowed are 0 to {num_allowed - 1}; it is damaged"
        )
    return value


def _floats(state: Mapping[str, Any], name: str) -> list[float]:
    value = state.get(name)
    if not _are_floats(value):
        raise StateError(
            f"saved chunk controller has {name}={value!r}, finite numbers are allowed; it is damaged"
        )
    return list(value)


def _are_floats(value: Any) -> TypeGuard[list[float]]:
    return isinstance(value, list) and all(type(item) is float and math.isfinite(item) for item in value)


def _are_of_round(counts: Sequence[int], race_round: int) -> bool:
    """Whether these numbers of measurements can occur while the round goes on."""
    return (
        race_round < len(ROUND_STEPS)
        and min(counts) >= sum(ROUND_STEPS[:race_round])
        and max(counts) <= sum(ROUND_STEPS[: race_round + 1])
    )
