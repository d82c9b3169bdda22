"""One thread that works for one or several scorers, so that scoring overlaps with decoding.

Waits for: submissions and feeds. Unblocked by: ``submit``, ``feed``, ``close``. Submissions come first, since a step
waits for them; all that wait for one scorer are one call, unless its scores depend on what a call holds. A feed that is
not read yet is replaced by a later one of the same rollout, so a slow scorer reads larger chunks instead of falling
behind. ``forget`` goes before whatever has not begun.

Used by the thread placement, and by the process placement on the other side of its pipe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from oppo_kit.errors import PartFailedError
from oppo_kit.protocols import CallPer, Clock, Scorer, StreamingScorer
from oppo_kit.telemetry.clock import MonotonicClock
from oppo_kit.telemetry.spans import SpanLog
from oppo_kit.types import Rollout, RolloutKey, Score, Span

# What still runs then is left to itself: its thread does not keep the interpreter from ending.
CLOSE_S = 10.0


@dataclass(slots=True, eq=False)
class _Submission:
    name: str
    rollouts: list[Rollout]
    futures: list[Future[Score | None]]


class ScoringWorker:
    """See the module.

    Args:
        scorers: by name; nobody else uses them.
        lane: of the spans.
        num_threads: CPU threads while the actor decodes; None: as the process has it.
        num_threads_awaited: CPU threads while somebody waits for scores.
        clock: monotonic seconds.
        on_work: called by the thread after each piece of work.
    """

    def __init__(
        self,
        scorers: Mapping[str, Scorer],
        *,
        lane: str,
        num_threads: int | None = None,
        num_threads_awaited: int | None = None,
        clock: Clock | None = None,
        on_work: Callable[[], None] | None = None,
    ) -> None:
        self._scorers = dict(scorers)
        self._on_work = on_work
        self._lane = lane
        self._num_threads = num_threads
        self._num_threads_awaited = num_threads_awaited or num_threads
        self._clock = clock or MonotonicClock()
        # Guards all below; the scorers are used by the thread while ``_is_busy``, else under the lock.
        self._changed = threading.Condition()
        self._is_busy = False
        self._is_awaited = False
        self._is_closed = False
        self._num_forgetting = 0
        self._running: list[_Submission] = []
        self._submissions: list[_Submission] = []
        self._feeds: dict[str, dict[RolloutKey, Rollout]] = {name: {} for name in scorers}
        self._failure: Exception | None = None
        self._spans = SpanLog()
        self._thread = threading.Thread(target=self._run, name=f"oppo-{lane}", daemon=True)
        self._thread.start()

    def submit(self, name: str, rollouts: Sequence[Rollout]) -> list[Future[Score | None]]:
        """Score ended rollouts; their tokens are not changed any more, so they are not copied."""
        futures: list[Future[Score | None]] = [Future() for _ in rollouts]
        with self._changed:
            if self._is_closed:
                raise self._failure or closed_error(name)
            for rollout in rollouts:
                self._feeds[name].pop(rollout.key, None)
            self._submissions.append(_Submission(name, list(rollouts), futures))
            self._changed.notify_all()
        return futures

    def set_awaited(self, is_awaited: bool) -> None:
        """Whether the actor waits for scores, and leaves its cores, from the next piece of work on."""
        with self._changed:
            self._is_awaited = is_awaited

    def feed(self, name: str, snapshots: Sequence[Rollout]) -> None:
        """Prefill unfinished rollouts, as they were when the snapshots were made."""
        with self._changed:
            self._feeds[name].update((rollout.key, rollout) for rollout in snapshots)
            self._changed.notify_all()

    def forget(self, name: str, keys: Sequence[RolloutKey] | None) -> None:
        """Drop what was fed; returns when the thread is at work on nothing of it."""
        with self._changed:
            feeds = self._feeds[name]
            for key in list(feeds) if keys is None else keys:
                feeds.pop(key, None)
            self._num_forgetting += 1  # else a thread that has more to do would not pause
            try:
                self._changed.wait_for(lambda: not self._is_busy)
                scorer = self._scorers[name]
                if isinstance(scorer, StreamingScorer):
                    with _synchronised(_cuda_device(self._scorers)):  # rows move on the caller's stream
                        scorer.forget(keys)
            finally:
                self._num_forgetting -= 1
                self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """Whether the thread is at work, or has work."""
        with self._changed:
            return self._is_busy or self._has_work

    def check(self) -> None:
        """Raise what a feed raised, or the end of the thread; a submission's failure is its futures' exception."""
        with self._changed:
            if self._failure is not None:
                raise self._failure

    def take_spans(self) -> list[Span]:
        """What was done since the last call."""
        return self._spans.take()

    def close(self) -> None:
        """Cancel what has not begun and wait some seconds for what runs; safe to call twice."""
        with self._changed:
            self._is_closed = True
            for submission in self._submissions:
                for future in submission.futures:
                    future.cancel()
            self._submissions = []
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            with _side_stream(self._scorers) as wait_for_weights:
                self._serve(wait_for_weights)
        except BaseException as error:  # nobody else would hear of it, and whoever waits would wait forever
            self._die(error)
            if self._on_work is not None:
                self._on_work()

    def _serve(self, wait_for_weights: Callable[[], None]) -> None:
        threads = None
        while (work := self._next()) is not None:
            name, submissions, feeds = work
            wanted = self._num_threads_awaited if self._is_awaited else self._num_threads
            if wanted is not None and wanted != threads:
                torch.set_num_threads(wanted)  # of this thread only
                threads = wanted
            if getattr(self._scorers[name], "follows_weights", False):
                wait_for_weights()
            if submissions:
                self._score(name, submissions)
            else:
                self._feed(name, feeds)
            self._rest()
            if self._on_work is not None:
                self._on_work()

    def _next(self) -> tuple[str, list[_Submission], list[Rollout]] | None:
        """The next piece of work, or None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (self._has_work and not self._num_forgetting))
            if self._is_closed:
                return None
            self._is_busy = True
            if self._submissions:
                first = self._submissions[0]
                is_merged = _call_per(self._scorers[first.name]) == "response"
                self._running = [
                    s for s in self._submissions if s is first or (is_merged and s.name == first.name)
                ]
                self._submissions = [s for s in self._submissions if s not in self._running]
                return first.name, self._running, []
            name = next(name for name, feeds in self._feeds.items() if feeds)
            snapshots = list(self._feeds.pop(name).values())
            self._feeds[name] = {}  # at the end: the others have their turn before
            return name, [], snapshots

    def _rest(self) -> None:
        with self._changed:
            self._running = []
            self._is_busy = False
            self._changed.notify_all()

    @property
    def _has_work(self) -> bool:
        return bool(self._submissions) or any(self._feeds.values())

    def _score(self, name: str, submissions: list[_Submission]) -> None:
        rollouts = [rollout for submission in submissions for rollout in submission.rollouts]
        futures = [future for submission in submissions for future in submission.futures]
        if begin(futures):
            with self._recorded(f"score {name}", self._scorers[name]):
                outcome = outcome_of(self._scorers[name], rollouts)
            settle(futures, outcome)

    def _feed(self, name: str, snapshots: list[Rollout]) -> None:
        scorer: Any = self._scorers[name]
        with self._recorded(f"feed {name}", scorer):
            try:
                scorer.feed(snapshots)
            except BaseException as error:
                with self._changed:
                    self._failure = self._failure or as_failure(name, error)

    @contextmanager
    def _recorded(self, span_name: str, scorer: Any) -> Iterator[None]:
        start_s, before = self._clock.now_s(), getattr(scorer, "num_tokens_read", 0)
        yield
        num_tokens = getattr(scorer, "num_tokens_read", 0) - before
        span = Span(self._lane, span_name, start_s, self._clock.now_s(), num_tokens)
        self._spans.add(span)

    def _die(self, error: BaseException) -> None:
        failure = PartFailedError(f"the thread of the {self._lane} ended: {error!r}")
        failure.__cause__ = error
        with self._changed:
            self._is_closed, self._is_busy = True, False
            self._failure = self._failure or failure
            left = [
                future
                for submission in (*self._running, *self._submissions)
                for future in submission.futures
                if not future.done()
            ]
            self._running, self._submissions = [], []
            self._changed.notify_all()
        begin([future for future in left if not future.running()])
        settle(left, failure)


