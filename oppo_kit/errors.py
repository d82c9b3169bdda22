"""Every error that oppo_kit raises on purpose.

    OppoError
    ├── ConfigError          a setting is unknown, out of range or contradicts another
    │   └── UnknownNameError a name that is not registered; lists the nearest ones
    ├── DataError            prompts or columns that cannot be used
    ├── ModelError           a model that is missing, unreachable or cannot be served
    ├── MissingExtraError    an optional dependency; names the extra to install
    ├── PartFailedError      a scorer, generator or learner raised or died; names part and rollouts
    │   └── NonFiniteError   logits, scores or losses that are NaN or infinite; names the rows
    ├── RewardError          a reward function broke its contract; names the function
    └── StateError           a state or results file that does not fit

Messages say what, the value, what is allowed and what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OppoError(Exception):
    """Base of all errors raised by oppo_kit on purpose."""


class ConfigError(OppoError):
    """A setting is unknown, out of range or contradicts another one."""


class UnknownNameError(ConfigError):
    """A name that nobody registered."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        names = sorted(known)
        super().__init__(f"unknown {kind} {name!r}; {did_you_mean(name, names)}{f' {hint}' if hint else ''}")


class DataError(OppoError):
    """Prompts or columns that cannot be used."""


class ModelError(OppoError):
    """A model that is missing, unreachable or cannot be served."""


class MissingExtraError(OppoError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; install it with: pip install 'oppo-kit[{extra}]'")


class PartFailedError(OppoError):
    """A scorer, generator or learner raised or died."""


class NonFiniteError(PartFailedError):
    """Logits, scores or losses that are NaN or infinite."""


class RewardError(OppoError):
    """A reward function broke its contract."""


class StateError(OppoError):
    """A state or results file that does not fit."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest names first, then all of them: ``did you mean 'ppo'? known: grpo, ppo``."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    guess = f"did you mean {' or '.join(repr(n) for n in nearest)}? " if nearest else ""
    return f"{guess}known: {', '.join(names) if names else 'none'}"
