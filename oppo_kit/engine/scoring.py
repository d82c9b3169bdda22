"""Asks the scorers, waits for the scores of chosen groups, and says which groups cannot be trained.

Waits for: the futures of the placements. Unblocked by: a result, an exception or a death that the placement turns
into one. Knows nothing of how a scorer works or where it runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack, contextmanager

from oppo_kit.engine.buffer import Ended
from oppo_kit.errors import OppoError, PartFailedError
from oppo_kit.protocols import ScorerHandle
from oppo_kit.types import Group, Rollout, RolloutKey, Score, Span

ABSTAINED = "abstained"
NON_FINITE_SCORE = "non_finite_score"
# Scores that a group of several responses needs: one alone compares with nothing.
MIN_SCORES = 2
FLOAT32_MAX = 3.4028234663852886e38
# Between two looks at parts that nobody waits for: how long the death of one may go unheard.
_LOOK_S = 0.5


class ScoringDesk:
    """One per engine. Every ended rollout is submitted once to every scorer, however often it is considered.

    The exception is a scorer that is called per batch: it is asked anew when the batch is another one.
    """

    def __init__(self, handles: Mapping[str, ScorerHandle]) -> None:
        self._handles = dict(handles)
        self._pending: dict[tuple[RolloutKey, str], Future[Score | None]] = {}
        # The draws that a scorer called per batch has scored together.
        self._batches: dict[str, list[int]] = {}

    def feed(self, rollouts: Sequence[Rollout]) -> None:
        """Hand unfinished rollouts to the scorers that can read them."""
        for name, handle in self._handles.items():
            if handle.can_stream:
                with _named(name):
                    handle.feed(rollouts)

    def submit_ended(self, ended: Ended) -> None:
        """Start scoring what ended, as far as a scorer needs nothing else beside it."""
        for name, handle in self._handles.items():
            if handle.call_per == "batch" or handle.follows_weights:
                continue
            if handle.call_per == "response":
                self._submit(name, ended.rollouts)
                continue
            for group in ended.groups:
                self._submit_together(name, group.rollouts)

    def settle(self, groups: Sequence[Group]) -> dict[int, str]:
        """Wait for all scores of these groups and store them; returns the rejected draws with their reason.

        Raises:
            PartFailedError: a scorer raised, died or returned something that does not fit its rollouts.
        """
        self._set_awaited(True)
        try:
            for name, handle in self._handles.items():
                if handle.call_per == "batch":
                    self._submit_batch(name, groups)
                elif handle.call_per == "group":
                    for group in groups:
                        self._submit_together(name, group.rollouts)
                else:
                    self._submit(name, [r for group in groups for r in group.rollouts])
            self._wait(groups)
            return self._store_all(groups)
        finally:
            self._set_awaited(False)

    @property
    def is_busy(self) -> bool:
        """Whether a scorer computes beside the engine."""
        return any(handle.is_busy for handle in self._handles.values())

    def check(self) -> None:
        """Raise what went wrong in a part, without waiting for anything.

        Raises:
            PartFailedError: a scorer raised or died.
        """
        for name, handle in self._handles.items():
            with _named(name):
                handle.check()
        for (key, name), future in list(self._pending.items()):
            if future.done() and not future.cancelled() and future.exception() is not None:
                del self._pending[key, name]  # so that whoever goes on asks again
                self._result(name, key, future)

    def forget(self, group: Group) -> None:
        """Drop what is pending or was fed of a group that will not be trained."""
        keys = [rollout.key for rollout in group.rollouts]
        for name, handle in self._handles.items():
            for key in keys:
                future = self._pending.pop((key, name), None)
                if future is not None:
                    future.cancel()
            if handle.can_stream:
                handle.forget(keys)

    def before_update(self, groups: Iterable[Group]) -> None:
        """Scorers of the weights under training stop reading them; what they said of groups still held is void."""
        followers = [name for name, handle in self._handles.items() if handle.follows_weights]
        for name in followers:
            self._handles[name].forget(None)
            for group in groups:
                for rollout in group.rollouts:
                    rollout.scores.pop(name, None)
                    self._pending.pop((rollout.key, name), None)

    def reset(self) -> None:
        """Forget which batches were scored together: the engine goes on from another state."""
        self._batches.clear()

    def take_spans(self) -> list[Span]:
        """What all scorers did since the last call."""
        return [span for handle in self._handles.values() for span in handle.take_spans()]

    def close(self) -> None:
        """Close every placement, also when one of them cannot be."""
        with ExitStack() as stack:
            for handle in self._handles.values():
                stack.callback(handle.close)

    def _set_awaited(self, is_awaited: bool) -> None:
        for handle in self._handles.values():
            handle.set_awaited(is_awaited)

    def _wait(self, groups: Sequence[Group]) -> None:
        """Until all scores of these groups are there, or anything goes wrong anywhere."""
        keys = [
            (rollout.key, name) for group in groups for rollout in group.rollouts for name in self._handles
        ]
        waiting = {self._pending[key] for key in keys if key in self._pending}
        while waiting:
            _, waiting = wait(waiting, timeout=_LOOK_S, return_when=FIRST_EXCEPTION)
            self.check()

    def _store_all(self, groups: Sequence[Group]) -> dict[int, str]:
        rejections: dict[int, str] = {}
        for group in groups:
            for name in self._handles:
                if reason := self._store_group(name, group):
                    rejections.setdefault(group.draw_id, reason)
        return rejections

    def _store_group(self, name: str, group: Group) -> str | None:
        """Why the group cannot be trained: a score that is no number, or too few to compare."""
        reason = None
        for rollout in group.rollouts:
            future = self._pending.pop((rollout.key, name), None)
            if future is not None and not self._store(name, rollout, future):
                reason = NON_FINITE_SCORE
        num_scored = sum(rollout.scores[name] is not None for rollout in group.rollouts)
        if num_scored < min(MIN_SCORES, len(group.rollouts)):
            reason = reason or f"{name}_{ABSTAINED}"
        return reason

    def _submit(self, name: str, rollouts: Sequence[Rollout]) -> None:
        """Those that are neither scored nor submitted."""
        todo = [r for r in rollouts if (r.key, name) not in self._pending and name not in r.scores]
        if todo:
            futures = self._handles[name].submit(todo)
            self._pending.update(
                {(rollout.key, name): future for rollout, future in zip(todo, futures, strict=True)}
            )

    def _submit_together(self, name: str, rollouts: Sequence[Rollout]) -> None:
        """All or none of them, since a score depends on the others; after a failure some are scored already."""
        if all(name in r.scores or (r.key, name) in self._pending for r in rollouts):
            return
        for rollout in rollouts:
            rollout.scores.pop(name, None)
            self._pending.pop((rollout.key, name), None)
        self._submit(name, rollouts)

    def _submit_batch(self, name: str, groups: Sequence[Group]) -> None:
        """Scores that were made beside other groups are void."""
        draws = [group.draw_id for group in groups]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if self._batches.get(name) != draws:
            for rollout in rollouts:
                rollout.scores.pop(name, None)
                self._pending.pop((rollout.key, name), None)
        self._submit_together(name, rollouts)
        self._batches[name] = draws

    def _store(self, name: str, rollout: Rollout, future: Future[Score | None]) -> bool:
        """Whether what the scorer says is finite, or nothing."""
        score = self._result(name, rollout.key, future)
        rollout.scores[name] = None if score is None else _checked(name, rollout, score)
        return score is None or _is_finite(score)

    def _result(self, name: str, key: RolloutKey, future: Future[Score | None]) -> Score | None:
        try:
            return future.result()
        except OppoError as error:
            error.add_note(f"raised by scorer {name!r} while draw {key.draw_id} waited for its score")
            raise
        except Exception as error:
            raise PartFailedError(
                f"scorer {name!r} failed while draw {key.draw_id} waited for its score: "
                f"{type(error).__name__}: {error}; the cause stands above"
            ) from error


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Say which scorer it was."""
    try:
        yield
    except OppoError:
        raise
    except Exception as error:
        raise PartFailedError(
            f"scorer {name!r} failed while it read unfinished responses: {type(error).__name__}: {error}; "
            "the cause stands above"
        ) from error


def _checked(name: str, rollout: Rollout, score: Score) -> Score:
    if isinstance(score, list):
        if len(score) != len(rollout.token_ids):
            raise PartFailedError(
                f"scorer {name!r} returned {len(score)} numbers for draw {rollout.key.draw_id}, "
                f"whose response has {len(rollout.token_ids)} tokens"
            )
        return score
    return float(score)


def _is_finite(score: Score) -> bool:
    """Finite also as float32, which is what a batch is made of."""
    numbers = score if isinstance(score, list) else [score]
    return all(math.isfinite(number) and abs(number) <= FLOAT32_MAX for number in numbers)
