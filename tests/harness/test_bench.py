"""The plan of a benchmark: threads, order of runs, bound. The runs themselves are tested through the command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from results_factory import make_ladder
from rich.console import Console
from rich.progress import Progress

from harness import bench
from harness.measurement.bound import StageCosts, best_of, bound_of
from harness.report import render_report
from harness.runners.base import RunSpec
from harness.runners.oppo import RUNGS, overlap_of
from harness.schema import load_result
from harness.settings import load_train_config
from oppo_kit.backends import vllm_engine
from oppo_kit.errors import ConfigError, MissingExtraError, PartFailedError, UnknownNameError


def make_plan(folder: Path, **changes) -> bench.BenchPlan:
    values = {
        "name": "plan",
        "train": load_train_config(overrides=["num_steps=4", "batch_size=4"]),
        "runners": ["sequential", "overcommit"],
        "num_pairs": 3,
        "eval_every": 4,
        "num_eval_problems": 8,
        "num_warmup_steps": 1,
        "is_quick": True,
        "folder": folder,
        "num_threads": 1,
        "command": "oppo-kit bench",
    }
    return bench.BenchPlan(**values | changes)


@pytest.fixture
def recorded(monkeypatch):
    """Replaces the child processes: what was run, in order, with finished runs of the factory."""
    template = make_ladder().runners["overcommit"].runs[0]
    order: list[tuple[str, int, int, int]] = []

    def run_in_process(spec, folder, result_class, *, module="", on_progress=None):
        order.append((spec.runner, spec.seed, spec.num_threads, spec.train.num_steps))
        if result_class is StageCosts:
            return StageCosts(decode_s_per_token=1e-4, score_s_per_token=1e-5, train_s_per_token=1e-4)
        slow = 2.0 if spec.num_threads == 2 and spec.runner == "sequential" else 1.0
        steps = [
            step.model_copy(update={"step_s": slow * step.step_s})
            for step in template.steps[: spec.train.num_steps]
        ]
        return template.model_copy(
            update={"seed": spec.seed, "pair": spec.pair, "num_threads": spec.num_threads, "steps": steps}
        )

    monkeypatch.setattr(bench, "run_in_process", run_in_process)
    monkeypatch.setattr(bench, "write_report", lambda result, folder: folder)
    return order


def test_runners_take_turns_with_one_seed_a_pair(tmp_path, recorded) -> None:
    result = bench.run_bench(make_plan(tmp_path), Console(quiet=True))
    runs = [(name, seed) for name, seed, _, _ in recorded[:6]]
    assert runs == [
        ("sequential", 0),
        ("overcommit", 0),
        ("overcommit", 1),
        ("sequential", 1),
        ("sequential", 2),
        ("overcommit", 2),
    ]
    assert len(result.ratios["sequential/overcommit"].pairs) == 3
    assert load_result(tmp_path).model_dump() == result.model_dump()


def test_a_log_has_a_line_for_every_run(tmp_path, recorded) -> None:
    with (tmp_path / "log").open("w") as log:
        bench.run_bench(make_plan(tmp_path / "run", num_pairs=1), Console(file=log, width=200))
    text = (tmp_path / "log").read_text()
    assert "sequential, seed 0: 4 steps, " in text
    assert "overcommit, seed 0: 4 steps, " in text


def test_the_evaluation_before_training_is_handed_to_later_runs(tmp_path, recorded, monkeypatch) -> None:
    working, handed = bench.run_in_process, []

    def watch(spec, *arguments, **options):
        handed.append(spec.untrained)
        return working(spec, *arguments, **options)

    monkeypatch.setattr(bench, "run_in_process", watch)
    result = bench.run_bench(make_plan(tmp_path, num_pairs=2), Console(quiet=True))
    first = result.runners["sequential"].runs[0].evaluations[0]
    assert first.step == 0
    assert handed == [None, first, first, first, None]  # the last measures the bound


def test_each_runner_gets_its_fastest_thread_count_and_the_samples_are_kept(
    tmp_path, recorded, monkeypatch
) -> None:
    monkeypatch.setattr(bench, "num_usable_cores", lambda: 2)
    result = bench.run_bench(make_plan(tmp_path, num_threads=None, num_pairs=1), Console(quiet=True))
    assert recorded[:4] == [
        ("sequential", 0, 1, 3),
        ("sequential", 0, 2, 3),
        ("overcommit", 0, 1, 3),
        ("overcommit", 0, 2, 3),
    ]
    assert result.runners["sequential"].runs[0].num_threads == 1
    assert {name: len(s) for name, s in result.runners["sequential"].calibration_step_s.items()} == {
        "1": 2,
        "2": 2,
    }


def test_what_was_measured_before_a_failure_is_kept(tmp_path, recorded, monkeypatch) -> None:
    working = bench.run_in_process

    def fail_late(spec, *arguments, **options):
        if spec.seed == 1:
            raise PartFailedError("out of memory")
        return working(spec, *arguments, **options)

    monkeypatch.setattr(bench, "run_in_process", fail_late)
    with pytest.raises(PartFailedError, match="out of memory"):
        bench.run_bench(make_plan(tmp_path), Console(quiet=True))
    kept = load_result(tmp_path)
    assert {name: len(runner.runs) for name, runner in kept.runners.items()} == {
        "sequential": 1,
        "overcommit": 1,
    }


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"runners": ["overcomit"]},
            UnknownNameError,
            "unknown runner 'overcomit'; did you mean 'overcommit'",
        ),
        ({"runners": []}, ConfigError, "no runner was named; choose from trl, trl_continuous, trl_overlap"),
        (
            {"placement": "split", "runners": ["trl"]},
            ConfigError,
            "runner 'trl' cannot split actor and scorers; leave it out, or use placement 'shared'",
        ),
        (
            {"runners": ["trl_continuous"]},
            ConfigError,
            "runner 'trl_continuous': TRL has no such trainer of algorithm 'ppo'; leave it out",
        ),
        (
            {"runners": ["trl_overlap"]},
            ConfigError,
            "runner 'trl_overlap': TRL has no such trainer of algorithm 'ppo'; leave it out",
        ),
        (
            {"runners": ["trl", "sequential"], "fault": "flipped_advantages"},
            ConfigError,
            "runner 'trl' is TRL's, and a fault is put into ours; leave it out",
        ),
        ({"fault": "fliped_advantages"}, UnknownNameError, "did you mean 'flipped_advantages'"),
        ({"placement": "split", "num_threads": 2}, ConfigError, "gives the actor one core, so not 2 threads"),
        ({"num_warmup_steps": 4}, ConfigError, "num_steps=4 leaves nothing to measure after 4 warm-up steps"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_before_anything_runs(
    tmp_path, recorded, changes, error, message
) -> None:
    with pytest.raises(error, match=message):
        bench.run_bench(make_plan(tmp_path, **changes), Console(quiet=True))
    assert recorded == []


def test_a_single_core_needs_no_calibration(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(bench, "num_usable_cores", lambda: 1)
    assert bench._calibrate(make_plan(tmp_path), "trl", Progress()) == {"1": []}
    assert bench._fastest({"1": []}) == 1
    assert bench._fastest({"1": [2.0, 9.0, 2.1], "2": [3.0, 3.0, 3.0]}) == 1
    assert bench._fastest({"1": [2.2, 3.1], "2": [2.1, 7.5]}) == 2, "something disturbed one step"


def test_the_bound_is_tokens_times_the_best_cost() -> None:
    """By hand: the factory's median step, with costs of 1, 2 and 4 ms a token."""
    costs = best_of(
        [
            StageCosts(decode_s_per_token=0.001, score_s_per_token=0.009, train_s_per_token=0.004),
            StageCosts(decode_s_per_token=0.005, score_s_per_token=0.002, train_s_per_token=0.009),
        ]
    )
    runner = make_ladder().runners["sequential"].model_copy(deep=True)
    for run in runner.runs:
        for step in run.steps:
            step.tokens_decoded, step.tokens_trained, step.step_s = 100, 50, 0.8
    bound = bound_of(costs, {"sequential": runner}, num_warmup_steps=1)
    assert bound.step_s["sequential"] == pytest.approx(100 * 0.001 + 50 * (0.002 + 0.004))
    assert bound.share_reached["sequential"] == pytest.approx(0.4 / 0.8)
    split = bound_of(costs, {"sequential": runner}, num_warmup_steps=1, placement="split")
    assert split.step_s["sequential"] == pytest.approx(100 * 0.001 + 50 * 0.004), (
        "the actor is the slower part"
    )
    costs.score_s_per_token = 0.02
    split = bound_of(costs, {"sequential": runner}, num_warmup_steps=1, placement="split")
    assert split.step_s["sequential"] == pytest.approx(50 * 0.02), "the scorers are"


