"""The other side of the process placement: ``python -m oppo_kit.placement.child PIPE WEIGHTS`` (file descriptors).

    pipe ─► main thread ─► queue ─► serving thread ─► ScoringWorker ─► pipe

Waits for: messages of the parent. Unblocked by: a message or the end of the pipe. The main thread only reads, so that
the end of the parent is heard while a model runs or is waited for, and it then ends the process at once.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from oppo_kit.placement.messages import Failure, Results
from oppo_kit.types import Score

# Between two looks at the parent, whose own children may hold its end of the pipe open.
_LOOK_S = 1.0
# The lowest priority there is: beside decoding and training the scorers get the time that is left, and all while the
# actor waits for them.
_NICENESS = 19


def main(pipe_fd: int, weights_fd: int) -> None:
    """Load the scorers and serve them until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    os.set_inheritable(pipe_fd, False)  # by what a scorer may start, which would keep the pipe open
    pipe = Connection(pipe_fd)
    parent = os.getppid()
    try:
        settings = pickle.loads(pipe.recv_bytes())
        if settings["yields"]:
            os.nice(_NICENESS)  # of this thread, and of those that it starts
        link = _Link(pipe, settings, _load(weights_fd, settings["device"]))
    except EOFError:
        os._exit(1)
    except BaseException as error:
        with suppress(OSError):
            pipe.send_bytes(pickle.dumps(Results([], [], Failure.of(error))))
        os._exit(1)
    with suppress(EOFError, OSError):
        while (message := _receive(pipe, parent))[0] != "close":
            link.put(message)
    os._exit(0)  # not by the interpreter's end, which would wait for a model that runs


def _receive(pipe: Connection, parent: int) -> tuple[Any, ...]:
    while not pipe.poll(_LOOK_S):
        if os.getppid() != parent:
            raise EOFError
    return pickle.loads(pipe.recv_bytes())


class _Link:
    """Messages to calls of a worker, and its results to messages."""

    def __init__(self, pipe: Connection, settings: dict[str, Any], scorers: dict[str, Any]) -> None:
        from oppo_kit.placement.worker import ScoringWorker

        self._pipe = pipe
        self._lock = threading.Lock()
        self._scores: list[tuple[int, Score | None, Failure | None]] = []
        self._num_feeds = self._num_feeds_read = 0
        self._messages: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._worker = ScoringWorker(
            scorers,
            lane="scoring process",
            num_threads=settings["num_threads"],
            num_threads_awaited=settings["num_threads_awaited"],
            on_work=self._tell,
        )
        threading.Thread(target=self._serve, daemon=True).start()
        self._tell()

    def put(self, message: tuple[Any, ...]) -> None:
        """Serve it when those before it are."""
        self._messages.put(message)

    def _serve(self) -> None:
        while True:
            try:
                self._call(*self._messages.get())
            except BaseException as error:
                self._tell(Failure.of(error))

    def _call(self, kind: str, name: str, *rest: Any) -> None:
        if kind == "feed":
            self._worker.feed(name, *rest)
            self._num_feeds += 1  # not before the worker has it, see ``_tell``
        elif kind == "forget":
            self._worker.forget(name, *rest)
            self._tell()  # there may be nothing left of a feed
        elif kind == "awaited":
            self._worker.set_awaited(*rest)
        else:
            ids, rollouts = rest
            futures = self._worker.submit(name, rollouts)
            for index, future in zip(ids, futures, strict=True):
                future.add_done_callback(lambda done, index=index: self._keep(index, done))
            if self._scores:  # done before the callback was there
                self._tell()

    def _keep(self, index: int, future: Future[Score | None]) -> None:
        error = future.exception()
        score, failure = (future.result(), None) if error is None else (None, Failure.of(error))
        with self._lock:
            self._scores.append((index, score, failure))

    def _tell(self, failure: Failure | None = None) -> None:
        """What was done since the last time."""
        try:
            self._worker.check()
        except Exception as error:
            failure = failure or Failure.of(error)
        with self._lock, suppress(OSError):  # without a parent nobody listens, and the main thread ends all
            num_feeds = self._num_feeds
            if not self._worker.is_busy:
                self._num_feeds_read = num_feeds
            scores, self._scores = self._scores, []
            results = Results(scores, self._worker.take_spans(), failure, self._num_feeds_read)
            self._pipe.send_bytes(pickle.dumps(results))


def _load(weights_fd: int, device: str | None) -> dict[str, Any]:
    import torch

    from oppo_kit.errors import ConfigError

    try:
        scorers = torch.load(f"/dev/fd/{weights_fd}", map_location=device, mmap=True, weights_only=False)
    except (AttributeError, ImportError) as error:
        raise ConfigError(
            f"a scorer's class cannot be imported by the scoring process: {error}; define it in a module instead of a "
            "script or notebook, or set overlap.placement to 'thread'"
        ) from error
    os.close(weights_fd)
    return scorers


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
