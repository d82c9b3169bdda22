"""How many groups beyond B the next step holds, decided from the mean reward of the trained ones.

Pure state machines: they know no clock, no tensors, no engine. The loop reads ``delta`` before a step and calls
``observe`` once after its update.
"""

# pyright: reportReturnType=false
# A method of a protocol is its docstring.
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from scipy.special import stdtrit

from oppo_kit.errors import ConfigError, StateError, UnknownNameError

DeltaControl = Literal["fixed", "paper", "robust"]

# The paper does not give its w; ten steps are a fifth of the period of its other controller.
PAPER_WINDOW_STEPS = 10
# The paper's increment and decrement ("about 1").
PAPER_STEP = 1

# What shows a drop: about the steps within which a collapse must be answered. Six points before and six behind a
# drop of five noise sigmas give t = 4.3; with 8 points it is 3.4, with 16 a steep rise before the drop hides it.
RECENT_STEPS = 12
# What shows a plateau: the rise over 48 steps is known to ±0.5 noise sigma; 24 steps would know it to ±0.7.
WINDOW_STEPS = 48
# One-sided confidence of a rise or a fall. Measured with Gaussian noise: a steady reward shows a false fall once in
# 210 steps, one that rises by 0.05 sigma a step once in 1,700, by 0.1 sigma once in 10,000; heavier tails fewer.
TREND_CONFIDENCE = 0.995
# One-sided confidence that the slope lies inside the dead band, on each of its sides.
FLAT_CONFIDENCE = 0.95
# The dead band: a rise below 1.5 noise sigma in WINDOW_STEPS is a plateau. The interval takes 0.8 of it on a full
# window, so a true plateau is seen in 5 of 6 steps, and a rise of 0.05 sigma a step (2.4 in 48) is never taken for one.
DEAD_BAND_SIGMAS = 1.5
# Below half the effective sample the update has twice the variance of a fresh batch: more than any Δ saves in time.
MIN_EFFECTIVE_SAMPLE_FRAC = 0.5
# Squares of larger rewards overflow; they are ignored like NaN.
LARGEST_REWARD = 1e100
# Groups held under the old Δ are trained in the next step or two, and would be blamed on the new one.
COOLDOWN_STEPS = 2
# Share of the budget won back by a step of rising reward: a halved Δ returns within 8 steps.
INCREASE_FRAC = 1 / 16
# Share of Δ given up by a step of flat reward: 64 falls to 6 in 17 steps, 8 to 0 in 8.
DECAY_FRAC = 1 / 8


class DeltaController(Protocol):
    """Sets the overcommit Δ of each step."""

    @property
    def delta(self) -> int:
        """What the next step uses."""

    def observe(self, reward_mean: float, effective_sample_frac: float | None) -> None:
        """Take the outcome of a trained step.

        Args:
            reward_mean: mean score of the trained batch; one that is not finite is ignored.
            effective_sample_frac: (Σw)² / (n Σw²) of the importance weights, 0 to 1; None when not measured.
        """

    def state_dict(self) -> dict[str, Any]:
        """Primitives only."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            StateError: it is of another kind of controller, lacks a field, or a field is out of range.
        """


@dataclass(frozen=True, slots=True)
class Trend:
    """Least-squares line through equally spaced rewards.

    b = Σ(t − t̄)(R_t − R̄) / S_tt,   s² = Σ(R_t − R̄ − b(t − t̄))² / (n − 2),   se(b) = s / √S_tt

    Attributes:
        slope: b, reward per step.
        slope_error: se(b).
        noise: s, the rewards' scatter about the line.
        degrees: n − 2.
    """

    slope: float
    slope_error: float
    noise: float
    degrees: int

    @classmethod
    def of(cls, rewards: Sequence[float]) -> Trend:
        """The trend of at least three rewards."""
        num_steps = len(rewards)
        # Against the first one, so that what all rewards have in common costs no digits.
        changes = [reward - rewards[0] for reward in rewards]
        mean_change = math.fsum(changes) / num_steps
        times = [step - (num_steps - 1) / 2 for step in range(num_steps)]
        times_squared = math.fsum(time * time for time in times)
        slope = math.fsum(time * change for time, change in zip(times, changes, strict=True)) / times_squared
        squares = math.fsum(
            (change - mean_change - slope * time) ** 2 for time, change in zip(times, changes, strict=True)
        )
        noise = math.sqrt(squares / (num_steps - 2))
        return cls(slope, noise / math.sqrt(times_squared), noise, num_steps - 2)

    def margin(self, confidence: float) -> float:
        """Half the interval of the slope: t(confidence, n − 2) · se(b)."""
        return float(stdtrit(self.degrees, confidence)) * self.slope_error

    @property
    def is_rising(self) -> bool:
        """The slope is surely above zero."""
        return self.slope > self.margin(TREND_CONFIDENCE)

    @property
    def is_falling(self) -> bool:
        """The slope is surely below zero."""
        return self.slope < -self.margin(TREND_CONFIDENCE)

    @property
    def is_flat(self) -> bool:
        """The slope surely lies inside the dead band."""
        band = DEAD_BAND_SIGMAS * self.noise / WINDOW_STEPS
        return abs(self.slope) + self.margin(FLAT_CONFIDENCE) <= band