def test_runners_are_named_by_themselves_or_by_placement_or_as_the_ladder() -> None:
    assert bench.runner_names(None, "shared") == ["trl", "sequential", "both"]
    assert bench.runner_names("trl,both", "split") == ["trl", "both"]
    ladder = ["sequential", "sample", "chunk", "chunk_auto", "overcommit", "both"]
    assert bench.runner_names("ladder", "split") == ladder
    assert bench.runner_names("ladder", "shared") == ["trl", *ladder]
    assert set(RUNGS) == set(ladder)
    with pytest.raises(UnknownNameError, match="unknown placement 'spilt'; did you mean 'split'"):
        bench.parse_placement("spilt")


def test_trl_is_left_out_by_itself_and_refused_by_name_where_it_has_no_trainer(tmp_path, recorded) -> None:
    assert bench.runner_names(None, "shared", "grpo") == ["trl", "sequential", "both"]
    assert bench.runner_names(None, "shared", "reinforce") == ["sequential", "both"]
    assert bench.runner_names("ladder", "shared", "reinforce") == list(RUNGS)
    assert bench.runner_names("trl,both", "shared", "reinforce") == ["trl", "both"]
    train = load_train_config(overrides=["num_steps=4"]).model_copy(update={"algo": "reinforce"})
    with pytest.raises(ConfigError, match="runner 'trl': TRL has no such trainer of algorithm 'reinforce'"):
        bench.run_bench(make_plan(tmp_path, train=train, runners=["trl"]), Console(quiet=True))
    assert recorded == []


