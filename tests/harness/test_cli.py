"""The command line as a user meets it: exit codes, one-line errors, files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import yaml

from harness.schema import load_result
from oppo_kit.installation import main

SMALL = [
    *("--batch-size", "4", "--set", "sampling.response_length=12", "--set", "overlap.delta=2"),
    *("--set", "algo_config.num_mini_batches=2"),
]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def oppo_kit(monkeypatch, capsys, tmp_path) -> Callable[..., Done]:
    """The command in this process and in an empty folder: what a shell would see, without a second of imports."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["oppo-kit", *arguments])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return call


class KilledError(BaseException):
    """Nobody catches it: as near to a kill as one process can come."""


def refused(done: Done) -> str:
    """The one-line error; anything else on standard error is a fault."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--algo", "pop"], "unknown algorithm 'pop'; did you mean 'ppo'"),
        (["train", "--model", "tinny"], "unknown model 'tinny'; did you mean 'tiny'"),
        (["train", "--set", "overlap.dleta=3"], "unknown key 'overlap.dleta'; did you mean 'delta'"),
        (["bench", "--runners", "trl,sequentail"], "unknown runner 'sequentail'; did you mean 'sequential'"),
        (["bench", "--set", "overlap.delta=0"], "runner 'both' needs overlap.delta > 0"),
        (["bench", "--steps", "2"], "num_steps=2 leaves nothing to measure after"),
        (["train", "--resume"], "--resume needs --out"),
        (
            ["train", "--resume", "--out", "new"],
            "there is no checkpoint.pt in new: nothing was saved there yet",
        ),
        (
            ["train", "--set", "learner.learning_rate=.inf"],
            "learner.learning_rate = inf: Input should be a finite",
        ),
        (["train", "--seed", "4294967296"], "seed = 4294967296: Input should be less than"),
        (["report", "nowhere"], "cannot read results from nowhere"),
        (["train", "--reward", "nomodule:f"], "nomodule"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(oppo_kit, arguments, message) -> None:
    assert message in refused(oppo_kit(*arguments))


def test_a_model_that_is_not_there_names_what_works_offline(oppo_kit) -> None:
    error = refused(oppo_kit("train", "--model", "qwen2.5-7b"))
    assert "tiny" in error
    assert "folder" in error


def test_help_and_doctor_load_no_algorithm(tmp_path) -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from harness.cli import app\n"
        "runner = CliRunner()\n"
        "for arguments in (['--help'], ['bench', '--help'], ['doctor']):\n"
        "    result = runner.invoke(app, arguments)\n"
        "    assert result.exit_code == 0, result.output\n"
        "    assert 'ppo' in result.output or arguments == ['--help']\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'algorithms']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_train_saves_a_model_resumes_and_refuses_to_mix_runs(oppo_kit, tmp_path) -> None:
    out = tmp_path / "run"
    start = [
        "train",
        *SMALL,
        "--steps",
        "3",
        "--save-every",
        "1",
        "--report-to",
        "tensorboard",
        "--out",
        str(out),
    ]
    done = oppo_kit(*start)
    assert done.returncode == 0, done.stderr
    assert (out / "model" / "config.json").exists()
    assert (out / "model" / "critic" / "config.json").exists()
    assert list(out.rglob("events.out.tfevents*"))
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert {"objective/kl", "policy/approxkl_avg", "val/ratio", "oppo/delta", "oppo/age_mean"} <= set(
        lines[0]
    )
    assert yaml.safe_load((out / "config.yaml").read_text())["batch_size"] == 4

    assert "holds checkpoint.pt already; pass another --out, or (train) --resume" in refused(oppo_kit(*start))
    other = oppo_kit("train", *SMALL, "--steps", "9", "--out", str(out), "--resume")
    assert (
        "another configuration (num_steps: saved 3, now 9); resume with the saved one, or start a"
        in refused(other)
    )
    assert json.loads((out / "steps.jsonl").read_text().splitlines()[0])["oppo/score_at"] == "batch"
    config = yaml.safe_load((out / "config.yaml").read_text())
    del config["backend"], config["vllm"]
    (out / "config.yaml").write_text(yaml.safe_dump(config))
    again = oppo_kit("train", "--out", str(out), "--resume")
    assert again.returncode == 0, again.stderr
    said = " ".join(again.stdout.split())
    assert (
        "all 3 steps of this run were done already; start a longer one from its model with: oppo-kit" in said
    )


def test_a_start_that_failed_leaves_its_folder_free(oppo_kit, tmp_path) -> None:
    start = ["train", *SMALL, "--steps", "1", "--out", "run"]
    assert "tensorbord" in refused(oppo_kit(*start, "--report-to", "tensorbord"))
    assert "nope.jsonl" in refused(oppo_kit(*start, "--dataset", "nope.jsonl"))
    done = oppo_kit(*start)
    assert done.returncode == 0, done.stderr


def test_an_out_that_is_no_folder_is_refused(oppo_kit, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    assert "--out file is a file; pass a folder" in refused(oppo_kit("train", "--out", "file"))
    inside = oppo_kit("train", *SMALL, "--steps", "1", "--out", "file/below")
    assert "cannot make the folder file/below: Not a directory" in refused(inside)


def test_a_resumed_log_has_every_step_once(oppo_kit, tmp_path, monkeypatch) -> None:
    from harness import training

    start = ["train", *SMALL, "--steps", "4", "--save-every", "2", "--out", "run"]
    saved = training.save_checkpoint

    def save_until_killed(folder, engine):
        if engine.num_steps_done == 4:
            raise KilledError
        return saved(folder, engine)

    monkeypatch.setattr(training, "save_checkpoint", save_until_killed)
    with pytest.raises(KilledError):
        oppo_kit(*start)
    with (tmp_path / "run" / "steps.jsonl").open("a") as log:
        log.write('{"step": 4, "half')
    monkeypatch.setattr(training, "save_checkpoint", saved)
    done = oppo_kit(*start, "--resume")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]


def test_an_interrupted_run_says_how_to_go_on(oppo_kit, tmp_path, monkeypatch) -> None:
    from harness import training

    saved = training.save_checkpoint

    def save_and_interrupt(folder, engine):
        saved(folder, engine)
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "save_checkpoint", save_and_interrupt)
    done = oppo_kit("train", *SMALL, "--steps", "3", "--save-every", "1", "--out", "run")
    assert done.returncode == 130
    assert "interrupted after step 1 of 3; go on from the last checkpoint" in " ".join(done.stdout.split())


def test_a_run_that_learns_nothing_does_not_end_as_a_success(oppo_kit, tmp_path) -> None:
    (tmp_path / "huge_rewards.py").write_text(
        "def huge(prompts, completions, **columns):\n    return [(-1) ** i * 3e38 for i in range(len(prompts))]\n"
    )
    arguments = ["train", *SMALL, "--steps", "6", "--reward", "huge_rewards:huge", "--out", "run"]
    assert "the loss was not finite in 3 steps in a row, so nothing is learned" in refused(
        oppo_kit(*arguments)
    )
    assert not (tmp_path / "run" / "model").exists()


def test_a_reward_function_trains_and_a_broken_one_is_named(oppo_kit, tmp_path) -> None:
    (tmp_path / "cli_rewards.py").write_text(
        "def good(prompts, completions, **columns):\n    return [float(len(c)) for c in completions]\n"
        "def bad(prompts, completions, **columns):\n    raise KeyError('answer')\n"
        "def short(prompts, completions, **columns):\n    return [1.0]\n"
        "def silent(prompts, completions, **columns):\n    return [None] * len(prompts)\n"
    )
    base = ["train", *SMALL, "--steps", "1", "--reward"]
    done = oppo_kit(*base, "cli_rewards:good", "--out", "good")
    assert done.returncode == 0, done.stderr
    # Which of the first four responses ends, and so raises, first is not fixed.
    told = refused(oppo_kit(*base, "cli_rewards:bad", "--out", "bad"))
    assert re.search(r"'bad' raised KeyError\('answer'\) on draws [0-3] \(.*cli_rewards.py, line 4\)", told)
    per_batch = ("--set", "reward_call_per=batch")
    assert "returned 1" in refused(oppo_kit(*base, "cli_rewards:short", *per_batch, "--out", "short"))
    assert "were all rejected (reward_abstained)" in refused(
        oppo_kit(*base, "cli_rewards:silent", "--out", "silent")
    )


def test_a_data_set_smaller_than_b_and_delta_wraps_and_says_so(oppo_kit, tmp_path, caplog) -> None:
    """trl#998: no hang, no IndexError."""
    (tmp_path / "few.jsonl").write_text('{"prompt": "1+1"}\n{"prompt": "3-2"}\n{"prompt": "5+3-1"}\n')
    done = oppo_kit("train", *SMALL, "--steps", "2", "--dataset", "few.jsonl", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "epoch 2 of a data set of 3 prompts" in caplog.text


def test_the_quick_benchmark_writes_every_file_and_conserves_every_draw(oppo_kit, tmp_path) -> None:
    pytest.importorskip("trl")
    done = oppo_kit("bench", "--algo", "ppo", "--quick", "--out", "quick")
    assert done.returncode == 0, done.stderr
    result = load_result(tmp_path / "quick")
    assert list(result.runners) == ["trl", "sequential", "both"]
    assert result.is_quick
    assert set(result.ratios) == {"trl/sequential", "trl/both", "sequential/both"}
    assert result.bound is not None
    trained = []
    for runner in result.runners.values():
        [run] = runner.runs
        assert len(run.steps) == 3
        last = run.steps[-1]
        assert last.drawn == last.trained == 24
        assert last.in_flight == last.queued == 0
        trained.append(sum(step.responses_trained for step in run.steps))
        assert [evaluation.step for evaluation in run.evaluations] == [0, 3]
        assert any(series.name == "process/rss_bytes" and series.values for series in run.utilisation)
    assert trained == [24, 24, 24], "the same work"
    first = {run.evaluations[0].accuracy for runner in result.runners.values() for run in runner.runs}
    assert len(first) == 1, "all start from the same policy, prompts and noise"
    files = {file.name for file in (tmp_path / "quick").iterdir()}
    assert {"result.json", "report.md", "reward.png", "step_time.png", "stages.png", "lengths.png"} <= files
    assert "timeline.png" in files
    assert result.runners["both"].runs[0].timeline
    assert "do not quote" in done.stdout
    done = oppo_kit("report", "quick")
    assert done.returncode == 0, done.stderr
