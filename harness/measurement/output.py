"""How a measurement that is run by hand ends: two files in its folder, and one line when it cannot be made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from harness.environment import quieten_transformers
from harness.folders import make_folder, write_atomically
from harness.schema import Environment
from oppo_kit.errors import OppoError

ResultT = TypeVar("ResultT", bound=BaseModel)


def carry_out(
    folder: Path, stem: str, measure: Callable[[], ResultT], render: Callable[[ResultT], str]
) -> int:
    """Measure, write ``stem``.json and ``stem``.md, print the latter.

    Returns:
        the exit status: 0, or 2 after one of our errors, which is printed.
    """
    quieten_transformers()
    try:
        make_folder(folder)
        result = measure()
    except OppoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = render(result)
    write_atomically(folder / f"{stem}.json", result.model_dump_json(indent=2) + "\n")
    write_atomically(folder / f"{stem}.md", text)
    print(text)
    return 0


def provenance(environment: Environment, command: str) -> str:
    """Where and how it was measured, as one sentence."""
    return f"{environment.cpu}, {environment.num_cpu_cores} cores, commit {str(environment.commit)[:12]}, `{command}`."
