"""Questions with free answers: Stack Exchange, or counting stories where no hub can be reached.

Only a reward model can judge the real answers, and it must read the policy's vocabulary; so none is the
default.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from harness.workloads.base import Row, completion_text, user_message
from harness.workloads.datasets import load_hub_rows
from harness.workloads.math_task import final_number
from harness.workloads.stand_ins import SOURCE_PREFIX, HubOrStandIn, generated_rows, generated_score

HUB_ID = "lvwerra/stack-exchange-paired"
GENERATOR = "leg_counting"
# Enough for a few hundred steps; the data set has millions of rows, several of them per question.
NUM_TRAIN_ROWS = 20_000
NUM_STAND_IN_ROWS = 4_000


class FreeFormTask:
    """Stack Exchange; rows have ``prompt`` (a conversation), ``answer`` (of a person) and ``source``."""

    name = "free_form"
    default_overrides: Mapping[str, Any] = MappingProxyType(
        {"sampling": {"temperature": 1.0, "response_length": 512}, "long_prompts": "drop"}
    )
    algorithm_overrides: Mapping[str, Mapping[str, Any]] = MappingProxyType({})

    def __init__(self) -> None:
        self._source = HubOrStandIn(self.name, HUB_ID, f"{SOURCE_PREFIX}{GENERATOR}")

    @property
    def default_reward(self) -> str | None:
        """None; with the stand-in's rows, once they are loaded, its rule."""
        return "harness.workloads.free_form:stand_in_reward" if self._source.is_stand_in else None

    def train_rows(self, seed: int) -> list[Row]:
        """The first questions of the ``rl`` part, or the stand-in's of this seed."""
        return self._source.rows(
            lambda: _from_hub("data/rl", NUM_TRAIN_ROWS),
            lambda: generated_rows(GENERATOR, NUM_STAND_IN_ROWS, seed=seed, to_prompt=user_message),
        )

    def eval_rows(self, num_rows: int) -> list[Row]:
        """The first questions of the ``evaluation`` part, or held-out ones of the stand-in."""
        return self._source.rows(
            lambda: _from_hub("data/evaluation", num_rows),
            lambda: generated_rows(GENERATOR, num_rows, seed=None, to_prompt=user_message),
        )

    def check(self, row: Row, response_text: str, is_stopped: bool) -> bool | None:  # noqa: ARG002
        """None: nobody can tell; with the stand-in whether the final number is right."""
        if not row["source"].startswith(SOURCE_PREFIX):
            return None
        return _score(response_text, row["answer"], row["source"]) == 1.0


def stand_in_reward(
    completions: list[Any], answer: list[str], source: list[str], **_: Any
) -> list[float | None]:
    """What the generator's own scorer says of the final number; abstains on real questions."""
    return [
        _score(completion_text(completion), right, origin) if origin.startswith(SOURCE_PREFIX) else None
        for completion, right, origin in zip(completions, answer, source, strict=True)
    ]


def _score(text: str, answer: str, source: str) -> float:
    return generated_score(source, answer, final_number(text))


def _from_hub(part: str, num_rows: int) -> list[Row]:
    # A question stands in several neighbouring rows, one per pair of answers: hence the factor.
    questions: dict[str, Row] = {}
    for row in load_hub_rows(HUB_ID, data_dir=part, max_rows=10 * num_rows):
        made = {"prompt": user_message(row["question"]), "answer": row["response_j"], "source": HUB_ID}
        questions.setdefault(row["question"], made)
    return list(questions.values())[:num_rows]
