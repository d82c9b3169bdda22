"""Runs one specification in a process of its own and brings back what it measured.

Waits for: the child's lines and its end. Unblocked by: the child, also when it dies. An interrupt kills the child, and
a parent that dies takes it along: see ``harness.runners.link``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from harness.runners.base import RunSpec
from harness.runners.link import PARENT_VARIABLE
from oppo_kit.errors import OppoError, PartFailedError

_NUM_LOG_LINES = 12
# vLLM decodes with all CPU threads also beside scorers, which have the lowest priority: while its idle threads spin,
# scorers have nothing. With so short a spin (2,000 looks, some microseconds) they sleep between two kernels instead.
_SHORT_SPIN = "2000"
_SCORE_THE_BATCH = ("sequential", "overcommit")
ResultT = TypeVar("ResultT", bound=BaseModel)


def run_in_process(
    spec: RunSpec,
    folder: Path,
    result_class: type[ResultT],
    *,
    module: str = "harness.runners.child",
    on_progress: Callable[[dict], None] | None = None,
) -> ResultT:
    """Carry out ``python -m module SPEC RESULT`` and read the result.

    Args:
        spec: what to run.
        folder: for the specification, the log and the result; kept.
        result_class: of the result file.
        module: reads a RunSpec, writes a result.
        on_progress: called with the facts of each progress line.

    Raises:
        PartFailedError: the process failed; holds the end of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec_file, result_file, log_file = folder / "spec.json", folder / "run.json", folder / "log.txt"
    spec_file.write_text(spec.model_dump_json(indent=2))
    result_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", module, str(spec_file), str(result_file)]
    with log_file.open("w") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=_child_environment(spec),
        )
        with child:
            try:
                _follow(child, on_progress)
            finally:
                if child.poll() is None:
                    child.kill()
    if child.returncode != 0 or not result_file.exists():
        raise _failure(spec, child.returncode, log_file)
    try:
        return result_class.model_validate_json(result_file.read_text())
    except ValidationError as error:
        raise PartFailedError(
            f"runner {spec.runner!r}, seed {spec.seed}, wrote an unusable result: {error}"
        ) from error


def _follow(child: subprocess.Popen[str], on_progress: Callable[[dict], None] | None) -> None:
    """Hand on the child's progress lines until it ends."""
    assert child.stdout is not None
    for line in child.stdout:
        if on_progress is not None:
            on_progress(json.loads(line))
    child.wait()


def _child_environment(spec: RunSpec) -> dict[str, str]:
    spinning = {}
    if spec.train.backend == "vllm" and spec.runner not in _SCORE_THE_BATCH:
        spinning["GOMP_SPINCOUNT"] = _SHORT_SPIN
    return (
        spinning
        | os.environ
        | {
            "OMP_NUM_THREADS": str(spec.num_threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "PYTHONUNBUFFERED": "1",
            PARENT_VARIABLE: "1",
        }
    )


def _failure(spec: RunSpec, code: int, log_file: Path) -> OppoError:
    lines = [line for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    end = "\n".join(lines[-_NUM_LOG_LINES:]) or "(the log is empty)"
    cause = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return PartFailedError(f"runner {spec.runner!r}, seed {spec.seed}, {cause}; end of {log_file}:\n{end}")
