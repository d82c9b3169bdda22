"""``oppo-kit check`` as a user meets it: exit codes, what is printed, what is written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from check_results import REFERENCE, make_checked, make_pair, save

from oppo_kit.installation import main

Check = Callable[..., tuple[int, str, str]]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Check:
    """The command in this process, in a folder with the results run and reference of given final differences."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def call(final_differences: tuple[float, ...], *options: str) -> tuple[int, str, str]:
        for name, result in zip(("run", "reference"), make_pair(final_differences), strict=True):
            save(result, tmp_path / name)
        arguments = ["oppo-kit", "check", "run", "--against", "reference", *options]
        monkeypatch.setattr(sys, "argv", arguments)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, printed.out, printed.err

    return call


@pytest.mark.parametrize(
    ("final_differences", "code", "words"),
    [
        ((0.0, 0.01, 0.02, -0.01), 0, "Equivalent: both learned as trl did, to within 10 % of its gain: "),
        ((-0.1, -0.09, -0.08, -0.11), 1, "Different: both did not learn as trl did: its final held-out scor"),
        ((0.1, -0.1, 0.05, -0.05), 2, "Cannot tell: whether both learned as trl did stays open: its final"),
        ((0.0,), 2, "one seed shows no spread, so run at least 2 seeds on both sides"),
    ],
)
def test_the_exit_code_is_the_verdict(
    check: Check, final_differences: tuple[float, ...], code: int, words: str
) -> None:
    found, out, err = check(final_differences)
    assert (found, err) == (code, "")
    assert words in out
    assert "margin, 10 % of the gain" in out
    assert "seed 0" in out


def test_accuracy_is_compared_on_request(check: Check) -> None:
    _, out, _ = check((0.0, 0.01, 0.02, -0.01), "--by", "accuracy")
    assert "its final held-out accuracy lay 0.50 points above" in " ".join(out.split())


@pytest.mark.parametrize("margin", ["0.4", "40%", " 40 % "])
def test_a_wider_margin_lets_more_pass(check: Check, margin: str) -> None:
    code, out, _ = check((-0.1, -0.09, -0.08, -0.11), "--margin", margin)
    assert (code, "margin, 40 % of the gain" in out) == (0, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--margin", "2"), "error: margin=2.0 must be a share of the reference's gain"),
        (("--margin", "50"), "for example 0.1 or 10%; 50 percent is 50%"),
        (("--runner", "bth"), "error: unknown runner of the run 'bth'; did you mean 'both'?"),
        (("--reference-runner", "both"), "error: unknown runner of the reference 'both'"),
        (
            ("--margin", "wide"),
            "error: --margin 'wide' is no number; pass a share of the reference's gain such as",
        ),
        (("--by", "acuracy"), "error: unknown held-out value 'acuracy'; did you mean 'accuracy'?"),
        (("--margni", "0.2"), "No such option: --margni"),
        (("--markdown", "run"), "error: cannot write --markdown run: Is a directory; pass another file"),
        (("--figure", "run/result.json/a.png"), "error: cannot write --figure run/result.json/a.png: "),
    ],
)
def test_bad_input_ends_with_3_which_is_no_verdict(
    check: Check, options: tuple[str, ...], words: str
) -> None:
    code, out, err = check((0.0, 0.0), *options)
    assert (code, out) == (3, "")
    assert words in err
    assert "Traceback" not in err


def test_results_of_other_work_end_with_3(check: Check, tmp_path: Path) -> None:
    other = make_checked([REFERENCE] * 2, runner="trl")
    other.workload.batch_size = 64
    save(other, tmp_path / "other")
    code, out, err = check((0.0, 0.0), "--against", "other")
    assert (code, out) == (3, "")
    assert "error: not the same work: workload.batch_size is 4 in the run, 64 in the reference" in err


def test_a_missing_option_ends_with_3(check: Check, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["oppo-kit", "check", "run"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 3
    assert "Missing option '--against'" in capsys.readouterr().err


def test_the_help_names_the_exit_codes(check: Check) -> None:
    code, out, _ = check((0.0, 0.0), "--help")
    assert code == 0
    assert "Exit code 0: yes; 1: no; 2: cannot tell; 3: not comparable, or bad input." in " ".join(
        out.split()
    )


def test_markdown_and_figure_are_written_where_asked_whatever_the_verdict(
    check: Check, tmp_path: Path
) -> None:
    code, _, _ = check(
        (-0.1, -0.09, -0.08, -0.11), "--markdown", "new/comment.md", "--figure", "new/curves.png"
    )
    assert code == 1
    text = (tmp_path / "new" / "comment.md").read_text(encoding="utf-8")
    assert text.startswith("### Convergence of both against trl: different\n\nDifferent: both did not learn")
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == ["comment.md", "curves.png"]
