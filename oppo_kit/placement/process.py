"""Scorers in a process of their own, which share neither the interpreter nor, by option, the cores of the actor.

    engine ─ submit, feed, forget ─► pipe ─► child: ScoringWorker
       ▲                                         │
    futures ◄── reader thread ◄──── pipe ◄── scores, spans, errors

Waits for: the child's messages, in the reader thread. Unblocked by: a message, or the end of the pipe, which is how the
death of the child is heard; the child in turn ends when its end of the pipe does. Models travel once, through a file
that has no name (containers have little shared memory), and are mapped there.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from multiprocessing import Pipe
from typing import Any

import torch

from oppo_kit.errors import ConfigError, PartFailedError
from oppo_kit.placement.messages import Results, rebuilt
from oppo_kit.placement.worker import begin, closed_error, settle
from oppo_kit.protocols import CallPer, Scorer, StreamingScorer
from oppo_kit.telemetry.spans import SpanLog
from oppo_kit.types import Rollout, RolloutKey, Score, Span

# A child that has not gone by itself after this long is killed.
_CLOSE_S = 10.0
# Loading PyTorch and transformers takes some seconds, on a busy machine a minute.
_START_S = 300.0


class ScoringProcess:
    """One child with one or several scorers; see the module.

    Args:
        scorers: by name; they are copied into the child.
        num_threads: its CPU threads while the actor decodes; as many as this process has, or as it is pinned to
            cores, while somebody waits for scores.
        cores: CPU cores that it is pinned to; None: all that this process may use, at the lowest priority.
        device: where its models go; None: where they are.

    Raises:
        ConfigError: a scorer that cannot be copied, or cores that this machine lacks.
    """

    def __init__(
        self,
        scorers: Mapping[str, Scorer],
        *,
        num_threads: int = 1,
        cores: Sequence[int] | None = None,
        device: str | None = None,
    ) -> None:
        _check_cores(cores)
        self._futures: dict[int, Future[Score | None]] = {}
        self._ids = count()
        self._num_feeds = self._num_feeds_read = 0
        self._lock = threading.Lock()
        self._is_closing = False
        self._failure: Exception | None = None
        self._spans = SpanLog()
        self._ready = threading.Event()
        with _written(scorers) as file:
            self._pipe, theirs = Pipe()
            with theirs:
                self._process = _start(theirs.fileno(), file.fileno(), num_threads)
        self._reader = threading.Thread(target=self._read, name="oppo-scores", daemon=True)
        self._reader.start()
        try:
            if cores is not None:
                _pin(self.pid, cores)
            num_threads_awaited = torch.get_num_threads() if cores is None else len(cores)
            self.send(
                {
                    "num_threads": num_threads,
                    "num_threads_awaited": num_threads_awaited,
                    "device": device,
                    # On a GPU it only starts kernels, and cores of its own it shares with nobody.
                    "yields": cores is None and torch.device(device or "cpu").type == "cpu",
                }
            )
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Return when the models are loaded.

        Raises:
            PartFailedError: they could not be, or the child died.
        """
        is_ready = self._ready.wait(_START_S)
        self.check()
        if not is_ready:
            raise PartFailedError(
                f"the scoring process {self.pid} was not ready after {_START_S:.0f} s; is the machine out of memory?"
            )

    @property
    def is_busy(self) -> bool:
        """Whether the child has not yet answered all that it was sent."""
        with self._lock:
            return bool(self._futures) or self._num_feeds_read < self._num_feeds

    def feed(self, name: str, rollouts: Sequence[Rollout]) -> None:
        """Send unfinished rollouts."""
        self._num_feeds += 1
        self.send(("feed", name, [rollout.snapshot() for rollout in rollouts]))

    def submit(self, name: str, rollouts: Sequence[Rollout]) -> list[Future[Score | None]]:
        """Send ended rollouts."""
        futures: list[Future[Score | None]] = [Future() for _ in rollouts]
        begin(futures)  # what was sent cannot be cancelled
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._is_closing:
                raise closed_error(name)
            ids = [next(self._ids) for _ in futures]
            self._futures.update(zip(ids, futures, strict=True))
        try:
            self.send(("submit", name, ids, [rollout.snapshot() for rollout in rollouts]))
        except BaseException:
            with self._lock:
                for index in ids:
                    self._futures.pop(index, None)
            raise
        return futures

    def send(self, message: object) -> None:
        """To the child; nothing happens when it is closed.

        Raises:
            PartFailedError: it is gone, or the message cannot be pickled.
        """
        try:
            # Not by Connection.send, which would put a tensor into shared memory.
            packed = pickle.dumps(message)
        except Exception as error:
            raise PartFailedError(
                f"rollouts cannot be sent to the scoring process: {error}; keep to numbers, text, lists and dicts in "
                "the prompts' columns, or set overlap.placement to 'thread'"
            ) from error
        try:
            self._pipe.send_bytes(packed)
        except OSError as error:
            if self._is_closing:
                return
            self._reader.join(_CLOSE_S)  # which finds out why
            self.check()
            raise PartFailedError(f"the scoring process {self.pid} cannot be reached: {error}") from error

    def check(self) -> None:
        """Raise what the child said went wrong, or that it died."""
        with self._lock:
            if self._failure is not None:
                raise self._failure

    def take_spans(self) -> list[Span]:
        """What the child did since anybody asked."""
        return self._spans.take()

    def close(self) -> None:
        """End the child, whatever it is at; safe to call twice."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        if not self._ready.is_set():  # it reads no messages yet
            self._process.kill()
        # Also of a child that is stopped, and whose pipe is too full for another message.
        deadline = threading.Timer(_CLOSE_S, self._process.kill)
        deadline.daemon = True
        deadline.start()
        with suppress(OSError):
            self._pipe.send_bytes(pickle.dumps(("close",)))
        self._process.wait()
        deadline.cancel()
        self._reader.join(_CLOSE_S)
        self._pipe.close()

    def _read(self) -> None:
        failure: Exception | None = None
        try:
            while True:
                self._take(pickle.loads(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            pass
        except Exception as error:
            self._process.kill()
            self._process.wait()
            failure = PartFailedError(f"the scoring process {self.pid} said what cannot be read: {error!r}")
        failure = failure or self._death(self._process.wait())
        with self._lock:
            if self._is_closing:
                failure = PartFailedError("the scoring process was closed before this score was there")
            else:
                self._failure = failure = self._failure or failure
            left, self._futures = self._futures, {}
        settle(list(left.values()), failure)
        self._ready.set()

    def _take(self, results: Results) -> None:
        self._spans.add(*results.spans)
        with self._lock:
            self._num_feeds_read = results.num_feeds_read
            if results.failure is not None and self._failure is None:
                self._failure = rebuilt(results.failure)
            done = [(self._futures.pop(index), score, failure) for index, score, failure in results.scores]
            left = {} if self._failure is None else self._futures
            if left:
                self._futures = {}
        for future, score, failure in done:
            settle([future], [score] if failure is None else rebuilt(failure))
        if self._failure is not None:
            settle(list(left.values()), self._failure)
        self._ready.set()

    def _death(self, code: int) -> PartFailedError:
        fate = f"ended with exit code {code}"
        if code < 0:
            fate = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return PartFailedError(
            f"the scoring process {self.pid} {fate}; its last words are on standard error above. If the system killed "
            "it, memory ran out: lower batch_size, or set overlap.placement to 'inline'"
        )


class ProcessPlacement:
    """One scorer of a ``ScoringProcess``."""

    follows_weights = False

    def __init__(self, name: str, scorer: Scorer, process: ScoringProcess) -> None:
        self.name = name
        self.call_per: CallPer = getattr(scorer, "call_per", "response")
        self.can_stream = isinstance(scorer, StreamingScorer)
        self._process = process

    @property
    def is_busy(self) -> bool:
        """Whether the child works for any scorer."""
        return self._process.is_busy

    def submit(self, rollouts: Sequence[Rollout]) -> list[Future[Score | None]]:
        """Send ended rollouts."""
        return self._process.submit(self.name, rollouts)

    def feed(self, rollouts: Sequence[Rollout]) -> None:
        """Send unfinished rollouts."""
        self._process.feed(self.name, rollouts)

    def set_awaited(self, is_awaited: bool) -> None:
        """Tell the child that it may use the cores that the actor leaves, or not any more."""
        self._process.send(("awaited", self.name, is_awaited))

    def forget(self, keys: Sequence[RolloutKey] | None) -> None:
        """Tell the child to drop what was fed."""
        self._process.send(("forget", self.name, None if keys is None else list(keys)))

    def check(self) -> None:
        """Raise what a feed raised, or the death of the child."""
        self._process.check()

    def take_spans(self) -> list[Span]:
        """What the child did since anybody asked."""
        return self._process.take_spans()

    def close(self) -> None:
        """End the child."""
        self._process.close()


def place_in_process(
    scorers: Mapping[str, Scorer],
    *,
    num_threads: int = 1,
    cores: Sequence[int] | None = None,
    device: str | None = None,
) -> dict[str, ProcessPlacement]:
    """All of them in one child, which has loaded them; see ``ScoringProcess``."""
    process = ScoringProcess(scorers, num_threads=num_threads, cores=cores, device=device)
    try:
        process.wait_until_ready()
    except BaseException:
        process.close()
        raise
    return {name: ProcessPlacement(name, scorer, process) for name, scorer in scorers.items()}


def _written(scorers: Mapping[str, Scorer]) -> Any:
    """An unnamed file with the scorers in it."""
    file: Any = None
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        torch.save(dict(scorers), file)
        file.flush()
    except Exception as error:  # a scorer may define how it is pickled
        if file is not None:
            with suppress(OSError):
                file.close()
        raise ConfigError(
            f"the scorers {sorted(scorers)} cannot be sent to a process: {type(error).__name__}: {error}; if "
            f"{tempfile.gettempdir()} is full, name a folder with room for the models in TMPDIR, else set "
            "overlap.placement to 'thread' or 'inline'"
        ) from error
    return file


def _start(pipe_fd: int, weights_fd: int, num_threads: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "oppo_kit.placement.child", str(pipe_fd), str(weights_fd)],
        pass_fds=(pipe_fd, weights_fd),
        stdin=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C is the parent's to handle
        env={
            **os.environ,
            "OMP_NUM_THREADS": str(num_threads),
            # Whatever this process can import.
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        },
    )


def _check_cores(cores: Sequence[int] | None) -> None:
    if cores is None:
        return
    num_cores = os.cpu_count() or 1
    missing = sorted(set(cores) - set(range(num_cores)))
    if missing or not cores or not hasattr(os, "sched_setaffinity"):
        raise ConfigError(
            f"scorer_cores names the cores {missing or list(cores)}, which this machine lacks or cannot pin to; "
            f"it has 0 to {num_cores - 1}"
        )


def _pin(pid: int, cores: Sequence[int]) -> None:
    """At once, since threads take over where the one that starts them is pinned."""
    try:
        os.sched_setaffinity(pid, cores)
    except OSError as error:
        raise ConfigError(
            f"scorer_cores {list(cores)} cannot be used by a process of this container: {error}; "
            f"usable are {sorted(os.sched_getaffinity(0))}"
        ) from error
