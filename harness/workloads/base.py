"""What a task is, and how one is found by name.

A task knows its problems and how to judge an answer. It knows no model, tokenizer or runner.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from oppo_kit.errors import UnknownNameError

Row = Mapping[str, Any]

# Modules are imported when the task is asked for, so that listing the names loads nothing.
_TASKS = {
    "code": "harness.workloads.code_task:CodeTask",
    "free_form": "harness.workloads.free_form:FreeFormTask",
    "math": "harness.workloads.math_task:MathTask",
    "reviews": "harness.workloads.reviews:ReviewsTask",
    "tiny": "harness.workloads.tiny:TinyTask",
}

# Where a source has no test split of its own.
_HELD_OUT_ONE_IN = 10


class Task(Protocol):
    """Problems and their judgement."""

    name: str
    default_overrides: Mapping[str, Any]
    """Settings, nested as in the configuration, that suit the task better than the general defaults."""
    algorithm_overrides: Mapping[str, Mapping[str, Any]]
    """The same on top, by algorithm."""

    @property
    def default_reward(self) -> str | None:
        """Alias of a reward model or ``module:function``; None when the user has to name one."""
        ...

    def train_rows(self, seed: int) -> list[Row]:
        """Rows with ``prompt`` (text or messages) and the columns that rewards and ``check`` read."""
        ...

    def eval_rows(self, num_rows: int) -> list[Row]:
        """Fixed held-out rows, none of them among the training rows; at most ``num_rows``."""
        ...

    def check(self, row: Row, response_text: str, is_stopped: bool) -> bool | None:
        """Whether the response is right; None when the task cannot tell.

        Args:
            row: a row of ``eval_rows``, or the columns of its prompt.
            response_text: the response, with or without special tokens.
            is_stopped: whether a stop token ended it, rather than its limit.
        """
        ...


def task_names() -> list[str]:
    """Names that ``get_task`` knows, sorted."""
    return sorted(_TASKS)


def get_task(name: str) -> Task:
    """A fresh task object.

    Raises:
        UnknownNameError: no task has this name.
    """
    if name not in _TASKS:
        raise UnknownNameError("task", name, _TASKS, "For prompts of your own, pass --dataset as well.")
    module, _, attribute = _TASKS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)()


def is_held_out(question: str) -> bool:
    """Whether a question belongs to the evaluation: a fixed hash of its text, one in ten."""
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _HELD_OUT_ONE_IN == 0


def user_message(text: str) -> list[dict[str, str]]:
    """A conversation of one question."""
    return [{"role": "user", "content": text}]


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """The text of a completion as reward functions get it."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
