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

from oppo_kit import errors
from oppo_kit.errors import ConfigError, OppoError, PartFailedError
from oppo_kit.protocols import CallPer, Scorer, StreamingScorer
from oppo_kit.types import Rollout, RolloutKey, Score, Span

# A child that has not gone by itself after this long is killed.
_CLOSE_S = 10.0
# Loading PyTorch and transformers takes some seconds, on a busy machine a minute.
_START_S = 300.0


class ScoringProcess:
    """One child with one or several scorers; see the module.

    Args:
        scorers: by name; they are copied into the child.
        num_threads: its CPU threads while the actor decodes.
        cores: CPU cores that it is pinned to; None: all that this process may use.
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
        self._futures: dict[int, Future[Score | None]] = {}
        self._ids = count()
        self._lock = threading.Lock()
        self._is_closing = False
        self._failure: Exception | None = None
        self._spans: list[Span] = []
        self._ready = threading.Event()
        own, theirs = Pipe()
        with tempfile.TemporaryFile() as file, theirs:
            _write(scorers, file)
            settings = {"num_threads": num_threads, "cores": _usable(cores), "device": device}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "oppo_kit.placement.child", str(theirs.fileno()), str(file.fileno())],
                pass_fds=(theirs.fileno(), file.fileno()),
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": str(num_threads),
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
            )
        self._pipe = own
        self.send(settings)
        self._reader = threading.Thread(target=self._read, name="oppo-scores", daemon=True)
        self._reader.start()

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

    def submit(
        self, name: str, rollouts: Sequence[Rollout], *, is_awaited: bool
    ) -> list[Future[Score | None]]:
        """Send ended rollouts."""
        futures: list[Future[Score | None]] = [Future() for _ in rollouts]
        with self._lock:
            if self._failure is not None:
                raise self._failure
            ids = [next(self._ids) for _ in futures]
            self._futures.update(zip(ids, futures, strict=True))
        self.send(("submit", name, ids, [rollout.snapshot() for rollout in rollouts], is_awaited))
        return futures

    def send(self, message: object) -> None:
        """To the child.

        Raises:
            PartFailedError: it is gone.
        """
        try:
            self._pipe.send(message)
        except (OSError, ValueError) as error:
            self._ready.wait(_CLOSE_S)
            self.check()
            raise PartFailedError(f"the scoring process {self.pid} cannot be reached: {error}") from error

    def check(self) -> None:
        """Raise what the child said went wrong, or that it died."""
        with self._lock:
            if self._failure is not None:
                raise self._failure

    def take_spans(self) -> list[Span]:
        """What the child did since anybody asked."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans

    def close(self) -> None:
        """End the child; safe to call twice."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        with suppress(OSError):
            self._pipe.send(("close",))
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_CLOSE_S)
        self._pipe.close()
        self._settle_all(PartFailedError("the scoring process was closed before this score was there"))

    def _read(self) -> None:
        while True:
            try:
                results, spans, failure = self._pipe.recv()
            except (EOFError, OSError, pickle.UnpicklingError):
                break
            with self._lock:
                self._spans += spans
                if failure is not None and self._failure is None:
                    self._failure = rebuilt(failure)
                done = [(self._futures.pop(index), score, error) for index, score, error in results]
            for future, score, error in done:
                if error is None:
                    future.set_result(score)
                else:
                    future.set_exception(rebuilt(error))
            self._ready.set()
        code = self._process.wait()
        error = PartFailedError(
            f"the scoring process {self.pid} {_fate(code)}; its last words are on standard error above. If the system "
            "killed it, memory ran out: lower batch_size, or set overlap.placement to 'inline'"
        )
        with self._lock:
            if not self._is_closing and self._failure is None:
                self._failure = error
        self._settle_all(error)
        self._ready.set()

    def _settle_all(self, error: Exception) -> None:
        with self._lock:
            left, self._futures = self._futures, {}
        for future in left.values():
            if not future.done():
                future.set_exception(error)


class ProcessPlacement:
    """One scorer of a ``ScoringProcess``."""

    follows_weights = False

    def __init__(self, scorer: Scorer, process: ScoringProcess) -> None:
        self.name = scorer.name
        self.call_per: CallPer = getattr(scorer, "call_per", "response")
        self.can_stream = isinstance(scorer, StreamingScorer)
        self._process = process

    def submit(self, rollouts: Sequence[Rollout], *, is_awaited: bool = False) -> list[Future[Score | None]]:
        """Send ended rollouts."""
        return self._process.submit(self.name, rollouts, is_awaited=is_awaited)

    def feed(self, rollouts: Sequence[Rollout]) -> None:
        """Send unfinished rollouts."""
        self._process.send(("feed", self.name, [rollout.snapshot() for rollout in rollouts]))

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
    return {name: ProcessPlacement(scorer, process) for name, scorer in scorers.items()}


def rebuilt(error: tuple[str, str]) -> OppoError:
    """An error of ours by its class's name and its words; anything else failed a part."""
    name, words = error
    error_class: Any = getattr(errors, name, None)
    if isinstance(error_class, type) and error_class.__init__ is Exception.__init__:
        return error_class(words)
    return PartFailedError(f"{name}: {words}")


def _write(scorers: Mapping[str, Scorer], file: Any) -> None:
    try:
        torch.save(dict(scorers), file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the scorers {sorted(scorers)} cannot be sent to a process: {error}; "
            "set overlap.placement to 'thread' or 'inline'"
        ) from error
    file.flush()


def _usable(cores: Sequence[int] | None) -> list[int] | None:
    if cores is None:
        return None
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    missing = sorted(set(cores) - set(range(os.cpu_count() or 1)))
    if missing or not usable:
        raise ConfigError(
            f"scorer_cores names the cores {missing or list(cores)}, which this machine lacks or cannot pin to; "
            f"it has 0 to {(os.cpu_count() or 1) - 1}"
        )
    return sorted(set(cores))


def _fate(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by signal {-code} ({signal.Signals(-code).name})"