def test_trl_is_left_out_and_refused_beside_vllm_which_is_ours_alone(tmp_path, recorded) -> None:
    assert bench.runner_names(None, "shared", "ppo", "vllm") == ["sequential", "both"]
    assert bench.runner_names("ladder", "shared", "ppo", "vllm") == list(RUNGS)
    train = load_train_config(options={"backend": "vllm"}, overrides=["num_steps=4"])
    with pytest.raises(
        ConfigError,
        match="runner 'trl' is TRL's, which generates by transformers, and backend is 'vllm'; leave it out",
    ):
        bench.run_bench(make_plan(tmp_path, train=train, runners=["trl", "both"]), Console(quiet=True))
    assert recorded == []


def test_vllm_is_missed_before_anything_is_run(tmp_path, recorded, monkeypatch) -> None:
    monkeypatch.setattr(vllm_engine, "find_spec", lambda name: None)
    train = load_train_config(options={"backend": "vllm"}, overrides=["num_steps=4"])
    with pytest.raises(
        MissingExtraError, match=r"vllm is not installed; install it with: pip install 'oppo-kit\[vllm\]'"
    ):
        bench.run_bench(make_plan(tmp_path, train=train), Console(quiet=True))
    assert recorded == []


def test_a_result_names_its_backend(tmp_path, recorded, monkeypatch) -> None:
    monkeypatch.setattr(vllm_engine, "find_spec", lambda name: name)
    train = load_train_config(options={"backend": "vllm"}, overrides=["num_steps=4", "batch_size=4"])
    result = bench.run_bench(make_plan(tmp_path, train=train, num_pairs=1), Console(quiet=True))
    assert result.workload.backend == "vllm"


@pytest.mark.parametrize(
    ("algo", "group_size", "trainer"),
    [("grpo", 8, "GRPOTrainer"), ("rloo", 4, "RLOOTrainer"), ("online_dpo", 2, "OnlineDPOTrainer")],
)
def test_a_result_names_groups_and_the_trainer_of_its_algorithm(
    algo, group_size, trainer, tmp_path, recorded
) -> None:
    train = load_train_config(options={"algo": algo}, overrides=["num_steps=4", "batch_size=4"])
    result = bench.run_bench(
        make_plan(tmp_path, train=train, runners=["trl", "sequential"]), Console(quiet=True)
    )
    work = result.workload
    assert (work.algorithm, work.group_size, work.critic) == (algo, group_size, None)
    assert result.runners["trl"].description.startswith(f"TRL's {trainer} on the same work")
    assert f"4 groups of {group_size} responses" in render_report(result, {})


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core cannot be split")
def test_functions_cannot_be_split_from_the_actor(tmp_path, recorded) -> None:
    train = load_train_config(
        overrides=["num_steps=4", "batch_size=4", "reward=harness.workloads.tiny:chain_reward"]
    )
    plan = make_plan(tmp_path, train=train, placement="split", runners=["sequential"])
    with pytest.raises(
        ConfigError, match="reward functions run in the actor's process; use a reward model, or"
    ):
        bench.run_bench(plan, Console(quiet=True))
    assert recorded == []


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core cannot be split")
def test_split_runs_have_one_thread_and_a_core_each(tmp_path, recorded) -> None:
    plan = make_plan(tmp_path, placement="split", num_threads=None, runners=["sequential", "both"])
    result = bench.run_bench(plan, Console(quiet=True))
    assert result.workload.placement == "split"
    assert {num_threads for _, _, num_threads, _ in recorded} == {1}
    assert result.runners["both"].calibration_step_s == {}
    actor, scorers = bench._spec(plan, "both", 0, 1).cores
    assert actor != scorers


