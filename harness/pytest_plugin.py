"""pytest's fixture ``assert_equivalent``; the verdicts stand in the terminal summary, also of tests that passed.

Found by its entry point wherever oppo-kit is installed, so importing it costs nothing: what compares is imported when a
test asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

_PROPERTY = "convergence"


@pytest.fixture
def assert_equivalent(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """``harness.check.assert_equivalent``, whose sentence is also told at the end of the session."""
    from harness.check import compare, require_equivalent, sentence_of

    def check(*arguments: Any, **options: Any) -> None:
        found = compare(*arguments, **options)
        record_property(_PROPERTY, sentence_of(found))
        require_equivalent(found)

    return check


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A section of its own, if there was anything to compare."""
    lines = list(_verdicts(terminalreporter))
    if lines:
        terminalreporter.section("convergence")
        for line in lines:
            terminalreporter.line(line)


def _verdicts(terminalreporter: Any) -> Iterator[str]:
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, value in getattr(report, "user_properties", ()):
                if name == _PROPERTY and report.when == "call":
                    yield f"{report.nodeid}: {value}"
