"""The check for large GPUs, in its small size on the CPU."""

from __future__ import annotations

import io
import json
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl_tiny import require_trl

from harness.gpu_check import __main__ as check
from harness.gpu_check import child, parent
from harness.gpu_check.child import ChildPlan
from harness.gpu_check.lengths import FULL_LENGTHS, SMALL_LENGTHS, RandomPrompts, ResponseLengths
from harness.gpu_check.memory import estimate, num_lora_parameters, num_parameters
from harness.gpu_check.random_models import RandomWorkload, load_shape, open_device, policy_sum
from harness.gpu_check.schema import CheckResult, CheckRun, figures_of
from harness.gpu_check.settings import MODELS, RUNNERS, SIZES
from harness.gpu_check.summary import as_markdown
from harness.schema import Step
from oppo_kit.errors import ConfigError
from oppo_kit.telemetry.clock import MonotonicClock

SMALL = SIZES["small"]
CPU = torch.device("cpu")


def make_workload(name: str) -> RandomWorkload:
    return RandomWorkload(MODELS[name], "small", SMALL, CPU)


def run_here(model: str, runner: str, share_s: float = 1e6) -> list[dict[str, Any]]:
    """The events of a run in this process."""
    events = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "connect_to_parent", lambda: events)
        child.main(ChildPlan(model=model, runner=runner, size="small", share_s=share_s))
    return [json.loads(line) for line in events.getvalue().splitlines()]


@pytest.fixture(scope="module")
def runs() -> dict[tuple[str, str], list[dict[str, Any]]]:
    require_trl()
    return {(model, runner): run_here(model, runner) for model in MODELS for runner in RUNNERS}


def steps_of(events: list[dict[str, Any]]) -> list[Step]:
    return [Step.model_validate(event["step"]) for event in events if event["kind"] == "step"]


def test_every_runner_tells_all_it_did_on_both_models(runs: dict[tuple[str, str], list[Any]]) -> None:
    for events in runs.values():
        assert [event["kind"] for event in events] == ["ready", *["step"] * SMALL.max_steps, "end"]
        assert events[-1]["reason"] == "did all 4 steps"
        assert all(step.responses_trained == SMALL.batch_size for step in steps_of(events))


def test_every_runner_starts_from_the_same_policy(runs: dict[tuple[str, str], list[Any]]) -> None:
    for model in MODELS:
        sums = {runs[model, runner][0]["policy_sum"] for runner in RUNNERS}
        assert sums == {policy_sum(make_workload(model).make_policy())}
    assert policy_sum(make_workload("3b").make_critic()) != policy_sum(make_workload("3b").make_reward())


@pytest.mark.parametrize("model", MODELS)
def test_every_runner_gives_the_same_prompts_the_same_lengths(
    model: str, runs: dict[tuple[str, str], list[Any]]
) -> None:
    num_draws = SMALL.max_steps * SMALL.batch_size
    expected = [SMALL_LENGTHS.of_draw(draw_id) for draw_id in range(num_draws)]
    for runner in ("trl", "sequential"):
        steps = steps_of(runs[model, runner])
        assert Counter(length for step in steps for length in step.trained_lengths) == Counter(expected)
        assert [step.tokens_decoded for step in steps] == [sum(step.trained_lengths) for step in steps]
    streamed = steps_of(runs[model, "both"])
    assert sum(step.tokens_prefetched for step in streamed) > 0
    overcommitted = steps_of(runs[model, "overcommit"])
    trained = Counter(length for step in overcommitted for length in step.trained_lengths)
    drawn = [SMALL_LENGTHS.of_draw(draw_id) for draw_id in range(overcommitted[-1].drawn)]
    assert trained <= Counter(drawn)
    assert max(step.in_flight + step.queued for step in overcommitted) > 0


def test_a_run_ends_after_its_share_but_never_before_two_measured_steps() -> None:
    events = run_here("3b", "sequential", share_s=0.0)
    assert len(steps_of(events)) == 3
    assert events[-1]["reason"] == "stopped after the step that used up its 0 s"


