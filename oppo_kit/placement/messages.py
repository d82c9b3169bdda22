"""What a scoring process says to its parent. Requests are tuples: a kind, a scorer's name, and the call's arguments."""

from __future__ import annotations

import traceback
from typing import Any, NamedTuple

from oppo_kit import errors
from oppo_kit.errors import OppoError, PartFailedError
from oppo_kit.types import Score, Span


class Failure(NamedTuple):
    """An error on its way through the pipe; some exceptions cannot be pickled.

    Attributes:
        name: of the nearest class of ours, or of its own class.
        words: of the exception.
        trace: where it was raised, unless the exception is ours.
    """

    name: str
    words: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Whatever was raised."""
        for error_class in type(error).__mro__:
            if getattr(errors, error_class.__name__, None) is error_class:
                return cls(error_class.__name__, str(error), "")
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


class Results(NamedTuple):
    """What the child says.

    Attributes:
        scores: or failures, by the submissions' numbers.
        spans: what was done since the last time.
        failure: what else went wrong.
        num_feeds_read: of all feeds that were sent, those that no work is left of.
    """

    scores: list[tuple[int, Score | None, Failure | None]]
    spans: list[Span]
    failure: Failure | None
    num_feeds_read: int = 0


def rebuilt(failure: Failure) -> OppoError:
    """An error of ours with its class and words; anything else failed a part."""
    error_class: Any = getattr(errors, failure.name, None)
    if isinstance(error_class, type) and issubclass(error_class, OppoError):
        return error_class.__new__(error_class, failure.words)  # some have an __init__ that makes the words
    error = PartFailedError(f"{failure.name}: {failure.words}")
    error.add_note(f"in the scoring process:\n{failure.trace}")
    return error
