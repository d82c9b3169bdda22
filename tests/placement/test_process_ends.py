"""How scoring processes and their parents end: no death on either side goes unheard.

Named pipes say where a child is; where a test waits longer than it should, something hangs.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import child_scorers
import pytest
from child_scorers import Lengths, Streaming, ended, waiting_pipes
from process_handles import WAIT_S, placed, results

from oppo_kit.errors import ConfigError, PartFailedError
from oppo_kit.placement import process as process_module
from oppo_kit.placement.process import ProcessPlacement, place_in_process

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="pins and maps as Linux does")


def heard(handle: ProcessPlacement) -> None:
    """Ask until check() raises what it has heard; a child that says nothing runs into the time limit."""
    while True:
        handle.check()
        handle._process._reader.join(0.01)


@pytest.mark.timeout(60)
def test_a_failing_feed_is_heard_and_a_later_submission_does_not_hang() -> None:
    handle = placed(child_scorers.FailingFeed("raise"))["streaming"]
    handle.feed([ended(1)])
    with pytest.raises(PartFailedError, match="ValueError: no appetite"):
        heard(handle)
    with pytest.raises(PartFailedError, match="ValueError: no appetite"):
        results(handle, ended(2))
    handle.close()


@pytest.mark.timeout(60)
def test_a_failing_forget_is_heard_and_a_child_that_does_not_go_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle = placed(child_scorers.FailingForget())["streaming"]
    handle.forget(None)
    with pytest.raises(PartFailedError, match="ValueError: I remember"):
        heard(handle)
    monkeypatch.setattr(process_module, "_CLOSE_S", 0.1)
    os.kill(handle._process.pid, signal.SIGSTOP)
    handle.close()
    assert handle._process._process.returncode == -signal.SIGKILL


@pytest.mark.timeout(60)
def test_closing_does_not_wait_for_a_stopped_child_whose_pipe_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle = placed(Streaming())["streaming"]
    monkeypatch.setattr(process_module, "_CLOSE_S", 0.1)
    pid = handle._process.pid
    os.kill(pid, signal.SIGSTOP)
    pipe = handle._process._pipe
    os.set_blocking(pipe.fileno(), False)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe.fileno(), bytes(65536))
    os.set_blocking(pipe.fileno(), True)
    handle.close()
    assert handle._process._process.returncode == -signal.SIGKILL


# --- a child that dies, or is closed


def assert_dead(handle: ProcessPlacement, words: str) -> None:
    with pytest.raises(PartFailedError, match=words):
        handle.check()
    with pytest.raises(PartFailedError, match=words):
        handle.submit([ended(9)])
    with pytest.raises(PartFailedError, match=words):
        handle.feed([ended(9)])
    handle.close()
    handle.close()


def test_a_child_killed_while_it_works_is_named_with_its_signal(tmp_path: Path) -> None:
    handle = placed(waiting_pipes(tmp_path))["waiting"]
    futures = handle.submit([ended(1), ended(2)])
    assert (tmp_path / "begun").read_text() == "x"
    waiting = handle.submit([ended(3)])
    pid = handle._process.pid
    os.kill(pid, signal.SIGKILL)
    words = (
        rf"the scoring process {pid} was killed by signal 9 \(SIGKILL\); its last words are on standard error"
    )
    for future in futures + waiting:
        with pytest.raises(PartFailedError, match=words):
            future.result(WAIT_S)
    assert_dead(handle, words)


def test_a_child_killed_while_idle_is_named_by_whatever_is_sent_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the sender finds the pipe broken before the reader knows why: it waits for the reader."""
    handle = placed(Streaming())["streaming"]
    process = handle._process
    wait, join, is_heard, may_know = process._process.wait, process._reader.join, Event(), Event()
    process._process.wait = lambda timeout=None: (is_heard.set(), may_know.wait(WAIT_S), wait(timeout))[2]
    os.kill(process.pid, signal.SIGKILL)
    assert is_heard.wait(WAIT_S)
    with monkeypatch.context() as patches:
        patches.setattr(process_module, "_CLOSE_S", 0.01)
        with pytest.raises(PartFailedError, match=rf"the scoring process {process.pid} cannot be reached: "):
            handle.feed([ended(1)])
    process._reader.join = lambda timeout=None: (may_know.set(), join(timeout))[1]
    words = rf"the scoring process {process.pid} was killed by signal 9 \(SIGKILL\)"
    with pytest.raises(PartFailedError, match=words):
        results(handle, ended(1))
    assert_dead(handle, words)


