"""The generated questions: many, different, split for good, of all kinds."""

from __future__ import annotations

from collections import Counter

import pytest

from harness.settings import load_train_config
from harness.workloads.base import get_task, is_held_out
from harness.workloads.reviews import KINDS, ReviewsTask
from oppo_kit.errors import DataError


def questions(rows) -> list[str]:
    return [row["prompt"][-1]["content"] for row in rows]


def test_training_questions_differ_by_seed_and_none_is_held_out() -> None:
    task = get_task("reviews")
    first, again, other = (questions(task.train_rows(seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert len(first) == len(set(first)) == 4096
    assert not any(is_held_out(question) for question in first)


def test_held_out_questions_are_fixed_and_bounded() -> None:
    task = ReviewsTask()
    rows = task.eval_rows(512)
    assert rows == task.eval_rows(512)
    assert rows[:64] == task.eval_rows(64)
    assert all(is_held_out(question) for question in questions(rows))
    assert len(set(questions(rows))) == 512
    with pytest.raises(DataError, match="1025 evaluation problems: the task reviews has 1024; ask for fewer"):
        task.eval_rows(1025)
    assert len(task.eval_rows(1024)) == 1024


def test_the_kinds_come_as_often_as_they_are_weighted() -> None:
    counts = Counter(row["kind"] for row in ReviewsTask().train_rows(3))
    total = sum(weight for weight, _ in KINDS.values())
    for kind, (weight, _) in KINDS.items():
        assert counts[kind] / 4096 == pytest.approx(weight / total, abs=0.04)


def test_nobody_can_tell_which_answer_is_right() -> None:
    task = ReviewsTask()
    assert task.check(task.eval_rows(1)[0], "Good.", True) is None


def test_the_model_brings_its_task_along_unless_one_is_named() -> None:
    config = load_train_config(options={"model": "smollm2-135m"})
    assert (config.task, config.batch_size, config.overlap.delta) == ("reviews", 8, 4)
    assert config.sampling.response_length == 256
    assert load_train_config(options={"model": "smollm2-135m", "task": "tiny"}).task == "tiny"
    assert load_train_config().task == "tiny"
    assert load_train_config(overrides=["model=smollm2-135m"]).task == "reviews"
