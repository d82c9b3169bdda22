"""The real clock. Everything else takes one as an argument."""

from __future__ import annotations

import time


class MonotonicClock:
    """Monotonic wall seconds, ``time.perf_counter``."""

    def now_s(self) -> float:
        """Seconds since some fixed moment."""
        return time.perf_counter()
