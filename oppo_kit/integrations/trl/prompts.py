"""Prompts in the order in which the trainer's own data loader would bring them, as far ahead as the engine likes.

Draw d is the d-th different prompt of that order, over all epochs: a function of d alone, found by replaying a second
loader, so that going on needs no more than the number. Whether the trainer's loader really brings that order is checked
at every generation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from oppo_kit.errors import ConfigError, DataError
from oppo_kit.types import Prompt

Row = Mapping[str, Any]
LazyRow = Callable[[], Row]


@dataclass(frozen=True, slots=True)
class Rounds:
    """How a training's micro-steps fall into rounds of generation.

    Attributes:
        per_round: micro-steps that one generated batch serves.
        accumulation: micro-steps of an update; the last one of an epoch may have fewer.
        per_epoch: micro-steps of an epoch; None where the data has no length.
    """

    per_round: int
    accumulation: int
    per_epoch: int | None

    @property
    def updates_per_epoch(self) -> int | None:
        """None where the data has no length."""
        return None if self.per_epoch is None else max(1, math.ceil(self.per_epoch / self.accumulation))

    def num_micro_steps(self, num_updates: int) -> int:
        """Micro-steps that so many updates take from the start."""
        if self.per_epoch is None or self.updates_per_epoch is None:
            return num_updates * self.accumulation
        num_epochs, rest = divmod(num_updates, self.updates_per_epoch)
        return num_epochs * self.per_epoch + rest * self.accumulation

    def num_rounds(self, num_updates: int) -> int:
        """Generated batches that so many updates take, at least one."""
        return max(1, math.ceil(self.num_micro_steps(num_updates) / self.per_round))


class ReplayedPrompts:
    """A ``PromptSource`` over the rows of a trainer's data, in the trainer's order.

    Args:
        replay: all rows without end, each call from the first on; a row is only read when its function is called.
        tokenize: a row's prompt as the trainer itself encodes it.
        max_new_tokens: token limit of every response.
        limit_name: what the trainer's arguments call it.
        context: tokens that the policy can read; None: no limit is known.
    """

    def __init__(
        self,
        replay: Callable[[], Iterator[LazyRow]],
        tokenize: Callable[[Row], Sequence[int]],
        *,
        max_new_tokens: int,
        limit_name: str,
        context: int | None = None,
    ) -> None:
        self._replay = replay
        self._tokenize = tokenize
        self._max_new_tokens = max_new_tokens
        self._limit_name = limit_name
        self._context = context
        self._rows: Iterator[LazyRow] = iter(())
        self._num_replayed = 0
        self._is_started = False
        self._kept: dict[int, Row] = {}

    def row(self, draw_id: int) -> Row:
        """The data set's row of this draw."""
        if draw_id not in self._kept:
            if not self._is_started or draw_id < self._num_replayed:
                self._rows, self._num_replayed, self._is_started = self._replay(), 0, True
            for _ in islice(self._rows, draw_id - self._num_replayed):
                pass
            self._kept[draw_id] = next(self._rows)()
            self._num_replayed = draw_id + 1
        return self._kept[draw_id]

    def draw(self, draw_id: int) -> Prompt:
        """The prompt of this draw.

        Raises:
            DataError: it has no token, or too many for the policy.
        """
        row = self.row(draw_id)
        token_ids = tuple(int(token_id) for token_id in self._tokenize(row))
        if not token_ids:
            raise DataError(
                f"draw {draw_id}: the prompt {_short(row['prompt'])} has no token, and the policy must read one; "
                "remove the row, or use a tokenizer that adds BOS"
            )
        if self._context is not None and len(token_ids) + self._max_new_tokens > self._context:
            raise DataError(
                f"draw {draw_id}: {len(token_ids)} prompt tokens and {self._limit_name}={self._max_new_tokens} exceed "
                f"the policy's context of {self._context}; lower {self._limit_name}, or leave long prompts out"
            )
        return Prompt(draw_id, token_ids, self._max_new_tokens, row)

    def forget_before(self, draw_id: int) -> None:
        """Drop rows that will not be asked for again; one that is, is replayed."""
        self._kept = {kept: row for kept, row in self._kept.items() if kept >= draw_id}

    def check_order(self, first: int, rows: Sequence[Row], group_size: int) -> None:
        """The trainer's loader brings the draws from ``first`` on, each ``group_size`` times.

        Raises:
            ConfigError: it does not.
        """
        for index, row in enumerate(rows):
            expected = self.row(first + index // group_size)
            if not is_same_row(row, expected):
                raise ConfigError(
                    f"the data loader brought the prompt {_short(row.get('prompt'))} where draw "
                    f"{first + index // group_size}, {_short(expected.get('prompt'))}, was expected: its order is not "
                    "that of a second loader of the same trainer; use no random transform, no one-time stream, no "
                    "sampler of your own and no early end of an epoch, and resume a streamed data set in its first "
                    "epoch only"
                )


def is_same_row(one: Row, other: Row) -> bool:
    """Equal columns; what cannot be compared with ``==``, such as arrays and NaN, by how it is written."""
    try:
        if one == other:
            return True
    except (RuntimeError, TypeError, ValueError):
        pass
    return repr(dict(one)) == repr(dict(other))


def replay_loader(
    make_loader: Callable[[], Any], *, batch_size: int, group_size: int, repeats: int
) -> Iterator[LazyRow]:
    """The different rows of a loader that brings B of them, each G times, in batches of which each comes several times.

    Args:
        make_loader: the trainer's loader, anew; it may use the global random generator, which is put back.
        batch_size: B.
        group_size: G.
        repeats: how often a batch comes.

    Raises:
        DataError: an epoch has no batch.
    """
    with torch.random.fork_rng(devices=[]):
        loader = make_loader()
    for epoch in count():
        loader.set_epoch(epoch)
        is_empty = True
        for lazy_rows in islice(_batches(loader), 0, None, repeats):
            is_empty = False
            yield from islice(lazy_rows, 0, batch_size * group_size, group_size)
        if is_empty:
            raise DataError(
                f"the training data has less than one batch of {batch_size} prompts; give more, or lower the "
                "generation batch"
            )


def _batches(loader: Any) -> Iterator[list[LazyRow]]:
    """By index where there is one, so that rows are read when they are asked for; else as a stream."""
    if isinstance(loader.dataset, IterableDataset):
        for rows in _undisturbing(getattr(loader, "base_dataloader", loader)):
            yield [partial(_given, row) for row in rows]
    else:
        for indices in _undisturbing(loader.batch_sampler):
            yield [partial(_read, loader, index) for index in indices]


def _undisturbing(items: Iterable[Any]) -> Iterator[Any]:
    """The items; whatever making them draws from the global random generator is put back."""
    iterator, end = None, object()
    while True:
        with torch.random.fork_rng(devices=[]):
            iterator = iter(items) if iterator is None else iterator
            item = next(iterator, end)
        if item is end:
            return
        yield item


def _read(loader: Any, index: int) -> Row:
    return loader.collate_fn([loader.dataset[index]])[0]


def _given(row: Row) -> Row:
    return row


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