def test_trl_stops_after_its_share_as_well() -> None:
    require_trl()
    assert len(steps_of(run_here("3b", "trl", share_s=0.0))) == 3


def test_on_a_gpu_the_clock_waits_for_the_device_and_peaks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 6)
    now_s = child._synchronised_clock(device)
    assert now_s() <= now_s()
    assert waited == [device, device]
    assert child._peaks(device) == {"peak_allocated_bytes": 5, "peak_reserved_bytes": 6}


def test_lengths_are_the_committed_log_normal() -> None:
    """Changing them makes results incomparable, so they are pinned."""
    assert [FULL_LENGTHS.of_draw(n) for n in range(8)] == [78, 44, 136, 107, 24, 41, 27, 73]
    lengths = [FULL_LENGTHS.of_draw(n) for n in range(4000)]
    assert statistics.median(lengths) == pytest.approx(64, rel=0.05)
    assert (min(lengths), max(lengths)) == (8, 256)
    # P(length > 128) = P(z > ln 2 / 0.8) = 0.193
    assert sum(length > 128 for length in lengths) / 4000 == pytest.approx(0.193, abs=0.02)
    assert ResponseLengths(median=64, sigma=1e-9, shortest=8, longest=256).of_draw(5) == 64


def test_prompts_are_random_tokens_that_hold_no_padding() -> None:
    prompts = RandomPrompts(200, 16, SMALL_LENGTHS)
    assert prompts.draw(3) == prompts.draw(3)
    assert prompts.draw(3).token_ids != prompts.draw(4).token_ids
    assert set(prompts.draw(3).token_ids) == set(range(2, 16))
    assert prompts.draw(3).max_new_tokens == SMALL_LENGTHS.of_draw(3)


@pytest.mark.parametrize(("name", "billions"), [("qwen2.5-3b", 3.086), ("qwen2.5-7b", 7.616)])
def test_the_embedded_shapes_have_the_parameters_of_their_names(name: str, billions: float) -> None:
    assert num_parameters(load_shape(name)) / 1e9 == pytest.approx(billions, abs=0.001)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted_as_the_models_have_them(name: str) -> None:
    workload, shape = make_workload(name), load_shape(MODELS[name].policy["small"])
    policy: Any = workload.make_policy()
    assert num_parameters(shape) == sum(weight.numel() for weight in policy.parameters())
    lora: Any = LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear")
    adapted = get_peft_model(policy, lora)
    trained = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    assert num_lora_parameters(shape) == trained
    critic = workload.make_critic()
    assert (critic.config.num_labels, critic.config.vocab_size) == (1, shape["vocab_size"])


def test_the_estimated_memory_leaves_room_on_the_gpu_for_every_run() -> None:
    for model in MODELS.values():
        for runner in RUNNERS:
            peak = estimate(model, "full", SIZES["full"], runner)
            assert peak.total_bytes < 110 * 2**30
            assert "of GPU memory at the most (models " in peak.as_text()
    full = estimate(MODELS["3b"], "full", SIZES["full"], "trl").parts
    # Policy × (weights, gradient, two moments, reference) in bfloat16, and more for critic and reward.
    assert 5 * 2 * 3.086e9 < full["models"] < 6 * 2 * 3.086e9
    assert full["generation"] == 32 * 256 * 151_936 * 4 * 2


