"""Turns whatever a part raises into an error of ours that names the part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from oppo_kit.errors import OppoError, PartFailedError
from oppo_kit.types import Group


@contextmanager
def named_failure(part: str, step: int, groups: Sequence[Group]) -> Iterator[None]:
    """Around a call into a part, which may be working on some groups; errors of ours pass.

    Raises:
        PartFailedError: whatever else the part raised.
    """
    try:
        yield
    except OppoError:
        raise
    except Exception as error:
        draws = f" on draws {[group.draw_id for group in groups]}" if groups else ""
        raise PartFailedError(
            f"the {part} failed in step {step}{draws}: {type(error).__name__}: {error}"
        ) from error
