"""Pairs of responses in the forms that TRL's online DPO has for prompts, rows and tensors. Knows no trainer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oppo_kit.config import OverlapConfig
from oppo_kit.errors import ConfigError, DataError
from oppo_kit.integrations.trl.prompts import Row
from oppo_kit.ops.padding import pad_rows

_logger = logging.getLogger(__name__)

PAIR = 2
"""Responses to a prompt."""


class RowLoader:
    """A loader of collated batches as one of rows, for ``replay_loader``."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.dataset = loader.dataset
        self.batch_sampler = loader.batch_sampler

    def set_epoch(self, epoch: int) -> None:
        """As the loader's."""
        self._loader.set_epoch(epoch)

    def collate_fn(self, rows: list[Any]) -> list[Row]:
        """What the loader's makes of some rows, row by row."""
        return rows_of(self._loader.collate_fn(rows))

    def __iter__(self) -> Iterator[list[Row]]:
        return (rows_of(batch) for batch in getattr(self._loader, "base_dataloader", self._loader))


def rows_of(inputs: Mapping[str, Any]) -> list[Row]:
    """What a collator made of some rows, as rows.

    Raises:
        DataError: a column that is no list.
    """
    num_rows = len(inputs["prompt"])
    for name, values in inputs.items():
        if not isinstance(values, list | tuple):
            raise DataError(
                f"the collator makes a {type(values).__name__} of the column {name!r}, which cannot be given to other "
                "rows; remove the column or rename it"
            )
    return [{name: values[index] for name, values in inputs.items()} for index in range(num_rows)]


def in_blocks(pairs: Tensor) -> Tensor:
    """[2B, …] from p0c0 p0c1 p1c0 p1c1 … to p0c0 p1c0 … p0c1 p1c1 …, which is the stock trainer's order."""
    return torch.cat([pairs[member::PAIR] for member in range(PAIR)])


def padded(rows: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """[R, T] rows padded behind their ends, and [R, T] 1 where they are not."""
    width = max(len(row) for row in rows)
    mask = pad_rows([[1] * len(row) for row in rows], width, torch.long)
    return pad_rows(rows, width, torch.long).masked_fill(mask == 0, pad_token_id), mask


def drop_last(args: Any, data: Any) -> None:
    """Leave out the micro-batch that an epoch ends with where it is not full.

    Raises:
        DataError: none is full.
    """
    if not hasattr(data, "__len__"):
        return
    num_prompts, num_pairs = len(data), args.train_batch_size
    if num_prompts < num_pairs:
        raise DataError(
            f"the training data has {num_prompts} prompts, and a micro-batch takes per_device_train_batch_size="
            f"{num_pairs}; give at least as many, or lower it and raise gradient_accumulation_steps"
        )
    if num_prompts % num_pairs and not args.dataloader_drop_last:
        _logger.warning(
            "the last %d of %d prompts of every epoch make no micro-batch of %d and are left out",
            num_prompts % num_pairs,
            num_prompts,
            num_pairs,
        )
        args.dataloader_drop_last = True


def refuse_delta(num_pairs: int, overlap: OverlapConfig) -> None:
    """Δ against the age bound.

    Raises:
        ConfigError: more than B pairs could be due at once.
    """
    limit = num_pairs * overlap.max_age
    if overlap.delta > limit:
        raise ConfigError(
            f"overlap.delta={overlap.delta} exceeds B × max_age = {num_pairs} × {overlap.max_age}, where B = "
            f"per_device_train_batch_size = {num_pairs}: more than B pairs could be due at once; delta may be 0 to "
            f"{limit}, usually up to {max(1, num_pairs // 2)}, or raise per_device_train_batch_size or overlap.max_age"
        )
