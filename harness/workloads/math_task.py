"""Maths word problems with a number as the answer: GSM8K, or generated ones where no hub can be reached."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from types import MappingProxyType
from typing import Any

from harness.workloads.base import Row, completion_text, user_message
from harness.workloads.datasets import load_hub_rows
from harness.workloads.stand_ins import SOURCE_PREFIX, HubOrStandIn, generated_rows, generated_score

HUB_ID = "openai/gsm8k"
GENERATOR = "gsm_symbolic"
# As many as GSM8K has.
NUM_TRAIN_ROWS = 7473

_INSTRUCTION = "Reason step by step and end with the line '#### ' followed by the answer as a number."
_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
# From the most to the least explicit way of giving an answer; of the first that occurs, the last occurrence
# counts.
_ANSWERS = (
    re.compile(rf"####\s*\$?({_NUMBER})"),
    re.compile(rf"\\boxed{{\s*\$?({_NUMBER})"),
    re.compile(f"({_NUMBER})"),
)


class MathTask:
    """GSM8K; rows have ``prompt`` (a conversation), ``answer`` (a number as text) and ``source``."""

    name = "math"
    default_reward: str | None = "harness.workloads.math_task:math_reward"
    default_overrides: Mapping[str, Any] = MappingProxyType(
        {"sampling": {"temperature": 1.0, "response_length": 512}}
    )
    algorithm_overrides: Mapping[str, Mapping[str, Any]] = MappingProxyType({})

    def __init__(self) -> None:
        self._source = HubOrStandIn(self.name, HUB_ID, f"{SOURCE_PREFIX}{GENERATOR}")

    def train_rows(self, seed: int) -> list[Row]:
        """GSM8K's training split, or the stand-in's problems of this seed."""
        return self._source.rows(
            lambda: _from_hub("train"),
            lambda: generated_rows(GENERATOR, NUM_TRAIN_ROWS, seed=seed, to_prompt=_to_prompt),
        )

    def eval_rows(self, num_rows: int) -> list[Row]:
        """The first problems of GSM8K's test split, or held-out ones of the stand-in."""
        return self._source.rows(
            lambda: _from_hub("test")[:num_rows],
            lambda: generated_rows(GENERATOR, num_rows, seed=None, to_prompt=_to_prompt),
        )

    def check(self, row: Row, response_text: str, is_stopped: bool) -> bool | None:  # noqa: ARG002
        """Whether the response's final number is the answer; an unfinished response may have given it."""
        return _score(response_text, row["answer"], row["source"]) == 1.0


def math_reward(completions: list[Any], answer: list[str], source: list[str], **_: Any) -> list[float | None]:
    """1 for the right final number, else 0; on generated problems what the generator's own scorer says."""
    return [
        _score(completion_text(completion), right, origin)
        for completion, right, origin in zip(completions, answer, source, strict=True)
    ]


def final_number(text: str) -> str | None:
    """The number that a response gives as its answer, without thousands separators; None: there is none."""
    for pattern in _ANSWERS:
        found = pattern.findall(text)
        if found:
            return str(found[-1]).replace(",", "")
    return None


def _score(text: str, answer: str, source: str) -> float:
    given = final_number(text)
    if given is None:
        return 0.0
    if source.startswith(SOURCE_PREFIX):
        return generated_score(source, answer, given)
    try:
        return float(Decimal(given) == Decimal(answer))
    except InvalidOperation:
        return 0.0


def _from_hub(split: str) -> list[Row]:
    return [
        {
            "prompt": _to_prompt(row["question"]),
            "answer": row["answer"].rpartition("####")[2].strip().replace(",", ""),
            "source": HUB_ID,
        }
        for row in load_hub_rows(HUB_ID, "main", split=split)
    ]


def _to_prompt(question: str) -> list[dict[str, str]]:
    return user_message(f"{question}\n\n{_INSTRUCTION}")