def begin(futures: Sequence[Future[Score | None]]) -> bool:
    """Mark them as running; returns whether anybody still wants one of them."""
    return any([future.set_running_or_notify_cancel() for future in futures])


def outcome_of(scorer: Scorer, rollouts: Sequence[Rollout]) -> list[Score | None] | Exception:
    """One score per rollout, or what went wrong."""
    try:
        scores = scorer.score(rollouts)
        if len(scores) != len(rollouts):
            return PartFailedError(
                f"scorer {scorer.name!r} returned {len(scores)} scores for {len(rollouts)} rollouts; one each is needed"
            )
        return [_number(scorer.name, score) for score in scores]
    except BaseException as error:
        return as_failure(scorer.name, error)


def settle(futures: Sequence[Future[Score | None]], outcome: list[Score | None] | Exception) -> None:
    """Hand the outcome to those who wait."""
    for index, future in enumerate(futures):
        if future.cancelled():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome[index])


def as_failure(name: str, error: BaseException) -> Exception:
    """An error that is heard: an exit would end its thread in silence, or the training as if it were complete."""
    if isinstance(error, Exception):
        return error
    failure = PartFailedError(f"scorer {name!r} raised {error!r}")
    failure.__cause__ = error
    return failure


def closed_error(name: str) -> PartFailedError:
    """Of a submission that comes too late."""
    return PartFailedError(f"the placement of scorer {name!r} is closed; build a new engine")


def _number(name: str, score: Any) -> Score | None:
    """As plain numbers, which cost nothing to send and keep no tensor alive."""
    if score is None:
        return None
    try:
        if isinstance(score, list):
            return [float(number) for number in score]
        if not isinstance(score, str | bytes):
            return float(score)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise PartFailedError(
        f"scorer {name!r} returned a score of type {type(score).__name__}; "
        "a score is a number, a list of one number a token, or None to abstain"
    )


def _call_per(scorer: Scorer) -> CallPer:
    return getattr(scorer, "call_per", "response")


def _cuda_device(scorers: Mapping[str, Any]) -> torch.device | None:
    """Where the first parameter on a GPU is."""
    modules = (getattr(scorer, "module", None) for scorer in scorers.values())
    parameters = (parameter for module in modules if module is not None for parameter in module.parameters())
    return next((parameter.device for parameter in parameters if parameter.is_cuda), None)


@contextmanager
def _synchronised(device: torch.device | None) -> Iterator[None]:
    """All streams of a GPU have done their work before the block, and the block's before they go on."""
    if device is not None:
        torch.cuda.synchronize(device)
    yield
    if device is not None:
        torch.cuda.synchronize(device)


@contextmanager
def _side_stream(scorers: Mapping[str, Any]) -> Iterator[Any]:
    """On a GPU a stream of this thread's own; yields what makes it wait for the weights of the default stream."""
    device = _cuda_device(scorers)
    if device is None:
        yield lambda: None
        return
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield lambda: stream.wait_stream(torch.cuda.default_stream(device))
