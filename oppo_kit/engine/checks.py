"""What must hold of an engine's settings before it starts."""

from __future__ import annotations

from collections.abc import Mapping

from oppo_kit.config import OverlapConfig
from oppo_kit.errors import ConfigError
from oppo_kit.protocols import Algorithm, ScorerHandle


def check_settings(
    algorithm: Algorithm,
    scorers: Mapping[str, ScorerHandle],
    batch_size: int,
    num_steps: int,
    overlap: OverlapConfig,
) -> None:
    """Settings of an engine that contradict each other or its parts.

    Raises:
        ConfigError: a scorer is missing, a count is not positive, or Δ or the mini-batches do not fit B.
    """
    missing = sorted(algorithm.scorers - set(scorers))
    if missing:
        raise ConfigError(
            f"algorithm {algorithm.name!r} needs the scorers {missing}, but only {sorted(scorers)} are given; "
            "pass them in scorers={...}"
        )
    if batch_size < 1 or num_steps < 1:
        raise ConfigError(f"batch_size={batch_size} and num_steps={num_steps} must both be at least 1")
    if overlap.delta > batch_size * overlap.max_age:
        raise ConfigError(
            f"delta={overlap.delta} exceeds batch_size × max_age = {batch_size * overlap.max_age}, "
            "so more than B groups could be due at once; lower delta or raise max_age"
        )
    if algorithm.num_mini_batches > batch_size:
        raise ConfigError(
            f"num_mini_batches={algorithm.num_mini_batches} exceeds batch_size={batch_size}: "
            "a mini-batch would be empty"
        )
