"""docs/evidence.md: every check that it quotes is run on the committed results, and ends as it says."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from oppo_kit.installation import main

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "evidence.md").read_text()
CHECKS = re.findall(r"```bash\n(oppo-kit check [^`]*?)  # exit code (\d)\n```\n\n((?:> [^\n]*\n)+)", TEXT)


def test_all_three_verdicts_are_shown_and_no_check_is_left_out() -> None:
    assert {code for _, code, _ in CHECKS} == {"0", "1", "2"}
    assert len(CHECKS) == len(re.findall(r"^oppo-kit check", TEXT, flags=re.MULTILINE))


@pytest.mark.parametrize(("command", "code", "quote"), CHECKS, ids=[command for command, _, _ in CHECKS])
def test_a_check_ends_as_the_document_says(
    command: str, code: str, quote: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", shlex.split(command.replace("\\\n", "")))
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr()
    assert printed.err == ""
    assert str(end.value.code) == code
    said = " ".join(line.removeprefix("> ") for line in quote.splitlines())
    assert said in " ".join(printed.out.split())
