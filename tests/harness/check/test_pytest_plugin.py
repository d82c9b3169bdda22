"""The fixture is there wherever oppo-kit is installed, fails as the function does, and the verdicts are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_results import make_pair, save

pytest_plugins = ["pytester"]

TESTS = """
from pathlib import Path

HERE = Path({folder!r})


def test_same(assert_equivalent):
    assert_equivalent(HERE / "same", HERE / "reference")


def test_other(assert_equivalent):
    assert_equivalent(HERE / "other", HERE / "reference", margin=0.05)


def test_neither():
    pass
"""


@pytest.mark.parametrize("arguments", [[], ["-n", "2"]], ids=["one process", "two workers"])
def test_verdicts_of_tests_that_passed_and_failed_stand_in_the_summary(
    arguments: list[str], pytester: pytest.Pytester, tmp_path: Path
) -> None:
    same, reference = make_pair((0.0, 0.01, 0.02, -0.01))
    other, _ = make_pair((-0.1, -0.09, -0.08, -0.11))
    for name, result in {"same": same, "other": other, "reference": reference}.items():
        save(result, tmp_path / "results" / name)
    pytester.makepyfile(TESTS.format(folder=str(tmp_path / "results")))
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)
    done.assert_outcomes(passed=2, failed=1)
    done.stdout.fnmatch_lines(
        [
            "*AssertionError: Different: *",
            "*= convergence =*",
            "*::test_same: Equivalent: *",
            "*::test_other: Different: *",
        ]
    )


def test_nothing_is_told_where_nothing_was_compared(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_neither():\n    pass\n")
    assert "convergence" not in pytester.runpytest_subprocess("-p", "no:cacheprovider").stdout.str()