class FixedDelta:
    """Δ = Δ_max, whatever happens."""

    def __init__(self, delta_max: int) -> None:
        _check_bounds(0, delta_max)
        self.delta = delta_max

    def observe(self, reward_mean: float, effective_sample_frac: float | None) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, Any]:
        """Kind and Δ."""
        return {"kind": "fixed", "delta": self.delta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the state has the same Δ.

        Raises:
            StateError: another kind, a missing field, or another Δ.
        """
        _check_state(state, "fixed", self.delta, self.delta)


class PaperDelta:
    """Δ from the slope between the ends of a window, as the paper has it (arXiv 2509.25762, Δ control).

    s_t = (1/w) Σ_{i=t−w+1..t} (R_i − R_{i−1});   s_t > 0: Δ ← min(Δ_max, Δ + 1), else Δ ← max(Δ_min, Δ − 1)

    For comparison: the sum telescopes to (R_t − R_{t−w}) / w, two noisy ends, so that on a plateau Δ is a random walk.
    The paper's Algorithm 1 has another step, max(1, ⌊Δ/4⌋); its text, followed here, has a constant of about 1. Not
    in the paper: w is PAPER_WINDOW_STEPS; while fewer rewards are there the slope is taken over those; Δ starts
    at Δ_max; rewards that are not finite are ignored. The effective sample is not looked at.
    """

    def __init__(self, delta_max: int, delta_min: int = 0) -> None:
        _check_bounds(delta_min, delta_max)
        self._delta_min, self._delta_max = delta_min, delta_max
        self._delta = delta_max
        self._rewards: list[float] = []

    @property
    def delta(self) -> int:
        """What the next step uses."""
        return self._delta

    def observe(self, reward_mean: float, effective_sample_frac: float | None) -> None:  # noqa: ARG002
        """One up or one down; nothing at the first reward."""
        if not abs(reward_mean) < LARGEST_REWARD:
            return
        self._rewards = [*self._rewards, float(reward_mean)][-(PAPER_WINDOW_STEPS + 1) :]
        if len(self._rewards) < 2:
            return
        if self._rewards[-1] > self._rewards[0]:
            self._delta = min(self._delta_max, self._delta + PAPER_STEP)
        else:
            self._delta = max(self._delta_min, self._delta - PAPER_STEP)

    def state_dict(self) -> dict[str, Any]:
        """Kind, Δ and the window."""
        return {"kind": "paper", "delta": self._delta, "rewards": list(self._rewards)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            StateError: another kind, a missing field, or a field out of range.
        """
        _check_state(state, "paper", self._delta_min, self._delta_max, max_rewards=PAPER_WINDOW_STEPS + 1)
        self._delta, self._rewards = state["delta"], list(state["rewards"])


class RobustDelta:
    """Δ from a confidence interval of the reward's regression slope; starts at Δ_max, its staleness budget.

    ┌ effective sample below its bound, or slope < 0 on either window ─► Δ ← ⌊Δ/2⌋
    ├ slope > 0 on the long window                                    ─► Δ ← Δ + ⌈Δ_max/16⌉
    ├ slope inside the dead band on the long window, when it is full  ─► Δ ← ⌊7Δ/8⌋
    └ undecided                                                       ─► Δ stays

    The short window, the last RECENT_STEPS, sees a sudden fall before the long one, the last WINDOW_STEPS; a rise it
    would see hardly sooner (after 16 steps against 17, measured), but more often where there is none. The dead band
    is a number of noise sigmas and the noise is the residuals', so that rewards may be shifted and scaled. A fall
    that was answered is forgotten: the windows start afresh, else one drop would halve Δ at every step. What is lost
    in a steep rise counts as a fall once it exceeds what RECENT_STEPS had gained; and the reward must be noisy from
    step to step independently, for slow waves are followed as rises and falls.

    Replaces the paper's rule (see ``PaperDelta``): faster down than up, and a plateau ends at Δ_min.
    """

    def __init__(self, delta_max: int, delta_min: int = 0) -> None:
        _check_bounds(delta_min, delta_max)
        self._delta_min, self._delta_max = delta_min, delta_max
        self._delta = delta_max
        self._rewards: list[float] = []
        self._cooldown = 0

    @property
    def delta(self) -> int:
        """What the next step uses."""
        return self._delta

    def observe(self, reward_mean: float, effective_sample_frac: float | None) -> None:
        """Halve, raise, decay or hold."""
        is_cooling = self._cooldown > 0
        self._cooldown = max(0, self._cooldown - 1)
        is_usable = abs(reward_mean) < LARGEST_REWARD
        if is_usable:
            self._rewards = [*self._rewards, float(reward_mean)][-WINDOW_STEPS:]
        if effective_sample_frac is not None and effective_sample_frac < MIN_EFFECTIVE_SAMPLE_FRAC:
            if not is_cooling:
                self._halve()
                self._cooldown = COOLDOWN_STEPS
            return
        if len(self._rewards) < RECENT_STEPS or not is_usable:
            return
        recent, whole = Trend.of(self._rewards[-RECENT_STEPS:]), Trend.of(self._rewards)
        if recent.is_falling or whole.is_falling:
            self._halve()
            self._rewards = []
        elif whole.is_rising:
            self._delta = min(self._delta_max, self._delta + math.ceil(self._delta_max * INCREASE_FRAC))
        elif len(self._rewards) == WINDOW_STEPS and whole.is_flat:
            self._delta = max(self._delta_min, math.floor(self._delta * (1 - DECAY_FRAC)))

    def state_dict(self) -> dict[str, Any]:
        """Kind, Δ, the window and what is left of the cooldown."""
        return {
            "kind": "robust",
            "delta": self._delta,
            "rewards": list(self._rewards),
            "cooldown": self._cooldown,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            StateError: another kind, a missing field, or a field out of range.
        """
        _check_state(state, "robust", self._delta_min, self._delta_max, max_rewards=WINDOW_STEPS)
        cooldown = state.get("cooldown")
        if type(cooldown) is not int or not 0 <= cooldown <= COOLDOWN_STEPS:
            raise StateError(
                f"saved Δ controller has cooldown={cooldown!r}, allowed are 0 to {COOLDOWN_STEPS}; it is damaged"
            )
        self._delta, self._rewards, self._cooldown = state["delta"], list(state["rewards"]), cooldown

    def _halve(self) -> None:
        self._delta = max(self._delta_min, self._delta // 2)


def create_delta_controller(kind: DeltaControl, *, delta_max: int, delta_min: int = 0) -> DeltaController:
    """The controller that a config names; ``fixed`` has no use for ``delta_min``.

    Raises:
        UnknownNameError: there is no such kind.
        ConfigError: not 0 <= delta_min <= delta_max.
    """
    if kind == "fixed":
        return FixedDelta(delta_max)
    if kind == "paper":
        return PaperDelta(delta_max, delta_min)
    if kind == "robust":
        return RobustDelta(delta_max, delta_min)
    raise UnknownNameError("Δ controller", kind, ["fixed", "paper", "robust"])


def _check_bounds(delta_min: int, delta_max: int) -> None:
    if not 0 <= delta_min <= delta_max:
        raise ConfigError(
            f"delta_min={delta_min} and delta_max={delta_max}: 0 <= delta_min <= delta_max must hold"
        )


def _check_state(
    state: Mapping[str, Any], kind: str, delta_min: int, delta_max: int, *, max_rewards: int | None = None
) -> None:
    """Raise a StateError unless kind, Δ and, where there is one, the window of rewards fit."""
    if state.get("kind") != kind:
        raise StateError(
            f"saved Δ controller is of kind {state.get('kind')!r}, this one is {kind!r}; "
            f"set delta_control as it was saved, or start anew"
        )
    delta = state.get("delta")
    if type(delta) is not int or not delta_min <= delta <= delta_max:
        raise StateError(
            f"saved Δ controller has delta={delta!r}, allowed are {delta_min} to {delta_max}; "
            f"set delta as it was saved, or start anew"
        )
    if max_rewards is None:
        return
    rewards = state.get("rewards")
    if not isinstance(rewards, list) or len(rewards) > max_rewards or not all(map(_is_usable, rewards)):
        raise StateError(
            f"saved Δ controller has rewards={rewards!r}, a list of up to {max_rewards} finite numbers is allowed; "
            f"it is damaged"
        )


def _is_usable(reward: object) -> bool:
    return type(reward) is float and abs(reward) < LARGEST_REWARD
