"""The package of algorithms/README.md: taken from there as it stands, installed, run, and refused when it is wrong."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.schema import Result, load_result
from oppo_kit import registry
from oppo_kit.errors import ConfigError, UnknownNameError

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "algorithms" / "README.md").read_text()
COMMAND = "from oppo_kit.installation import main; main()"
MODULE, WATCHED = "my_algorithms.running_reinforce", "my_algorithms.watched_reinforce"
# Small, and with one thread: what is asked is whether it runs.
SMALL = shlex.split(
    "--batch-size 4 --steps 3 --set sampling.response_length=16 --set overlap.delta=2 --set overlap.decode_tokens=4"
)
SMALL_BENCH = shlex.split("--pairs 1 --warmup 0 --evaluations 1 --eval-problems 4 --threads 1")
# Python runs this first in every process, the children of a benchmark included: which algorithms were imported?
PROBE = """
import atexit, os, pathlib, sys

def note():
    names = [name for name in sys.modules if name.startswith(("algorithms.", "my_algorithms."))]
    pathlib.Path(os.environ["PROBE_FOLDER"], f"{os.getpid()}.txt").write_text("\\n".join(names))

atexit.register(note)
"""


def block(language: str, words: str) -> str:
    """The only snippet of a language that has these words."""
    [found] = [
        each for each in re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL) if words in each
    ]
    return found


def command_of(program: str) -> list[str]:
    """The arguments of the README's command line that starts so."""
    [line] = [line for line in block("bash", "oppo-kit").splitlines() if line.startswith(program)]
    return shlex.split(line)[1:]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example installed."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    package = source / "my_algorithms"
    package.mkdir()
    (source / "pyproject.toml").write_text(block("toml", "[project]"))
    (package / "running_reinforce.py").write_text(block("python", "class RunningReinforce(AlgorithmBase)"))
    (package / "watched_reinforce.py").write_text(block("python", "class WatchedReinforce(RunningReinforce)"))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    done = subprocess.run(
        [*pip, "--target", str(target), str(source)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (target / "sitecustomize.py").write_text(PROBE)
    return target


@pytest.fixture
def importable(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The example, importable in this process, for one test."""
    monkeypatch.syspath_prepend(site)
    yield site
    for name in [name for name in sys.modules if name.split(".")[0] == "my_algorithms"]:
        del sys.modules[name]


def run(site: Path, arguments: list[str], cwd: Path) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """The command in a process of its own; and which algorithms' modules any of its processes has imported."""
    probe = cwd / "probe"
    probe.mkdir()
    search = os.pathsep.join([str(site), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        env={**os.environ, "PYTHONPATH": search, "PROBE_FOLDER": str(probe), "COLUMNS": "200"},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    notes = [file.read_text().split() for file in probe.iterdir()]
    assert notes
    return done, {name for names in notes for name in names}


def claim(folder: Path, package: str, entry_points: str) -> None:
    """Write the metadata of a package that registers algorithms."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.ALGORITHM_GROUP}]\n{entry_points}\n")


# --- the example


def test_the_example_is_one_module_of_at_most_forty_lines() -> None:
    lines = [line.strip() for line in block("python", "class RunningReinforce(AlgorithmBase)").splitlines()]
    assert 20 < len([line for line in lines if line and not line.startswith("#")]) <= 40


def test_the_test_of_the_example_passes_and_finds_a_loss_that_depends_on_the_split(
    importable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict = {"__name__": "their_tests"}
    exec(compile(block("python", "def test_"), "README.md", "exec"), names)
    [test] = [value for name, value in names.items() if name.startswith("test_")]
    test()
    right = names["RunningReinforce"].loss

    def loss_by_rows_present(self, micro_batch, outputs):
        loss, metrics = right(self, micro_batch, outputs)
        return loss * len(micro_batch.mask), metrics

    monkeypatch.setattr(names["RunningReinforce"], "loss", loss_by_rows_present)
    with pytest.raises(AssertionError, match="running_reinforce"):
        test()


@pytest.mark.parametrize("name", ["running_reinforce", "watched_reinforce"])
def test_the_gradient_of_the_examples_does_not_depend_on_the_split(importable: Path, name: str) -> None:
    from oppo_kit.testing import check_split_invariance

    check_split_invariance(registry.create_algorithm(name, {}))


def test_the_example_learns_through_the_engine_and_keeps_its_baseline(importable: Path) -> None:
    from tiny_models import tiny_causal_lm, tiny_tokenizer

    from oppo_kit import (
        LearnerConfig,
        OverlapConfig,
        PromptDataset,
        SamplingConfig,
        TrainConfig,
        build_engine,
    )
    from oppo_kit.backends.function_scorer import FunctionScorer

    def likes_a(prompts, completions, **columns):
        return [float(text.count("a")) for text in completions]

    tokenizer = tiny_tokenizer()
    config = TrainConfig(
        algo="running_reinforce",
        batch_size=16,
        num_steps=12,
        sampling=SamplingConfig(temperature=1.0, response_length=8),
        overlap=OverlapConfig(delta=4, decode_tokens=4),
        learner=LearnerConfig(learning_rate=5e-3, lr_scheduler_type="constant"),
    )
    engine = build_engine(
        config,
        policy=tiny_causal_lm(),
        tokenizer=tokenizer,
        prompts=PromptDataset([{"prompt": "ab"}, {"prompt": "cd"}], tokenizer, max_new_tokens=8),
        reward=FunctionScorer([likes_a], tokenizer),
    )
    with engine:
        reports = list(engine.run())
    rewards = [report.reward_mean or 0.0 for report in reports]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.5
    # By hand: the first batch's own mean, then 0.9 of the baseline and 0.1 of the last step's mean reward.
    baseline = rewards[0]
    for report, reward in zip(reports, rewards, strict=True):
        assert report.metrics["reinforce/baseline"] == pytest.approx(baseline, abs=1e-5)
        baseline = 0.9 * baseline + 0.1 * reward
    assert engine.state_dict()["algorithm"]["baseline"] == pytest.approx(baseline, abs=1e-5)


# --- the commands


def test_train_takes_the_example_by_name_saves_what_it_learned_and_imports_no_other(
    site: Path, tmp_path: Path
) -> None:
    done, imported = run(site, [*command_of("oppo-kit train"), *SMALL], tmp_path)
    assert done.returncode == 0, done.stderr
    assert imported == {MODULE}
    folder = tmp_path / "runs" / "reinforce"
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    baselines = [step["reinforce/baseline"] for step in steps]
    assert baselines[1] == pytest.approx(baselines[0])  # it started from the first step's own mean
    assert baselines[2] != pytest.approx(baselines[1])
    assert all(0.5 < step["reinforce/weight"] < 1.5 for step in steps)
    assert "decay: 0.95" in (folder / "config.yaml").read_text()
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert saved["engine"]["algorithm"].keys() == {"baseline"}


@pytest.mark.slow
def test_bench_measures_the_watched_example_whose_four_hooks_all_ran(site: Path, tmp_path: Path) -> None:
    out = tmp_path / "result"
    arguments = [*command_of("oppo-kit bench"), *SMALL, *SMALL_BENCH, "--out", str(out)]
    settings = ["--algo", "watched_reinforce", "--set", "algo_config.anneal_steps=2"]
    done, imported = run(site, [*arguments, *settings], tmp_path)
    assert done.returncode == 0, done.stderr
    assert imported == {MODULE, WATCHED}
    result = load_result(out)
    assert list(result.runners) == ["sequential", "overcommit"]
    assert result.workload.algorithm == "watched_reinforce"
    for metrics in hook_metrics(result):
        assert [step["reinforce/kl_coef"] for step in metrics] == pytest.approx([0.025, 0.0, 0.0])
        assert all(0.0 < step["reinforce/surprisal"] < 10.0 for step in metrics)
        assert all(0.0 <= step["reinforce/drawn_at_limit"] <= 1.0 for step in metrics)
        assert sum(step["reinforce/trained_at_limit"] for step in metrics) > 0.0
    [sequential, _] = hook_metrics(result)
    for step in sequential:  # nothing is selected, so what was drawn is what is trained
        assert step["reinforce/drawn_at_limit"] == pytest.approx(step["reinforce/trained_at_limit"])


def hook_metrics(result: Result) -> list[list[dict]]:
    return [[step.metrics for step in runner.runs[0].steps] for runner in result.runners.values()]


def test_listing_the_names_imports_none_of_them(site: Path, tmp_path: Path) -> None:
    done, imported = run(site, ["doctor"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "running_reinforce" in done.stdout
    assert "watched_reinforce" in done.stdout
    assert imported == set()


# --- what does not work


def test_a_package_that_takes_a_built_in_name_is_refused_by_the_command_and_both_are_named(
    site: Path, tmp_path: Path
) -> None:
    claim(tmp_path / "clash", "my-ppo", f"ppo = {MODULE}:RunningReinforce")
    search = Path(os.pathsep.join([str(tmp_path / "clash"), str(site)]))
    done, imported = run(search, ["train", "--algo", "ppo", *SMALL], tmp_path)
    assert done.returncode == 2
    assert (
        "error: algorithm 'ppo' is registered by package 'my-ppo' (my_algorithms.running_reinforce:"
        in done.stderr
    )
    assert "and package 'oppo-kit' (algorithms.ppo:PPO); uninstall one of them" in done.stderr
    assert imported == set()


def test_other_names_work_beside_a_clash_and_beside_a_broken_package(
    importable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(tmp_path, "my-ppo", f"ppo = {MODULE}:RunningReinforce")
    claim(tmp_path, "half-installed", "theirs = half_installed:Theirs")
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.create_algorithm("running_reinforce", {}).name == "running_reinforce"
    with pytest.raises(
        ConfigError, match=r"'theirs' of package 'half-installed' \(half_installed:Theirs\) cannot be"
    ):
        registry.create_algorithm("theirs", {})


def test_two_third_parties_of_one_name_are_refused(
    importable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(tmp_path, "rival", "running_reinforce = rival:Rival")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="is registered by package 'my-algorithms' .* and package 'rival' "):
        registry.load_algorithm_class("running_reinforce")


def test_a_package_found_twice_on_the_search_path_does_not_clash_with_itself(
    importable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(tmp_path, "my_algorithms", f"running_reinforce = {MODULE}:RunningReinforce")
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.load_algorithm_class("running_reinforce").name == "running_reinforce"


def test_a_misspelt_name_or_setting_of_the_example_names_the_nearest(importable: Path) -> None:
    with pytest.raises(
        UnknownNameError, match="unknown algorithm 'runing_reinforce'; did you mean 'running_rein"
    ):
        registry.create_algorithm("runing_reinforce", {})
    with pytest.raises(
        ConfigError, match="of running_reinforce: unknown key 'weight_caps'; did you mean 'weight_cap'"
    ):
        registry.create_algorithm("running_reinforce", {"weight_caps": 3.0})
    with pytest.raises(ConfigError, match=r"decay = 1.0: Input should be less than 1"):
        registry.create_algorithm("running_reinforce", {"decay": 1.0})
