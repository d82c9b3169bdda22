"""The body of ``oppo-kit check``: compare, print, write, and say how the process ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

from rich.console import Console

from harness.check.equivalence import compare
from harness.check.pairing import By
from harness.check.report import markdown_of, sentence_of, terminal_table
from harness.folders import write_atomically
from oppo_kit.errors import ConfigError, OppoError

EXIT_CODES = {"equivalent": 0, "different": 1, "undecided": 2}
# 2, as other commands end after bad input, is a verdict here.
BAD_INPUT = 3


def run_check(
    run: Path,
    against: Path,
    *,
    runner: str | None,
    reference_runner: str | None,
    margin: str,
    by: str,
    markdown: Path | None,
    figure: Path | None,
    console: Console,
) -> int:
    """Compare and print; write what is asked for.

    Returns:
        the exit code: 0 equivalent, 1 different, 2 cannot tell, 3 after one of our errors, which is printed.
    """
    try:
        share = parse_margin(margin)
        found = compare(
            run, against, runner=runner, reference_runner=reference_runner, margin=share, by=cast(By, by)
        )
        if markdown is not None:
            _writable("--markdown", markdown)
            write_atomically(markdown, markdown_of(found))
        if figure is not None:
            from harness.check.figure import write_figure

            _writable("--figure", figure)
            write_figure(found, figure)
    except OppoError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    console.print(terminal_table(found))
    console.print(sentence_of(found), markup=False, soft_wrap=True)
    return EXIT_CODES[found.verdict]


def parse_margin(text: str) -> float:
    """A share of the reference's gain: ``10%`` or ``0.1``.

    Raises:
        ConfigError: it is no number.
    """
    number = text.strip().removesuffix("%")
    try:
        return float(number) / (100 if number != text.strip() else 1)
    except ValueError as error:
        raise ConfigError(
            f"--margin {text!r} is no number; pass a share of the reference's gain such as 10% or 0.1"
        ) from error


def _writable(option: str, file: Path) -> None:
    """Make the file's folder, and be sure that the file can be written: a verdict of 1 must not be a broken path."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write {option} {file}: {error.strerror}; pass another file") from error