def test_the_full_size_refuses_a_machine_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main(["--size", "full", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "error: --size full needs an NVIDIA GPU" in error
    assert "try the same code on the CPU with --size small" in error
    assert not (tmp_path / "out").exists()


def test_the_full_size_refuses_a_gpu_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.raises(ConfigError, match="in bfloat16, which Tesla T4 does not support; use a GPU of"):
        open_device("full")


def test_an_unknown_model_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert check.main(["--models", "3b,8b", "--out", str(tmp_path)]) == 2
    assert "unknown model '8b'; did you mean" in capsys.readouterr().err


def test_a_check_writes_its_results_and_says_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With real processes."""
    monkeypatch.setattr(check, "RUNNERS", ("sequential",))
    assert check.main(["--size", "small", "--models", "3b", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "3b sequential: about 1.2 MiB of GPU memory at the most" in printed
    assert "3b sequential: step 3, " in printed
    result = CheckResult.model_validate_json((tmp_path / "gpu-check.json").read_text())
    (run,) = result.runs
    assert (run.status, run.reason, len(run.steps)) == ("measured", "did all 4 steps", 4)
    assert run.figures == figures_of(run.steps, 1)
    assert run.policy_sum == policy_sum(make_workload("3b").make_policy())
    assert run.wall_s is not None
    assert run.setup_s is not None
    assert run.wall_s > run.setup_s > 0
    assert [series.name for series in run.samples] == [summary.name for summary in run.utilisation]
    assert "gpu" in run.samples[0].name
    assert result.environment.packages["torch"] == torch.__version__
    assert (tmp_path / "gpu-check.md").read_text() == as_markdown(result)


def test_without_time_every_run_is_reported_as_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["--size", "small", "--budget-s", "0", "--out", str(tmp_path)]) == 1
    result = CheckResult.model_validate_json((tmp_path / "gpu-check.json").read_text())
    assert [(run.model, run.runner) for run in result.runs] == [(m, r) for m in MODELS for r in RUNNERS]
    assert {run.status for run in result.runs} == {"missing"}
    text = "trl: **missing**: not begun: the 0 s of the whole check were used up before"
    assert text in capsys.readouterr().out


def step_script(num_steps: int, ending: str) -> str:
    """A child that tells of steps of 2, 3, 4, … seconds and then does ``ending``."""
    step = {
        "step_s": 0.0,
        "generate_s": 1.0,
        "score_s": 0.25,
        "train_s": 0.5,
        "tokens_decoded": 70,
        "tokens_trained": 50,
        "responses_trained": 4,
        "reward_mean": 0.0,
        "kl": 0.0,
        "delta": 0,
        "chunk_tokens": 0,
        "drawn": 4,
        "trained": 4,
        "in_flight": 0,
        "queued": 0,
        "trained_lengths": [50],
    }
    return f"""
import json, sys
print(json.dumps({{"kind": "ready", "setup_s": 1.0, "policy_sum": 2.0}}))
for n in range({num_steps}):
    step = {step!r} | {{"step": n, "step_s": 2.0 + n}}
    print(json.dumps({{"kind": "step", "step": step, "peak_allocated_bytes": 7 + n}}))
{ending}
"""


def run_fake(
    monkeypatch: pytest.MonkeyPatch, folder: Path, script: str, deadline_s: float, on_step: Any = None
) -> CheckRun:
    def start(plan: ChildPlan, log: Any) -> Any:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        return subprocess.Popen([sys.executable, "-c", script], text=True, **pipes)

    monkeypatch.setattr(parent, "_start", start)
    clock = MonotonicClock()
    plan = ChildPlan(model="3b", runner="trl", size="small", share_s=9.0)
    return parent.run_child(
        plan, folder / "log.txt", deadline_s=clock.now_s() + deadline_s, clock=clock, on_step=on_step
    )


def test_a_run_that_breaks_keeps_its_steps_and_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = step_script(2, "print('OutOfMemoryError: 1 TiB', file=sys.stderr)\nsys.exit(3)")
    run = run_fake(monkeypatch, tmp_path, script, 60)
    assert (run.status, len(run.steps), run.figures) == ("failed", 2, None)
    assert run.reason.startswith("the process ended with code 3 after 2 steps")
    assert "OutOfMemoryError: 1 TiB" in run.reason
    assert run.peak_allocated_bytes == 8


@pytest.mark.parametrize(("num_steps", "status"), [(2, "missing"), (3, "measured")])
def test_a_run_that_meets_the_deadline_is_killed_and_what_it_told_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_steps: int, status: str
) -> None:
    """The timer goes off while the last step is looked at; the child has begun to tell of another."""
    timers: list[Any] = []

    def timer(interval_s: float, function: Any) -> Any:
        timers.append(SimpleNamespace(interval_s=interval_s, function=function))
        return SimpleNamespace(start=lambda: None, cancel=lambda: None)

    def on_step(step: Step) -> None:
        if step.step == num_steps - 1:
            timers[0].function()

    monkeypatch.setattr(parent.threading, "Timer", timer)
    half_a_line = 'sys.stdout.write(\'{"kind": "st\'); sys.stdout.flush()\nsys.stdin.read()'
    run = run_fake(monkeypatch, tmp_path, step_script(num_steps, half_a_line), 60, on_step)
    assert timers[0].interval_s == pytest.approx(60, abs=5)
    assert (run.status, len(run.steps)) == (status, num_steps)
    assert run.reason == f"the time of the whole check was used up after {num_steps} steps of this run"
    assert (run.figures is not None) == (status == "measured")


def test_figures_leave_the_warm_up_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ending = "print(json.dumps({'kind': 'end', 'reason': 'enough'}))"
    run = run_fake(monkeypatch, tmp_path, step_script(3, ending), 60)
    figures = run.figures
    assert figures is not None
    assert (run.status, run.reason) == ("measured", "enough")
    # Steps of 3 and 4 s count, that of 2 s does not.
    assert (figures.num_steps, figures.step_s, figures.step_s_range) == (2, 3.5, (3.0, 4.0))
    assert (figures.generate_s, figures.score_s, figures.train_s) == (1.0, 0.25, 0.5)
    assert figures.decoded_tokens_per_s == pytest.approx(140 / 7)
    assert figures.trained_tokens_per_s == pytest.approx(100 / 7)
    assert figures.responses_per_s == pytest.approx(8 / 7)
    assert figures_of(run.steps[:1], 1) is None


def test_the_other_runs_go_on_when_one_breaks_and_results_are_written_after_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[list[str]] = []
    shares: list[float] = []

    def run_child(plan: ChildPlan, log_file: Path, **_: Any) -> CheckRun:
        file = tmp_path / "gpu-check.json"
        result = CheckResult.model_validate_json(file.read_text())
        written.append([run.status for run in result.runs])
        shares.append(plan.share_s)
        status: Any = "failed" if plan.runner == "trl" else "measured"
        return CheckRun(
            model=plan.model, runner=plan.runner, status=status, reason="r", policy_sum=len(written)
        )

    monkeypatch.setattr(check, "run_child", run_child)
    assert check.main(["--size", "small", "--models", "7b", "--out", str(tmp_path)]) == 1
    assert written == [
        ["missing", "missing", "missing", "missing"],
        ["failed", "missing", "missing", "missing"],
        ["failed", "measured", "missing", "missing"],
        ["failed", "measured", "measured", "missing"],
    ]
    assert shares == pytest.approx([82.5, 110, 165, 330], rel=0.05), (
        "what a run leaves over goes to the later ones"
    )
    printed = capsys.readouterr().out
    assert "trl: **failed**: r" in printed
    assert "**The runners did not start from the same policy**: [1.0, 2.0, 3.0, 4.0]" in printed


def test_the_larger_model_gets_the_larger_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shares: list[float] = []

    def run_child(plan: ChildPlan, log_file: Path, **_: Any) -> CheckRun:
        shares.append(plan.share_s)
        return CheckRun(model=plan.model, runner=plan.runner, status="missing", reason="r")

    monkeypatch.setattr(check, "run_child", run_child)
    check.main(["--size", "small", "--budget-s", "840", "--out", str(tmp_path)])
    # Nothing takes any time here: 840 / (4 × 1 + 4 × 1.8), then the same over fewer runs.
    assert shares[0] == pytest.approx(75, rel=0.02)
    assert shares[4] == pytest.approx(210, rel=0.02)
