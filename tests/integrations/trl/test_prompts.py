"""Draws in the order of a loader that repeats, over epochs, without disturbing anybody."""

from __future__ import annotations

from itertools import count, islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from oppo_kit.errors import ConfigError, DataError
from oppo_kit.integrations.trl.prompts import ReplayedPrompts, Rounds, is_same_row, replay_loader

NUM_ROWS, BATCH_SIZE, GROUP_SIZE, REPEATS = 5, 2, 3, 2


class Rows:
    """A map-style data set that counts what is read of it."""

    def __init__(self, num_rows: int = NUM_ROWS) -> None:
        self.num_rows = num_rows
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, int]:
        self.read.append(index)
        return {"prompt": index}


class Sampler:
    """As TRL's: another order in each epoch, which is known by how often it was asked."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.generator = torch.Generator().manual_seed(3)

    def order(self) -> list[int]:
        return torch.randperm(self.num_rows, generator=self.generator).tolist()

    def __iter__(self):
        order = self.order()
        torch.rand(1)  # as samplers may, and as an iterator over a loader does
        for first in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            for _ in range(REPEATS):
                for index in order[first : first + BATCH_SIZE]:
                    yield from [index] * GROUP_SIZE


class Loader(DataLoader):
    def set_epoch(self, epoch: int) -> None:
        pass


def make_loader(rows: Rows) -> Loader:
    torch.rand(3)  # as loaders may
    return Loader(
        rows, batch_size=BATCH_SIZE * GROUP_SIZE, sampler=Sampler(len(rows)), collate_fn=lambda batch: batch
    )


def make_replay(rows: Rows):
    return lambda: replay_loader(
        lambda: make_loader(rows), batch_size=BATCH_SIZE, group_size=GROUP_SIZE, repeats=REPEATS
    )


def test_draw_d_is_the_dth_different_prompt_over_all_epochs() -> None:
    sampler = Sampler(NUM_ROWS)
    expected = [index for _ in range(3) for index in sampler.order()[:4]]
    prompts = ReplayedPrompts(
        make_replay(Rows()), lambda row: [row["prompt"]], max_new_tokens=7, limit_name="limit"
    )
    drawn = [prompts.draw(draw) for draw in range(12)]
    assert [prompt.columns["prompt"] for prompt in drawn] == expected
    assert [prompt.token_ids for prompt in drawn] == [(index,) for index in expected]
    assert {prompt.max_new_tokens for prompt in drawn} == {7}
    loader = make_loader(Rows())
    assert [row["prompt"] for row in next(iter(loader))] == [
        index for index in expected[:2] for _ in range(GROUP_SIZE)
    ]


def test_a_draw_is_a_function_of_its_number_whatever_was_drawn_before() -> None:
    straight = ReplayedPrompts(make_replay(Rows()), lambda row: [1], max_new_tokens=1, limit_name="limit")
    expected = [straight.row(draw) for draw in range(10)]
    rows = Rows()
    prompts = ReplayedPrompts(make_replay(rows), lambda row: [1], max_new_tokens=1, limit_name="limit")
    for draw in (7, 9, 2, 3, 8, 0):
        assert prompts.row(draw) == expected[draw]
    prompts.forget_before(8)
    assert prompts.row(3) == expected[3]
    assert len(rows.read) == 7  # what is passed over is not read


def test_the_global_random_generator_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(islice(make_replay(Rows())(), 11))
    assert torch.equal(torch.rand(1), expected)


def test_an_epoch_without_a_full_batch_is_refused() -> None:
    with pytest.raises(DataError, match="the training data has less than one batch of 2 prompts"):
        next(make_replay(Rows(1))())


def test_what_the_loader_brings_is_compared_row_by_row() -> None:
    prompts = ReplayedPrompts(
        lambda: (lambda number=number: {"prompt": f"p{number}"} for number in count()),
        lambda row: [1],
        max_new_tokens=1,
        limit_name="limit",
    )
    rows = [{"prompt": f"p{number}"} for number in (2, 2, 3, 3)]
    prompts.check_order(2, rows, 2)
    with pytest.raises(
        ConfigError, match="brought the prompt 'p2' where draw 3, 'p3', was expected: its order"
    ):
        prompts.check_order(2, [rows[0], rows[0], rows[0], rows[0]], 2)


def test_rows_are_the_same_where_no_equality_is_defined() -> None:
    array = {"a": np.arange(3), "b": float("nan")}
    assert is_same_row(array, {"a": np.arange(3), "b": float("nan")})
    assert not is_same_row(array, {"a": np.arange(4), "b": float("nan")})
    assert is_same_row({"t": torch.arange(2)}, {"t": torch.arange(2)})
    assert not is_same_row({"prompt": "a", "answer": 1}, {"prompt": "a", "answer": 2})


def test_rounds_are_counted_over_epochs_that_end_within_an_update() -> None:
    rounds = Rounds(per_round=2, accumulation=4, per_epoch=6)
    assert rounds.updates_per_epoch == 2  # of 4 and 2 micro-steps
    assert [rounds.num_micro_steps(updates) for updates in range(5)] == [0, 4, 6, 10, 12]
    assert [rounds.num_rounds(updates) for updates in range(5)] == [1, 2, 3, 5, 6]
    stream = Rounds(per_round=4, accumulation=2, per_epoch=None)
    assert stream.updates_per_epoch is None
    assert [stream.num_micro_steps(3), stream.num_rounds(3)] == [6, 2]
