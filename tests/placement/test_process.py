"""Scorers in a process of their own: the same scores, and no death on either side goes unheard.

Named pipes say where a child is; where a test waits longer than it should, something hangs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import child_scorers
import pytest
import torch
from child_scorers import Lengths, Raising, Streaming, ended, waiting_pipes
from tiny_models import VOCAB_SIZE, tiny_classifier

from oppo_kit import errors
from oppo_kit.backends.hf_scorer import HFRewardScorer
from oppo_kit.errors import ConfigError, PartFailedError, RewardError
from oppo_kit.placement import process as process_module
from oppo_kit.placement.inline import InlinePlacement
from oppo_kit.placement.messages import Failure, rebuilt
from oppo_kit.placement.process import ProcessPlacement, place_in_process
from oppo_kit.types import Prompt, Rollout, RolloutKey, Score

WAIT_S = 60.0
Handles = dict[str, ProcessPlacement]
OURS = ["RewardError", "ModelError", "NonFiniteError", "ConfigError", "DataError", "StateError"]

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="pins and maps as Linux does")


def placed(*scorers: Any, **options: Any) -> Handles:
    return place_in_process({scorer.name: scorer for scorer in scorers}, **options)


def results(handle: ProcessPlacement, *rollouts: Rollout) -> list[Score | None]:
    return [future.result(WAIT_S) for future in handle.submit(rollouts)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipes")


@pytest.fixture(scope="module")
def big() -> child_scorers.Big:
    return child_scorers.Big()


@pytest.fixture(scope="module")
def handles(folder: Path, big: child_scorers.Big) -> Iterator[Handles]:
    """One child for all that leaves it whole; it has two threads and one core."""
    os.mkfifo(folder / "fed")
    handles = placed(
        Lengths(),
        Streaming(),
        child_scorers.Threads(),
        child_scorers.Cores(),
        child_scorers.Exiting(),
        child_scorers.Short(),
        child_scorers.Tensors(),
        child_scorers.Column(),
        child_scorers.RaisingOwn(),
        *(Raising(name, "with words") for name in (*OURS, "ValueError")),
        Raising("UnknownNameError", "algorithm", "pop", ["ppo"]),
        big,
        child_scorers.Announced(HFRewardScorer(tiny_classifier()), folder / "fed"),
        num_threads=2,
        cores=[0],
    )
    yield handles
    for handle in handles.values():
        handle.close()


# --- scores


def test_scores_come_back_in_order_through_the_futures(handles: Handles) -> None:
    handle = handles["lengths"]
    assert (handle.name, handle.call_per, handle.can_stream, handle.follows_weights) == (
        "lengths",
        "response",
        False,
        False,
    )
    handle.take_spans()
    first, second = handle.submit([ended(3, 4), ended(1, 2)]), handle.submit([ended(2, 0)])
    assert [future.result(WAIT_S) for future in first + second] == [4.0, 2.0, None]
    spans = handle.take_spans()
    assert {(span.lane, span.name) for span in spans} == {("scoring process", "score lengths")}
    assert sum(span.num_tokens for span in spans) == 6
    assert handle.submit([]) == []
    handle.check()


def test_what_was_done_is_on_record_before_its_scores_are_there(handles: Handles) -> None:
    for draw in range(20):
        results(handles["lengths"], ended(draw, 4))
        [span] = handles["streaming"].take_spans()
        assert (span.name, span.num_tokens) == ("score lengths", 4)


def test_tensors_do_not_travel_as_tensors(handles: Handles) -> None:
    assert results(handles["tensors"], ended(1), ended(2), ended(3)) == [2.5, [1.0, 2.0], 3.0]
    rollout = ended(1)
    prompt = Prompt(1, (1,), 4, {"numbers": torch.tensor([1.0, 2.5])})
    assert results(handles["column"], Rollout(rollout.key, prompt, [5], finish_reason="stop")) == [3.5]


def test_what_was_fed_is_there_until_it_is_forgotten(handles: Handles) -> None:
    handle = handles["streaming"]
    assert handle.can_stream
    rollouts = [Rollout(RolloutKey(draw, 0), Prompt(draw, (1,), 9), [5, 5]) for draw in range(4)]
    handle.feed(rollouts)
    # A forget waits for what runs, and drops what does not: after it, all others are fed.
    handle.forget([])
    handle.forget([RolloutKey(1, 0)])
    scores = results(handle, *rollouts)
    assert scores[1] == -1.0
    assert set(scores) <= {2.0, -1.0}
    handle.feed(rollouts)
    handle.forget(None)
    assert results(handle, *rollouts) == [-1.0] * 4


def test_a_model_scores_the_same_from_chunks(handles: Handles, folder: Path) -> None:
    rollouts = [
        Rollout(
            RolloutKey(draw, 0),
            Prompt(draw, tuple(range(1, 4 + draw)), 30),
            token_ids=[(7 * i + draw) % VOCAB_SIZE for i in range(9 + 3 * draw)],
            finish_reason="stop",
        )
        for draw in range(3)
    ]
    inline = InlinePlacement(HFRewardScorer(tiny_classifier()))
    expected = [future.result(0) for future in inline.submit(rollouts)]
    handle = handles["reward"]
    assert results(handle, *rollouts) == pytest.approx(expected, abs=1e-5)
    handle.take_spans()
    for length in (4, 8):
        parts = [rollout.snapshot() for rollout in rollouts]
        for part in parts:
            part.finish_reason = None
            del part.token_ids[length:]
        handle.feed(parts)
        assert (folder / "fed").read_text() == "x"
    assert results(handle, *rollouts) == pytest.approx(expected, abs=1e-5)
    spans = handle.take_spans()
    assert [span.name for span in spans] == ["feed reward", "feed reward", "score reward"]
    num_tokens = sum(len(rollout.prompt.token_ids) + len(rollout.token_ids) for rollout in rollouts)
    assert sum(span.num_tokens for span in spans) == num_tokens
    assert spans[0].num_tokens == 3 * 4 + 3 + 4 + 5


def test_the_child_has_its_cores_and_its_threads_and_all_its_cores_while_somebody_waits(
    handles: Handles,
) -> None:
    assert results(handles["cores"], ended(1)) == [[0.0]]
    assert results(handles["threads"], ended(1)) == [2.0]
    handles["threads"].set_awaited(True)
    assert results(handles["threads"], ended(2)) == [1.0]
    handles["threads"].set_awaited(False)
    assert results(handles["threads"], ended(3)) == [2.0]
    tasks = Path(f"/proc/{handles['cores']._process.pid}/task").iterdir()
    assert {tuple(os.sched_getaffinity(int(task.name))) for task in tasks} == {(0,)}


def test_a_big_module_is_mapped_and_no_copy_stays_in_shared_memory(
    handles: Handles, big: child_scorers.Big
) -> None:
    assert results(handles["big"], ended(1)) == [pytest.approx(float(big.module.weight.double().sum()))]
    maps = Path(f"/proc/{handles['big']._process.pid}/maps").read_text().splitlines()
    assert not [line for line in maps if "/dev/shm" in line or "/torch_" in line]
    sizes = []
    for line in maps:
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if line.endswith("(deleted)"):
            sizes.append(last - first)
    assert max(sizes, default=0) >= big.module.weight.nbytes


# --- failures


@pytest.mark.parametrize("name", OURS)
def test_an_error_of_ours_keeps_its_class(handles: Handles, name: str) -> None:
    with pytest.raises(getattr(errors, name), match="^with words$") as info:
        results(handles[f"raising {name}"], ended(1))
    assert type(info.value) is getattr(errors, name)
    handles["lengths"].check()


def test_an_error_of_ours_that_makes_its_own_words_keeps_them(handles: Handles) -> None:
    with pytest.raises(errors.UnknownNameError, match="^unknown algorithm 'pop'; did you mean 'ppo'") as info:
        results(handles["raising UnknownNameError"], ended(1))
    assert isinstance(info.value, ConfigError)


def test_an_error_derived_from_ours_becomes_ours(handles: Handles) -> None:
    with pytest.raises(RewardError, match="^mine$"):
        results(handles["raising own"], ended(1))


def test_any_other_error_names_its_type_and_where_it_was_raised(handles: Handles) -> None:
    with pytest.raises(PartFailedError, match="^ValueError: with words\n") as info:
        results(handles["raising ValueError"], ended(1))
    assert "child_scorers.py" in info.value.__notes__[0]
    assert type(rebuilt(Failure("Iterable", "no error", ""))) is PartFailedError


def test_an_exit_is_a_failure_and_no_end(handles: Handles) -> None:
    for _ in range(2):
        with pytest.raises(PartFailedError, match=r"scorer 'exiting' raised SystemExit\(3\)"):
            results(handles["exiting"], ended(1))
    assert results(handles["lengths"], ended(1)) == [3.0]


def test_another_number_of_scores_is_named(handles: Handles) -> None:
    with pytest.raises(PartFailedError, match="'short' returned 0 scores for 1 rollouts; one each is needed"):
        results(handles["short"], ended(1))


def test_a_prompt_that_cannot_be_sent_says_so(handles: Handles) -> None:
    rollout = Rollout(RolloutKey(1, 0), Prompt(1, (1,), 4, {"check": lambda: None}))
    with pytest.raises(
        PartFailedError,
        match="cannot be sent to the scoring process: .*keep to numbers, text, lists and dicts",
    ):
        handles["lengths"].submit([rollout])


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
        match=r"the scorers \['lengths'\] cannot be sent to a process: .*; set overlap.placement to 'thread'",
    ):
        placed(scorer)


def test_a_class_that_the_child_cannot_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfScript(Lengths):
        __module__ = "__main__"
        __qualname__ = "OfScript"

    monkeypatch.setattr(sys.modules["__main__"], "OfScript", OfScript, raising=False)
    with pytest.raises(PartFailedError, match="AttributeError: Can't get attribute 'OfScript'") as info:
        placed(OfScript())
    assert "in the scoring process" in info.value.__notes__[0]


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
from child_scorers import Lengths, Waiting, ended
from oppo_kit.placement.process import ProcessPlacement, ScoringProcess

scorers = {"waiting": Waiting(Path(sys.argv[1])), "lengths": Lengths()}
process = ScoringProcess(scorers)
handles = {name: ProcessPlacement(scorer, process) for name, scorer in scorers.items()}
"""

KILLED = """
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

INTERRUPTED = """
try:
    print(process.pid, flush=True)
    process._ready.wait()
    raise SystemExit("the interrupt came too late")
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
        [sys.executable, "-c", PARENT + script, str(folder)],
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
    parent = start_parent(INTERRUPTED, tmp_path, tmp_path)
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    os.killpg(parent.pid, signal.SIGINT)
    line = parent.stdout.readline()
    assert line == "ready\n", parent.communicate()
    os.kill(child_pid, signal.SIGINT)
    output, words = parent.communicate("go on\n", timeout=WAIT_S)
    assert (output, words, parent.returncode) == ("3.0\n", "", 0)
