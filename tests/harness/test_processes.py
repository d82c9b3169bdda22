"""A run in a process of its own: failures and deaths are heard, with the end of the log."""

from __future__ import annotations

import subprocess
import sys

import psutil
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
        "from harness.runners.link import connect_to_parent\n"
        "progress = connect_to_parent()\n"
        "print('{\"step\": 0}', file=progress, flush=True); print('{\"chatter\"', flush=True)\n"
        "assert os.environ['OMP_NUM_THREADS'] == '1'\n"
        'open(sys.argv[2], \'w\').write(\'{"median": 2, "low": 1, "high": 3, "pairs": [2]}\')\n'
    )
    seen: list[dict] = []
    ratio = run_in_process(SPEC, tmp_path / "run", Ratio, module=module, on_progress=seen.append)
    assert (ratio.median, seen) == (2.0, [{"step": 0}])
    assert '{"chatter"' in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("backend", "runner", "own", "expected"),
    [
        ("vllm", "both", None, "2000"),
        ("vllm", "both", "7", "7"),
        ("vllm", "sequential", None, None),
        ("hf", "both", None, None),
    ],
)
def test_threads_of_vllm_beside_scorers_spin_briefly(
    tmp_path, make_module, monkeypatch, backend: str, runner: str, own: str | None, expected: str | None
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if own is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", own)
    module = make_module(
        "import sys, os\n"
        f"assert os.environ.get('GOMP_SPINCOUNT') == {expected!r}\n"
        'open(sys.argv[2], \'w\').write(\'{"median": 2, "low": 1, "high": 3, "pairs": [2]}\')\n'
    )
    train = SPEC.train.model_copy(update={"backend": backend})
    spec = SPEC.model_copy(update={"train": train, "runner": runner})
    assert run_in_process(spec, tmp_path / "run", Ratio, module=module).median == 2


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
    module = make_module("import time; print('{}', flush=True); time.sleep(60)")

    def interrupt(facts: dict) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_process(SPEC, tmp_path / "run", Ratio, module=module, on_progress=interrupt)


def test_a_parent_that_is_killed_takes_its_child_along(tmp_path, make_module) -> None:
    module = make_module(
        "import os, time\n"
        "from harness.runners.link import connect_to_parent\n"
        "print(f'{{\"pid\": {os.getpid()}}}', file=connect_to_parent(), flush=True)\n"
        "time.sleep(120)\n"
    )
    parent_code = (
        "import sys; from pathlib import Path; from harness.processes import run_in_process\n"
        "from harness.runners.base import RunSpec; from harness.schema import Ratio\n"
        "from oppo_kit.config import TrainConfig\n"
        "run_in_process(RunSpec(runner='trl', seed=0, train=TrainConfig()), Path(sys.argv[1]), Ratio,"
        f" module='{module}', on_progress=lambda facts: print(facts['pid'], flush=True))\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        assert child.wait(timeout=60) is None or not child.is_running()


def test_a_result_that_cannot_be_read_is_named(tmp_path, make_module) -> None:
    module = make_module("import sys; open(sys.argv[2], 'w').write('{}')")
    with pytest.raises(PartFailedError, match="runner 'trl', seed 3, wrote an unusable result"):
        run_in_process(SPEC, tmp_path / "run", Ratio, module=module)
