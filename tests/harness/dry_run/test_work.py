"""The work of a step, by hand where the lengths are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.dry_run.work import Work, make_work, mean_step
from harness.settings import load_train_config
from oppo_kit.registry import create_algorithm

WORK = Work(
    batch_size=8,
    delta=4,
    max_age=2,
    group_size=2,
    prompt_tokens=10,
    response_tokens=1,
    num_epochs=1,
    num_mini_batches=4,
    micro_batch_tokens=64,
)


def test_responses_of_one_token_take_one_tick() -> None:
    step = mean_step(WORK, 0)
    assert (step.num_ticks, step.num_decoded, step.num_context) == (1, 16, 16 * 11)
    assert (step.num_prefilled, step.num_trained) == (16 * 10, 16 * 11)


def test_equal_responses_gain_nothing_from_overcommit_and_each_is_decoded_once() -> None:
    step = mean_step(WORK, 4)
    # All 12 groups end at the first tick; 4 wait, 8 are new in every step.
    assert step.num_decoded == 16
    assert step.num_prefilled == 16 * 10
    assert step.num_trained == 16 * 11


def test_overcommit_buys_the_wait_for_the_longest_and_postpones_no_work() -> None:
    work = replace(WORK, response_tokens=512)
    plain, overcommitted = mean_step(work, 0), mean_step(work, 4)
    assert overcommitted.num_ticks < 0.8 * plain.num_ticks
    assert overcommitted.num_decoded == pytest.approx(plain.num_decoded, rel=0.1)
    assert overcommitted.num_trained == pytest.approx(plain.num_trained, rel=0.1)
    # Carried rows are read again with what they have: more than the prompts of all that are held.
    assert plain.num_prefilled == 16 * 10
    assert overcommitted.num_prefilled > 24 * 10


def test_at_its_greatest_age_a_group_is_waited_for() -> None:
    work = replace(WORK, response_tokens=512)
    assert mean_step(replace(work, max_age=1), 4).num_ticks > mean_step(replace(work, max_age=8), 4).num_ticks


def test_a_pass_holds_at_least_a_row_and_at_most_its_rows() -> None:
    assert WORK.row_tokens == 11
    assert WORK.num_held_rows == 24
    # A mini-batch has 2 groups of 2; 5 rows would fit into 64 tokens.
    assert WORK.pass_tokens(1) == 4 * 11
    assert WORK.pass_tokens(3) == 2 * 11
    assert WORK.pass_tokens(1, num_rows=24) == 5 * 11
    assert WORK.pass_tokens(1, budget=3) == 11
    assert WORK.pass_tokens(100) == 11


def test_prompts_are_what_the_settings_allow_and_the_context_has_room_for() -> None:
    train = load_train_config(options={"model": "qwen2.5-3b", "algo": "grpo", "task": "tiny"})
    algorithm = create_algorithm(train.algo, train.algo_config)
    assert make_work(train, algorithm, None).prompt_tokens == 512
    assert make_work(train, algorithm, 300).prompt_tokens == 44
    bounded = train.model_copy(update={"max_prompt_tokens": 33})
    work = make_work(bounded, algorithm, 300)
    assert (work.prompt_tokens, work.group_size, work.num_mini_batches) == (33, 8, 4)
