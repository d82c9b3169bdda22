"""The report's words."""

from __future__ import annotations

import io

from rich.console import Console

from harness.dry_run.cards import parse_gpus
from harness.dry_run.estimate import Estimate, StepEstimate
from harness.dry_run.missing import Finding
from harness.dry_run.plan import make_plan
from harness.dry_run.report import print_report, verdict
from harness.settings import load_train_config


def printed(findings: list[Finding], estimate: Estimate | None = None, **options: object) -> str:
    stream = io.StringIO()
    plan = make_plan(load_train_config(options=options), parse_gpus("1xL4"))
    print_report(plan, estimate, findings, Console(file=stream, width=200))
    return " ".join(stream.getvalue().split())


def test_commands_are_printed_with_their_brackets() -> None:
    text = printed([Finding("package trl", "pip install 'oppo-kit[baseline]'")])
    assert "pip install 'oppo-kit[baseline]'" in text
    assert "To start here: 1 thing missing." in text


def test_estimated_seconds_have_two_digits_and_functions_have_none() -> None:
    estimate = Estimate(
        StepEstimate(12.345, 0.0, 0.996), StepEstimate(5.4321, 0.0, 0.996), "launches", "generation", ()
    )
    text = printed([], estimate, algo="grpo", reward="harness.workloads.math_task:math_reward")
    assert "│ generate │ 12 s │ 5.4 s │" in text
    assert "│ score │ n/a │ n/a │" in text
    assert "│ train │ 1.0 s │ 1.0 s │" in text
    assert "│ step │ 13 s │ 6.4 s │" in text
    assert "│ sequential/both │ │ 2.1 │" in text
    assert "│ score │ 0 s │ 0 s │" in printed([], estimate)


def test_the_verdict_on_several_training_devices_says_what_one_process_would_hold() -> None:
    text = verdict(make_plan(load_train_config(), parse_gpus("2xL4")), [])
    assert "sharded; this version trains in one process, and GPU 0 alone would hold" in text
    assert "one process" not in verdict(make_plan(load_train_config(), parse_gpus("1xL4")), [])


def test_the_verdict_counts_what_is_missing() -> None:
    plan = make_plan(load_train_config(), parse_gpus("1xL4"))
    assert verdict(plan, []).endswith("GiB on a device. To start here: nothing is missing.")
    assert verdict(plan, [Finding("a", "b")] * 2).endswith("To start here: 2 things missing.")
