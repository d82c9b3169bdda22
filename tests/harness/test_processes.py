"""A run in a process of its own: failures and deaths are heard, with the end of the log."""

from __future__ import annotations

import sys

import pytest

from harness.processes import run_in_process
from harness.runners.base import RunSpec
from harness.schema import Ratio
from oppo_kit.config import TrainConfig
from oppo_kit.errors import PartFailedError

SPEC = RunSpec(runner="trl", seed=3, train=TrainConfig())


@pytest.fixture
def make_module(tmp_path, monkeypatch):
    def write(text: str) -> str:
        (tmp_path / "fake_child.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "fake_child"

    return write


def test_progress_and_result_come_back(tmp_path, make_module) -> None:
    module = make_module(
        "import sys, os\n"
        "print('{\"progress\": {\"step\": 0}}'); print('chatter')\n"
        "assert os.environ['OMP_NUM_THREADS'] == '1'\n"
        'open(sys.argv[2], \'w\').write(\'{"median": 2, "low": 1, "high": 3, "pairs": [2]}\')\n'
    )
    seen: list[dict] = []
    ratio = run_in_process(SPEC, tmp_path / "run", Ratio, module=module, on_progress=seen.append)
    assert (ratio.median, seen) == (2.0, [{"step": 0}])
    assert "chatter" in (tmp_path / "run" / "log.txt").read_text()


def test_a_failure_brings_the_end_of_its_log(tmp_path, make_module) -> None:
    module = make_module("raise SystemExit('no such thing as a free lunch')")
    with pytest.raises(
        PartFailedError, match=r"runner 'trl', seed 3, ended with exit code 1; end of .*log.txt:\nno such"
    ):
        run_in_process(SPEC, tmp_path / "run", Ratio, module=module)


def test_a_killed_process_is_named_with_its_signal(tmp_path, make_module) -> None:
    module = make_module("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    if sys.platform == "win32":
        pytest.skip("signals")
    with pytest.raises(PartFailedError, match="was killed by signal 9; .*\n.the log is empty."):
        run_in_process(SPEC, tmp_path / "run", Ratio, module=module)


def test_an_old_result_is_never_taken_for_a_new_one(tmp_path, make_module) -> None:
    module = make_module("pass")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"median": 2, "low": 1, "high": 3, "pairs": [2]}')
    with pytest.raises(PartFailedError, match="ended with exit code 0"):
        run_in_process(SPEC, tmp_path / "run", Ratio, module=module)


def test_an_interrupt_ends_the_child(tmp_path, make_module) -> None:
    module = make_module("import time; print('{\"progress\": {}}', flush=True); time.sleep(60)")

    def interrupt(facts: dict) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_process(SPEC, tmp_path / "run", Ratio, module=module, on_progress=interrupt)
