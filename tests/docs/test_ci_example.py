"""docs/ci.md: the workflow is one that GitHub would run, its commands exist, and its snippet of a test works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from check_results import make_pair, save

from harness.check.seeds import main as plan_seeds
from harness.cli import app
from oppo_kit.installation import main

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "ci.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def workflow_scripts() -> list[str]:
    [workflow] = [yaml.safe_load(block) for block in blocks("yaml")]
    return [step["run"] for step in workflow["jobs"]["check"]["steps"] if "run" in step]


def commands(program: str) -> list[list[str]]:
    """Arguments of every call of a program, in the workflow and in the text; continued lines are one."""
    lines = [line for block in [*workflow_scripts(), *blocks("bash")] for line in joined(block).splitlines()]
    words = [shlex.split(line) for line in lines]
    return [line[1:] for line in words if line and Path(line[0]).name == program]


def joined(script: str) -> str:
    return re.sub(r"\\\n\s*", "", script)


def parse(arguments: list[str]) -> None:
    """Refuses what the command line would refuse, without running it."""
    command: Any = typer.main.get_command(app)
    name, *rest = arguments
    command.commands[name].make_context(name, rest)


def test_the_workflow_has_the_shape_that_github_reads() -> None:
    [workflow] = [yaml.safe_load(block) for block in blocks("yaml")]
    # YAML 1.1 reads the key `on` as true, which GitHub does not.
    assert workflow.keys() == {"name", True, "jobs"}
    assert workflow[True] == "pull_request"
    for job in workflow["jobs"].values():
        assert job.keys() <= {"runs-on", "timeout-minutes", "steps"}
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            assert step.keys() <= {"uses", "run", "name", "with", "if"}
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "actions/checkout@v4"))


@pytest.mark.parametrize("script", workflow_scripts())
def test_every_script_of_the_workflow_is_bash(script: str) -> None:
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_every_oppo_kit_command_has_options_that_exist() -> None:
    called = commands("oppo-kit")
    assert {arguments[0] for arguments in called} == {"bench", "check"}
    for arguments in called:
        parse(arguments)
    with pytest.raises(Exception, match="No such option: --margni"):
        parse(["check", "runs/now", "--against", "runs/then", "--margni", "1"])


def test_the_workflow_checks_what_it_trained() -> None:
    called = {arguments[0]: arguments for arguments in commands("oppo-kit") if "runs/now" in arguments}
    trained = called["bench"][called["bench"].index("--runners") + 1].split(",")
    checked = [
        called["check"][called["check"].index(name) + 1] for name in ("--runner", "--reference-runner")
    ]
    assert called["bench"][called["bench"].index("--out") + 1] == "runs/now"
    assert sorted(trained) == sorted(checked)


def test_the_make_targets_exist() -> None:
    targets = [arguments[0] for arguments in commands("make")]
    assert targets == ["venv"]
    assert re.search(r"^venv:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def test_the_seeds_can_be_planned_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    [line] = [
        line for block in blocks("bash") for line in block.splitlines() if "harness.check.seeds" in line
    ]
    monkeypatch.chdir(ROOT)
    arguments = shlex.split(line)[3:]
    assert arguments[-2] == "--out"
    assert plan_seeds([*arguments[:-1], str(tmp_path / "plan")]) == 0
    assert "seeds, by score" in capsys.readouterr().out
    assert (tmp_path / "plan" / "seeds.json").exists()


def test_the_first_check_can_be_run_as_shown(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    [arguments] = [found for found in commands("oppo-kit") if found[:2] == ["check", "results/grpo-tiny"]]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["oppo-kit", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert "Equivalent: both learned as sequential did" in " ".join(capsys.readouterr().out.split())


def test_what_documents_link_to_is_there() -> None:
    for document in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("*/README.md"),
        *ROOT.glob("results/*/README.md"),
    ]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_snippet_of_a_test_runs(pytester: pytest.Pytester) -> None:
    run, reference = make_pair((0.0, 0.01, 0.02, -0.01))
    reference.runners["sequential"] = reference.runners.pop("trl")
    reference.runners["sequential"].name = "sequential"
    save(run, pytester.path / "runs" / "now")
    save(reference, pytester.path / "results" / "reference")
    [snippet] = blocks("python")
    pytester.makepyfile(snippet)
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines(["*Equivalent: both learned as sequential did*"])