def test_a_rung_changes_only_what_it_is_about() -> None:
    train = load_train_config(overrides=["overlap.chunk_tokens=16", "overlap.max_age=3"])

    def overlap(runner: str, *, cores=None, num_threads: int = 2):
        return overlap_of(RunSpec(runner=runner, seed=0, num_threads=num_threads, train=train, cores=cores))

    rungs = {runner: overlap(runner) for runner in RUNGS}
    assert {rung.chunk_tokens for rung in rungs.values()} == {16}
    assert [rung.score_at for rung in rungs.values()] == ["batch", "sample", "chunk", "auto", "batch", "auto"]
    assert [rung.delta for rung in rungs.values()] == [0, 0, 0, 0, 16, 16]
    assert rungs["sequential"].placement == rungs["overcommit"].placement == "inline"
    assert rungs["sequential"].decode_threads is rungs["overcommit"].decode_threads is None
    if not torch.cuda.is_available():
        assert rungs["both"].placement == "process"
        assert rungs["both"].decode_threads == 1
        assert overlap("both", num_threads=1).decode_threads == 1
    split = overlap("sequential", cores=(0, 1), num_threads=1)
    assert (split.placement, split.scorer_cores, split.score_at) == ("process", (1,), "batch")
    train = load_train_config(overrides=["overlap.score_at=chunk", "overlap.stream_critic=true"])
    assert overlap("both").placement == "thread", "where the critic can be fed"
    assert not overlap("sample").stream_critic
    train = load_train_config(overrides=["overlap.score_at=chunk", "overlap.placement=thread"])
    assert (overlap("both").score_at, overlap("both").placement) == ("chunk", "thread")
    assert overlap("sequential").placement == "inline"


def test_functions_alone_are_called_when_a_response_ends_and_cost_decoding_no_core() -> None:
    function = "reward=harness.workloads.tiny:chain_reward"

    def overlap(algo: str, runner: str, *overrides: str):
        train = load_train_config(options={"algo": algo}, overrides=[function, *overrides])
        return overlap_of(RunSpec(runner=runner, seed=0, num_threads=2, train=train))

    rungs = {name: overlap("grpo", name) for name in ("sequential", "sample", "overcommit", "both")}
    assert [rung.score_at for rung in rungs.values()] == ["batch", "sample", "batch", "sample"]
    assert [rung.delta for rung in rungs.values()] == [0, 0, 4, 4]
    assert {rung.placement for rung in rungs.values()} == {"inline"}
    assert {rung.decode_threads for rung in rungs.values()} == {None}
    for name in ("chunk", "chunk_auto"):
        with pytest.raises(ConfigError, match=f"runner '{name}' has nobody to stream to: .* leave it out"):
            overlap("grpo", name)
    assert overlap("grpo", "both", "algo_config.beta=0.1").score_at == "auto", "there is a reference"
    assert overlap("ppo", "both").score_at == "auto"


def test_a_reward_that_is_an_object_is_named_as_it_was_given(tmp_path, recorded, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "partial_rewards.py").write_text(
        "import functools\ndef scaled(scale, completions, **columns):\n    return [scale] * len(completions)\n"
        "doubled = functools.partial(scaled, 2.0)\n"
    )
    train = load_train_config(overrides=["num_steps=4", "batch_size=4", "reward=partial_rewards:doubled"])
    result = bench.run_bench(make_plan(tmp_path, train=train), Console(quiet=True))
    assert result.workload.reward == "partial_rewards:doubled"


def test_the_result_names_the_critic_that_was_asked_for() -> None:
    for overrides, expected in (
        ([], "from the reward model"),
        (["reward=harness.workloads.tiny:chain_reward"], "from the policy"),
        (["critic=tiny"], "tiny"),
    ):
        train = load_train_config(overrides=overrides)
        loaded = bench.load_workload(train, num_eval_problems=0)
        assert bench._critic_of(train, loaded) == expected