def test_a_child_that_says_what_cannot_be_read_is_ended() -> None:
    handle = placed(child_scorers.Vandal())["vandal"]
    words = rf"the scoring process {handle._process.pid} said what cannot be read: UnpicklingError"
    with pytest.raises(PartFailedError, match=words):
        results(handle, ended(1))
    assert_dead(handle, words)


@pytest.mark.timeout(60)
def test_closing_ends_a_child_also_in_the_middle_of_a_call_and_while_a_forget_waits(tmp_path: Path) -> None:
    handle = placed(waiting_pipes(tmp_path))["waiting"]
    futures = handle.submit([ended(1)])
    assert (tmp_path / "begun").read_text() == "x"
    handle.forget(None)
    # More than the pipe holds: a child that waits for its scorer still reads.
    handle.feed([ended(2, 1_000_000)])
    assert not futures[0].cancel()
    handle.close()
    with pytest.raises(PartFailedError, match="the scoring process was closed before this score was there"):
        futures[0].result(0)
    assert handle._process._process.returncode == 0
    handle.check()
    handle.feed([ended(1)])
    with pytest.raises(
        PartFailedError, match="the placement of scorer 'waiting' is closed; build a new engine"
    ):
        handle.submit([ended(2)])
    handle.close()


# --- a child that does not start


def test_scorers_that_cannot_be_pickled_are_refused() -> None:
    scorer = Lengths()
    scorer.callback = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError,
        match=r"the scorers \['lengths'\] cannot be sent to a process: .*, else set overlap.placement to 'thread'",
    ):
        placed(scorer)


def test_a_full_disk_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for part in ("torch.save", "tempfile.TemporaryFile"):
        with monkeypatch.context() as patch:
            patch.setattr(f"oppo_kit.placement.process.{part}", full)
            with pytest.raises(
                ConfigError, match="No space left on device; if .* is full, name a folder .* TMPDIR"
            ):
                placed(Lengths())


def test_a_class_that_the_child_cannot_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfScript(Lengths):
        __module__ = "__main__"
        __qualname__ = "OfScript"

    monkeypatch.setattr(sys.modules["__main__"], "OfScript", OfScript, raising=False)
    with pytest.raises(ConfigError, match="Can't get attribute 'OfScript'.*define it in a module"):
        placed(OfScript())


def test_a_child_that_dies_while_it_starts_is_named() -> None:
    with pytest.raises(PartFailedError, match=r"the scoring process \d+ was killed by signal 15 \(SIGTERM\)"):
        placed(child_scorers.Suicidal())


def test_a_child_that_is_not_ready_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_START_S", 0.0)
    with pytest.raises(
        PartFailedError, match=r"the scoring process \d+ was not ready after 0 s; is the machine"
    ):
        placed(Lengths())


@pytest.mark.parametrize("cores", [[4096], [0, 4096], [-1], []])
def test_cores_that_are_not_there_are_refused(cores: list[int]) -> None:
    missing = [core for core in cores if core != 0]
    with pytest.raises(
        ConfigError,
        match=rf"scorer_cores names the cores \{missing}.*it has 0 to {(os.cpu_count() or 1) - 1}",
    ):
        placed(Lengths(), cores=cores)


def test_cores_that_the_container_does_not_give_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, cores: Any) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with pytest.raises(
        ConfigError, match=r"scorer_cores \[0\] cannot be used by a process of this container: .*22"
    ):
        placed(Lengths(), cores=[0])


