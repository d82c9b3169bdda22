"""The other side of the process placement: ``python -m oppo_kit.placement.child PIPE WEIGHTS`` (file descriptors).

The main thread reads the pipe, so that the end of the parent is heard while a model runs, and ends the process at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from oppo_kit.types import Score


def main(pipe_fd: int, weights_fd: int) -> None:
    """Load the scorers and serve them until the pipe ends."""
    pipe = Connection(pipe_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent's to handle
    try:
        settings = pipe.recv()
        if settings["cores"] is not None:
            os.sched_setaffinity(0, settings["cores"])
        link = _Link(pipe, settings, _load(weights_fd, settings["device"]))
    except EOFError:
        os._exit(1)
    except Exception as error:
        pipe.send(([], [], (type(error).__name__, f"the scoring process could not start: {error}")))
        os._exit(1)
    with suppress(EOFError, OSError):
        link.serve()
    os._exit(0)  # not by the interpreter's end, which would wait for a model that runs


class _Link:
    """Messages to calls of a worker, and its results to messages."""

    def __init__(self, pipe: Connection, settings: dict[str, Any], scorers: dict[str, Any]) -> None:
        from oppo_kit.placement.worker import ScoringWorker

        self._pipe = pipe
        self._lock = threading.Lock()
        self._results: list[tuple[int, Score | None, tuple[str, str] | None]] = []
        has_affinity = hasattr(os, "sched_getaffinity")
        num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        self._worker = ScoringWorker(
            scorers,
            lane="scoring process",
            num_threads=settings["num_threads"],
            num_threads_awaited=num_cores,
            on_work=self._tell,
        )
        self._tell()

    def serve(self) -> None:
        """Until the parent says so, or is gone."""
        while (message := self._pipe.recv())[0] != "close":
            kind, name, *rest = message
            if kind == "submit":
                ids, rollouts, is_awaited = rest
                futures = self._worker.submit(name, rollouts, is_awaited=is_awaited)
                for index, future in zip(ids, futures, strict=True):
                    future.add_done_callback(lambda done, index=index: self._keep(index, done))
                if self._results:  # done before the callback was there
                    self._tell()
            elif kind == "feed":
                self._worker.feed(name, *rest)
            else:
                self._worker.forget(name, *rest)

    def _keep(self, index: int, future: Future[Score | None]) -> None:
        error = future.exception()
        with self._lock:
            if error is None:
                self._results.append((index, future.result(), None))
            else:
                self._results.append((index, None, (type(error).__name__, str(error))))

    def _tell(self) -> None:
        """What was done since the last time."""
        failure = None
        try:
            self._worker.check()
        except Exception as error:
            failure = (type(error).__name__, str(error))
        with self._lock:
            results, self._results = self._results, []
            self._pipe.send((results, self._worker.take_spans(), failure))


def _load(weights_fd: int, device: str | None) -> dict[str, Any]:
    import torch

    return torch.load(f"/dev/fd/{weights_fd}", map_location=device, mmap=True, weights_only=False)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
