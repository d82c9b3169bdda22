"""One thread that works for one or several scorers, so that scoring overlaps with decoding.

Waits for: submissions and feeds. Unblocked by: ``submit``, ``feed``, ``close``. Submissions come first, since a step
waits for them; all that wait for one scorer are one call. A feed that is not read yet is replaced by a later one of the
same rollout, so a slow scorer reads larger chunks instead of falling behind.

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
from oppo_kit.protocols import Clock, Scorer, StreamingScorer
from oppo_kit.telemetry.clock import MonotonicClock
from oppo_kit.types import Rollout, RolloutKey, Score, Span


@dataclass(slots=True)
class _Submission:
    name: str
    rollouts: list[Rollout]
    futures: list[Future[Score | None]]
    is_awaited: bool


class ScoringWorker:
    """See the module.

    Args:
        scorers: by name; nobody else uses them.
        lane: of the spans.
        num_threads: CPU threads while the actor decodes; None: as the process has it.
        num_threads_awaited: CPU threads for a submission that somebody waits for.
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
        self._is_closed = False
        self._submissions: list[_Submission] = []
        self._feeds: dict[str, dict[RolloutKey, Rollout]] = {name: {} for name in scorers}
        self._failure: Exception | None = None
        self._spans: list[Span] = []
        self._thread = threading.Thread(target=self._run, name=f"oppo-{lane}", daemon=True)
        self._thread.start()

    def submit(
        self, name: str, rollouts: Sequence[Rollout], *, is_awaited: bool = False
    ) -> list[Future[Score | None]]:
        """Score ended rollouts; their tokens are not changed any more, so they are not copied."""
        futures: list[Future[Score | None]] = [Future() for _ in rollouts]
        with self._changed:
            if self._is_closed:
                raise PartFailedError(f"the placement of scorer {name!r} is closed; build a new engine")
            for rollout in rollouts:
                self._feeds[name].pop(rollout.key, None)
            self._submissions.append(_Submission(name, list(rollouts), futures, is_awaited))
            self._changed.notify_all()
        return futures

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
            self._changed.wait_for(lambda: not self._is_busy)
            scorer = self._scorers[name]
            if isinstance(scorer, StreamingScorer):
                scorer.forget(keys)

    def check(self) -> None:
        """Raise what a feed raised; a submission's failure is its futures' exception."""
        with self._changed:
            if self._failure is not None:
                raise self._failure

    def take_spans(self) -> list[Span]:
        """What was done since the last call."""
        with self._changed:
            spans, self._spans = self._spans, []
        return spans

    def close(self) -> None:
        """Cancel what has not begun and wait for what runs; safe to call twice."""
        with self._changed:
            self._is_closed = True
            for submission in self._submissions:
                for future in submission.futures:
                    future.cancel()
            self._submissions = []
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        with _side_stream(self._scorers) as wait_for_weights:
            threads = None
            while (work := self._next()) is not None:
                name, submissions, feeds = work
                is_awaited = any(submission.is_awaited for submission in submissions)
                wanted = self._num_threads_awaited if is_awaited else self._num_threads
                if wanted is not None and wanted != threads:
                    torch.set_num_threads(wanted)  # of this thread only
                    threads = wanted
                if getattr(self._scorers[name], "follows_weights", False):
                    wait_for_weights()
                self._work(name, submissions, feeds)
                if self._on_work is not None:
                    self._on_work()

    def _next(self) -> tuple[str, list[_Submission], list[Rollout]] | None:
        """The next piece of work, or None at the end."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_closed or self._submissions or any(self._feeds.values()))
            if self._is_closed:
                return None
            self._is_busy = True
            if self._submissions:
                name = self._submissions[0].name
                chosen = [submission for submission in self._submissions if submission.name == name]
                self._submissions = [s for s in self._submissions if s.name != name]
                return name, chosen, []
            name = next(name for name, feeds in self._feeds.items() if feeds)
            snapshots = list(self._feeds[name].values())
            self._feeds[name] = {}
            return name, [], snapshots

    def _work(self, name: str, submissions: list[_Submission], feeds: list[Rollout]) -> None:
        scorer: Any = self._scorers[name]
        start_s, before = self._clock.now_s(), getattr(scorer, "num_tokens_read", 0)
        if submissions:
            score_into(
                scorer,
                [rollout for submission in submissions for rollout in submission.rollouts],
                [future for submission in submissions for future in submission.futures],
            )
        else:
            try:
                scorer.feed(feeds)
            except Exception as error:
                with self._changed:
                    self._failure = error
        num_tokens = getattr(scorer, "num_tokens_read", 0) - before
        kind = "score" if submissions else "feed"
        span = Span(self._lane, f"{kind} {name}", start_s, self._clock.now_s(), num_tokens)
        with self._changed:
            self._spans.append(span)


def score_into(scorer: Scorer, rollouts: Sequence[Rollout], futures: Sequence[Future[Score | None]]) -> None:
    """Score and settle the futures; whatever goes wrong becomes their exception."""
    live = [future.set_running_or_notify_cancel() for future in futures]
    try:
        scores = _scores(scorer, rollouts)
    except (Exception, SystemExit) as error:
        # An exit would end this thread, or the training as if it were complete.
        is_exit = isinstance(error, SystemExit)
        failure = PartFailedError(f"scorer {scorer.name!r} called sys.exit({error})") if is_exit else error
        for future, is_live in zip(futures, live, strict=True):
            if is_live:
                future.set_exception(failure)
        return
    for future, score, is_live in zip(futures, scores, live, strict=True):
        if is_live:
            future.set_result(score)


def _scores(scorer: Scorer, rollouts: Sequence[Rollout]) -> list[Score | None]:
    scores = scorer.score(rollouts)
    if len(scores) != len(rollouts):
        raise PartFailedError(
            f"scorer {scorer.name!r} returned {len(scores)} scores for {len(rollouts)} rollouts; one each is needed"
        )
    return scores


@contextmanager
def _side_stream(scorers: Mapping[str, Any]) -> Iterator[Any]:
    """On a GPU a stream of this thread's own; yields what makes it wait for the weights of the default stream."""
    modules = (getattr(scorer, "module", None) for scorer in scorers.values())
    devices = [next(module.parameters()).device for module in modules if module is not None]
    device = next((device for device in devices if device.type == "cuda"), None)
    if device is None:
        yield lambda: None
        return
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield lambda: stream.wait_stream(torch.cuda.default_stream(device))