# --- a parent that dies or is interrupted

PARENT = """
import os, signal, sys
from pathlib import Path
from child_scorers import HeldBack, Lengths, Waiting, ended
from oppo_kit.placement.process import ProcessPlacement, ScoringProcess

folder = Path(sys.argv[1])
scorers = {"waiting": Waiting(folder), "lengths": HeldBack(folder / "held") if IS_HELD else Lengths()}
process = ScoringProcess(scorers)
handles = {name: ProcessPlacement(name, scorer, process) for name, scorer in scorers.items()}
"""

KILLED = f"""
IS_HELD = False
{PARENT}
process.wait_until_ready()
if os.fork() == 0:  # holds the parent's end of the pipe open, as a data loader's worker would
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    signal.pause()
handles["waiting"].submit([ended(1)])
handles["waiting"].forget(None)
handles["lengths"].submit([ended(1)])[0].result()
"""

INTERRUPTED = f"""
IS_HELD = True
{PARENT}
try:
    print(process.pid, flush=True)
    process._ready.wait()
except KeyboardInterrupt:
    process.wait_until_ready()
print("ready", flush=True)
sys.stdin.readline()
print(handles["lengths"].submit([ended(1)])[0].result(), flush=True)
process.close()
"""


def start_parent(script: str, folder: Path, temporary: Path) -> subprocess.Popen[str]:
    support = str(Path(child_scorers.__file__).parent)
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": support, "TMPDIR": str(temporary)},
    )


def test_when_the_parent_is_killed_the_child_goes_in_the_middle_of_a_call(tmp_path: Path) -> None:
    """Standard output ends when the last process that holds it does."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    waiting_pipes(tmp_path)
    parent = start_parent(KILLED, tmp_path, temporary)
    assert (tmp_path / "begun").read_text() == "x"
    parent.kill()
    try:
        _, words = parent.communicate(timeout=WAIT_S)
    finally:
        os.killpg(parent.pid, signal.SIGKILL)  # the one that was forked
    assert words == ""
    assert list(temporary.iterdir()) == []


def test_an_interrupt_is_the_parents_and_the_child_says_nothing(tmp_path: Path) -> None:
    """Once while the child starts, to the group, as a terminal sends it, and once to the child itself."""
    os.mkfifo(tmp_path / "held")
    parent = start_parent(INTERRUPTED, tmp_path, tmp_path)
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    os.killpg(parent.pid, signal.SIGINT)
    (tmp_path / "held").write_text("go on")
    assert parent.stdout.readline() == "ready\n"
    os.kill(child_pid, signal.SIGINT)
    output, words = parent.communicate("go on\n", timeout=WAIT_S)
    assert (output, words, parent.returncode) == ("3.0\n", "", 0)


@pytest.mark.timeout(60)
def test_a_child_whose_worker_ends_is_heard() -> None:
    handle = placed(child_scorers.DyingThread())["dying"]
    [future] = handle.submit([ended(1)])
    with pytest.raises(PartFailedError, match="the thread of the scoring process ended"):
        future.result(WAIT_S)
    with pytest.raises(PartFailedError, match="the thread of the scoring process ended"):
        heard(handle)
    handle.close()


@pytest.mark.timeout(60)
def test_a_scorer_goes_by_the_name_that_it_was_placed_under() -> None:
    handle = place_in_process({"judge": Lengths()})["judge"]
    assert handle.name == "judge"
    assert results(handle, ended(2), ended(5)) == [3.0, 3.0]
    handle.close()


@pytest.mark.timeout(60)
def test_a_request_that_the_child_cannot_serve_fails_whoever_waits() -> None:
    handle = placed(Lengths())["lengths"]
    stranger = ProcessPlacement("nobody", Lengths(), handle._process)
    [future] = stranger.submit([ended(1)])
    with pytest.raises(PartFailedError, match="KeyError: 'nobody'"):
        future.result(WAIT_S)
    handle.close()
