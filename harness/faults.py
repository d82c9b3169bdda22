"""Faults that one puts into a training on purpose, to see whether the check finds them.

A benchmark with ``--fault`` says so in its result, and is no measurement of anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from oppo_kit.errors import UnknownNameError
from oppo_kit.protocols import Algorithm
from oppo_kit.types import RolloutBatch, TrainBatch

Prepare = Callable[[RolloutBatch], TrainBatch]


def shift_logprobs(prepare: Prepare) -> Prepare:
    """Every token has the log-probs of the one before it: off by one."""

    def shifted(batch: RolloutBatch) -> TrainBatch:
        def shift(logprobs: Tensor) -> Tensor:
            return torch.where(batch.response_mask, logprobs.roll(1, 1), 0.0)

        behaviour, proximal = shift(batch.behaviour_logprobs), shift(batch.proximal_logprobs)
        return prepare(replace(batch, behaviour_logprobs=behaviour, proximal_logprobs=proximal))

    return shifted


def flip_advantages(prepare: Prepare) -> Prepare:
    """What was better than expected becomes less likely."""

    def flipped(batch: RolloutBatch) -> TrainBatch:
        train_batch = prepare(batch)
        train_batch.tensors["advantages"] = -train_batch.tensors["advantages"]
        return train_batch

    return flipped


FAULTS: Mapping[str, Callable[[Prepare], Prepare]] = MappingProxyType(
    {"shifted_logprobs": shift_logprobs, "flipped_advantages": flip_advantages}
)
"""By the name that ``bench --fault`` takes."""


def break_algorithm(algorithm: Algorithm, fault: str) -> None:
    """Put a fault into this object.

    Raises:
        UnknownNameError: there is no such fault.
    """
    if fault not in FAULTS:
        raise UnknownNameError("fault", fault, FAULTS)
    broken: Any = algorithm
    broken.prepare = FAULTS[fault](algorithm.prepare)
