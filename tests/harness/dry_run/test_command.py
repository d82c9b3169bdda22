"""``bench --dry-run`` as a user meets it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from oppo_kit.installation import main

DOCUMENT = Path(__file__).parents[3] / "docs" / "backends.md"


@pytest.fixture
def bench(monkeypatch, capsys, tmp_path) -> Callable[[str], tuple[int, str]]:
    """Runs ``oppo-kit bench`` in an empty folder; returns exit code and all output, in one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["oppo-kit", "bench", *shlex.split(arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        captured = capsys.readouterr()
        assert list(tmp_path.iterdir()) == []
        return code, " ".join((captured.out + captured.err).split())

    return call


def test_seven_billion_on_eight_cards_are_planned_without_network_weights_or_gpus(bench) -> None:
    code, text = bench("--algo ppo --model qwen2.5-7b --gpus 8xH200 --dry-run")
    assert code == 0
    for words in (
        "dry run: ppo, qwen2.5-7b on 8 x H200; nothing is loaded or measured",
        "7.62 B",
        "7.07 B",
        "GPUs 0 to 7: train, sharded by FSDP, generate and score each",
        "a plan: this version trains in one process",
        "task math",
        "memory of GPUs 0 to 7, each",
        "generator's KV cache",
        "one step, estimated",
        "expected bottleneck: - ",
        "assumed: - responses: log-normal",
        "missing to start here",
        "GPUs: this machine has",
        "hf download Qwen/Qwen2.5-7B-Instruct",
    ):
        assert words in text, words


def test_the_defaults_in_float32_do_not_fit_one_card_and_what_to_change_is_tried_out(bench) -> None:
    code, text = bench("--model qwen2.5-7b --gpus 1xH200 --dry-run")
    assert code == 0
    [excess, changes] = re.findall(
        r"does not fit: GPU 0 would hold ([\d.]+) GiB too much; it fits with (--set .*?)\. To start", text
    )[0]
    assert float(excess) > 100
    assert "--set dtype=bfloat16" in changes
    _, changed = bench(f"--model qwen2.5-7b --gpus 1xH200 --dry-run {changes}")
    assert "fits: at most" in changed
    assert "does not fit" not in changed


def test_what_fits_nowhere_says_to_take_other_hardware(bench) -> None:
    code, text = bench("--model qwen2.5-7b --gpus 1xL4 --dry-run")
    assert code == 0
    assert "no setting tried here makes it fit: take more devices, or ones with more memory" in text
    assert "largest, the activations of a micro-batch" in text


def test_without_gpus_named_this_machine_is_looked_at_and_no_speed_is_invented(bench, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, text = bench("--runners both --dry-run")
    assert code == 0
    assert "dry run: ppo, tiny on this machine's CPU" in text
    assert "memory of CPU" in text
    assert "no time is estimated for this machine's CPU" in text
    assert "one step, estimated" not in text
    assert "To start here: nothing is missing." in text


def test_functions_score_on_the_cpu(bench) -> None:
    code, text = bench("--algo grpo --model qwen2.5-3b --task math --gpus 1xA100-80GB --dry-run")
    assert code == 0
    assert "harness.workloads.math_task:math_reward" in text
    assert "Python, on the CPU" in text
    assert "critic" not in text


def test_the_backend_is_named(bench) -> None:
    assert "backend hf, float32" in bench("--gpus 1xH200 --dry-run")[1]


def test_a_cache_too_small_for_one_response_is_missing_and_the_named_one_is_not(bench) -> None:
    arguments = "--backend vllm --gpus 1xH200 --dry-run --set vllm.kv_cache_gib="
    text = bench(f"{arguments}0.0001")[1]
    [needed] = re.findall(r"--set vllm\.kv_cache_gib=([\d.]+) or more", text)
    assert "vllm.kv_cache_gib=0.0001 holds less than one response" in text
    assert "holds less than one response" not in bench(f"{arguments}{needed}")[1]


def test_vllm_is_planned_with_its_pool_and_without_trl(bench, monkeypatch) -> None:
    monkeypatch.setattr(
        "harness.dry_run.missing.find_spec", lambda name: None if name == "vllm" else object()
    )
    code, text = bench("--backend vllm --set vllm.kv_cache_gib=3 --gpus 1xH200 --dry-run")
    assert code == 0
    assert "backend vllm, float32" in text
    assert "vllm.kv_cache_gib, set aside" in text
    assert "3.0 GiB" in text
    assert "package vllm, for backend vllm" in text
    assert "trl" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--gpus 8xH200",
            "--gpus 8xH200 describes the hardware of a --dry-run, and a run takes what is here",
        ),
        ("--gpus 8xH201 --dry-run", "unknown card 'H201'; did you mean 'H200'"),
        ("--gpus many --dry-run", "--gpus 'many' is not of the form COUNTxCARD"),
        ("--backend vllm --runners trl,both --dry-run", "leave it out, or use backend 'hf'"),
        ("--runners tlr --dry-run", "unknown runner 'tlr'; did you mean 'trl'"),
        ("--gpus 2xL4 --set overlap.scorer_device=cuda:2 --dry-run", "is no device of 2 x L4"),
        ("--model nobody/nothing --dry-run", "nothing is known here of the policy 'nobody/nothing'"),
    ],
)
def test_bad_input_ends_with_2(bench, arguments: str, message: str) -> None:
    code, text = bench(arguments)
    assert code == 2
    assert message in text


def document_commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line.split("#")[0].strip() for line in joined.splitlines() if "--dry-run" in line]


@pytest.mark.parametrize("command", document_commands())
def test_the_placements_of_the_document_fit(bench, command: str) -> None:
    program, subcommand, *arguments = shlex.split(command)
    assert (program, subcommand) == ("oppo-kit", "bench")
    code, text = bench(shlex.join(arguments))
    assert code == 0
    assert "fits: at most" in text
    assert "does not fit" not in text


def test_the_document_has_one_gpu_and_seven_and_one() -> None:
    commands = document_commands()
    assert any("--gpus 1x" in command for command in commands)
    assert any("--gpus 8xH200" in command and "scorer_device=cuda:7" in command for command in commands)
