"""Scoring while decoding: every mode does the same work, and the report says what the seconds say."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from harness.cores import split_cores
from harness.measurement import streaming, streaming_report
from harness.measurement.streaming import (
    Bench,
    check_read_once,
    choose_threads,
    compare,
    main,
    measure,
    thread_counts,
)
from harness.measurement.streaming_report import (
    MODES,
    Case,
    ModeRun,
    RewardModel,
    Round,
    Streaming,
    figure,
    load,
    paired_ratio,
    render,
    sentence,
)
from harness.measurement.untrained import Response, choose_layers, make_reward, overlap_of
from harness.models import resolve_model
from harness.schema import Environment
from oppo_kit.backends.loading import load_causal_lm
from oppo_kit.errors import ConfigError, PartFailedError, StateError

SMALL: dict[str, Any] = {"num_rounds": 1, "num_steps": 2, "batch_size": 4, "response_length": 24}
HAS_TWO_CORES = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1


def make_run(mode: str, seconds: float, *, num_threads: int = 1, early: int = 0) -> ModeRun:
    return ModeRun(
        mode=mode,
        num_actor_threads=num_threads,
        seconds=seconds,
        generate_s=0.5 * seconds,
        wait_s=0.25 * seconds,
        score_busy_s=0.3 * seconds,
        tokens_prefetched=early,
        tokens_scored=100 - early,
    )


def make_case(*rounds: list[float], cost: float = 4.0, delta: int = 0) -> Case:
    """Seconds of each mode, in the order of ``MODES``."""
    return Case(
        reward=RewardModel(cost=cost, num_layers=16, achieved_cost=3.989),
        delta=delta,
        num_steps=1,
        calibration=[],
        rounds=[
            Round(
                num_prompt_tokens=20,
                response_lengths=[30, 50],
                runs=[
                    make_run(mode, s, early=60 * mode.startswith("chunk"))
                    for mode, s in zip(MODES, seconds, strict=True)
                ],
                score_difference_max=2e-7,
                num_other_responses=0,
            )
            for seconds in rounds
        ],
    )


def make_result(*cases: Case, placement: str = "split") -> Streaming:
    return Streaming.model_validate(
        {
            "model": "tiny",
            "placement": placement,
            "command": "by hand",
            "environment": Environment(
                commit="c" * 40,
                is_dirty=False,
                python="3.11",
                platform="Linux",
                cpu="a CPU",
                num_cpu_cores=2,
                memory_bytes=1,
                packages={},
            ),
            "batch_size": 2,
            "response_length": 64,
            "num_policy_layers": 4,
            "num_scorer_threads": 1,
            "cases": cases,
        }
    )


FASTER = make_case([4.0, 3.0, 2.5, 2.0, 3.1], [4.0, 3.0, 3.1, 2.4, 3.1], [4.0, 3.2, 2.5, 2.0, 3.2])
SLOWER = make_case([4.0, 3.0, 3.3, 3.1, 3.1], [4.0, 3.0, 3.3, 3.2, 3.1], [2.9, 3.0, 3.3, 3.3, 3.1], delta=1)
# Faster in the median, slower in one round.
MIXED = make_case([4.0, 3.0, 2.5, 2.5, 2.5], [4.0, 3.0, 2.5, 2.5, 2.5], [4.0, 3.0, 3.1, 3.1, 3.1])


def test_every_mode_reads_every_token_once_and_the_folder_has_the_whole_report(
    tmp_path, monkeypatch, capsys
) -> None:
    # Two counts to choose from, but two threads of so small a model wait for each other on a busy machine.
    monkeypatch.setattr(streaming, "thread_counts", lambda: [1, 1])
    num_threads = torch.get_num_threads()
    words = ["--rounds", "1", "--steps", "2", "--batch-size", "4", "--response-length", "24"]
    assert main([*words, "--costs", "0.25", "--out", str(tmp_path)]) == 0
    assert torch.get_num_threads() == num_threads
    result = load(tmp_path / "streaming.json")
    assert result.command == (
        "python -m harness.measurement.streaming --model tiny --placement shared --rounds 1 --steps 2 "
        "--batch-size 4 --response-length 24 --costs 0.25"
    )
    assert [(case.delta, case.num_steps) for case in result.cases] == [(0, 1), (2, 2)]
    for case in result.cases:
        (one,) = case.rounds
        assert [run.mode for run in one.runs] == list(MODES)
        assert len(one.response_lengths) == 4 * case.num_steps
        for run in one.runs:
            assert run.tokens_prefetched + run.tokens_scored == one.num_prompt_tokens + sum(
                one.response_lengths
            )
            assert run.mode.startswith("chunk") or run.tokens_prefetched == 0
            assert 0 < run.generate_s + run.wait_s <= run.seconds
        assert one.score_difference_max < 1e-4
        assert [run.mode for run in case.calibration] == [mode for mode in MODES for _ in range(2)]
    text = (tmp_path / "streaming.md").read_text()
    assert text == render([result])
    assert text.strip() in capsys.readouterr().out
    assert (tmp_path / "streaming.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not HAS_TWO_CORES, reason="needs two cores to pin to")
def test_split_gives_actor_and_scorer_a_core_each_and_every_other_round_runs_backwards(monkeypatch) -> None:
    before, seen = os.sched_getaffinity(0), []
    run = Bench.run

    def spy(bench: Bench, mode: str, **options):
        child = os.sched_getaffinity(bench.handle._process.pid)
        seen.append((os.sched_getaffinity(0), child, options["num_threads"], mode))
        return run(bench, mode, **options)

    monkeypatch.setattr(Bench, "run", spy)
    result = measure("tiny", "split", command="x", reward_costs=[1.0], **{**SMALL, "num_rounds": 2})
    assert os.sched_getaffinity(0) == before
    actor, scorer = sorted(before)[:2]
    assert {(tuple(own), tuple(child), count) for own, child, count, _ in seen} == {((actor,), (scorer,), 1)}
    modes = [mode for *_, mode in seen[1:]]
    assert modes == [*MODES, *reversed(MODES)] * 2
    assert all(case.calibration == [] for case in result.cases)
    assert result.environment.num_cpu_cores == len(before)
    first, second = result.cases[0].rounds
    assert (
        first.response_lengths != second.response_lengths
        or first.num_prompt_tokens != second.num_prompt_tokens
    )


def test_modes_are_settings_of_the_engine() -> None:
    assert [(overlap_of(mode, 3).score_at, overlap_of(mode, 3).delta) for mode in MODES[:2]] == [
        ("batch", 3),
        ("sample", 3),
    ]
    chunks = [overlap_of(mode, 0) for mode in MODES[2:]]
    assert [(chunk.score_at, chunk.chunk_tokens) for chunk in chunks] == [
        ("chunk", 8),
        ("chunk", 32),
        ("chunk", 128),
    ]
    assert {(c.schedule, c.delta_control, c.decode_tokens) for c in chunks} == {("oppo", "fixed", 8)}


@pytest.mark.parametrize(
    ("cost", "num_layers"), [(0.25, 1), (0.5, 2), (1.0, 4), (4.0, 16), (0.01, 1), (1.12, 4), (1.123, 5)]
)
def test_a_reward_model_has_the_layers_of_its_cost(cost: float, num_layers: int) -> None:
    # A layer: 4 × 128² + 3 × 128 × 352 = 200,704; the head: 18 × 128 = 2,304; the policy: 4 layers and a head.
    policy = load_causal_lm(resolve_model("tiny"), torch.float32)
    found = choose_layers(cost, policy)
    assert found.num_layers == num_layers
    assert found.achieved_cost == pytest.approx(num_layers * 200_704 / 805_120)
    reward = make_reward(policy, num_layers)
    linear = [part.weight for part in reward.modules() if isinstance(part, torch.nn.Linear)]
    assert sum(weight.numel() for weight in linear) == num_layers * 200_704 + 128
    again = make_reward(policy, num_layers)
    assert all(
        torch.equal(one, other) for one, other in zip(reward.parameters(), again.parameters(), strict=True)
    )


def test_more_threads_must_be_worth_it() -> None:
    runs = [make_run("batch", 1.0), make_run("batch", 0.97, num_threads=2)]
    runs += [make_run("sample", 0.9, num_threads=2), make_run("sample", 1.0)]
    assert choose_threads(runs) == {"batch": 1, "sample": 2}


def test_scores_of_other_modes_are_compared_where_the_tokens_are_equal() -> None:
    batch = [Response((1, 2), 0.5), Response((3,), -1.0)]
    near = [Response((1, 2), 0.50002), Response((4,), 7.0)]
    difference, num_others = compare({"chunk 8": near, "batch": batch})
    assert difference == pytest.approx(2e-5)
    assert num_others == 1
    with pytest.raises(PartFailedError, match=r"'chunk 8' scores draw 1 -1\.01, and mode 'batch' -1"):
        compare({"batch": batch, "chunk 8": [batch[0], Response((3,), -1.01)]})
    with pytest.raises(PartFailedError, match="scores draw 0 nan"):
        compare({"batch": batch, "sample": [Response((1, 2), float("nan")), batch[1]]})


def test_tokens_that_are_read_twice_end_the_measurement() -> None:
    check_read_once(make_run("chunk 8", 1.0, early=60), 100)
    with pytest.raises(PartFailedError, match=r"'chunk 8': the reward model read 100 tokens.* have 97"):
        check_read_once(make_run("chunk 8", 1.0, early=60), 97)


@pytest.mark.parametrize(
    "bad", [{"num_rounds": 0}, {"num_steps": 0}, {"batch_size": 1}, {"reward_costs": [1.0, 0.0]}]
)
def test_too_little_to_measure_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="least 1, 1 and 2 are needed, and costs above 0"):
        measure("tiny", "shared", command="x", **{**SMALL, **bad})


def test_split_is_refused_without_two_cores(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert main(["--placement", "split", "--out", str(tmp_path)]) == 2
    assert "this machine offers 1 to pin to; 2 are needed" in capsys.readouterr().err
    assert thread_counts() == [1]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5})
    assert thread_counts() == [1, 2]
    assert split_cores("split") == (0, 3)
    monkeypatch.delattr(os, "sched_getaffinity")
    with pytest.raises(ConfigError, match="offers 0 to pin to"):
        split_cores("split")
    assert split_cores("shared") is None


def test_a_ratio_is_of_the_same_round() -> None:
    ratio = paired_ratio(FASTER, "sample", "chunk 32")
    assert ratio == pytest.approx((1.5, 1.25, 1.6, 3))
    assert ratio.is_above
    assert str(ratio) == "1.50 (1.25 to 1.60)"
    assert paired_ratio(SLOWER, "sample", "chunk 8").is_below
    mixed = paired_ratio(FASTER, "sample", "chunk 8")
    assert not mixed.is_above
    assert not mixed.is_below


def test_the_sentence_says_where_chunks_are_faster() -> None:
    text = sentence([make_result(FASTER, SLOWER)])
    assert "faster than scoring each response when it ends, in every round, in 1 of 2 cases" in text
    assert (
        "tiny split, reward model of 4 times the policy's cost, Δ = 0: chunk 32, 1.50 (1.25 to 1.60) times as fast."
    ) in text
    assert "In 1 of 2 every chunk size was slower in every round." in text
    # In one round of the second case batch was the faster one.
    assert "faster than scoring the whole batch in every round in 1 of 2." in text


def test_the_sentence_says_that_chunks_do_not_pay() -> None:
    text = sentence([make_result(SLOWER, MIXED), make_result(SLOWER, placement="shared")])
    assert text.startswith("Chunks do not pay: in none of 3 cases")
    assert "In 2 of 3 every chunk size was slower" in text


def test_a_chunk_longer_than_every_response_wins_nothing_and_shows_the_noise() -> None:
    case = FASTER.model_copy(deep=True)
    for one in case.rounds:
        for run in one.runs:
            run.tokens_prefetched = 60 * (run.mode == "chunk 8")
    text = sentence([make_result(case, SLOWER)])
    assert text.startswith("Chunks do not pay: in none of 2 cases")
    assert "In 2 of them no response was long enough for chunk 32, chunk 128, which is then" in text
    assert "that it was 0.97 to 1.60 times as fast by round is noise." in text
    assert "noise" not in sentence([make_result(FASTER, SLOWER)])


def test_two_rounds_say_nothing() -> None:
    few = FASTER.model_copy(update={"rounds": FASTER.rounds[:2]})
    slow = SLOWER.model_copy(update={"rounds": SLOWER.rounds[:2]})
    assert not paired_ratio(few, "sample", "chunk 32").is_above
    assert not paired_ratio(slow, "sample", "chunk 8").is_below
    assert (
        sentence([make_result(few)]) == "Nothing can be said. 1 cases of fewer than 3 rounds are not judged."
    )
    assert sentence([make_result(few, SLOWER)]).endswith("1 cases of fewer than 3 rounds are not judged.")


def test_several_files_make_one_report(tmp_path, capsys) -> None:
    files = []
    for placement in ("shared", "split"):
        files.append(tmp_path / f"{placement}.json")
        files[-1].write_text(make_result(FASTER, SLOWER, placement=placement).model_dump_json())
    assert streaming_report.main([str(tmp_path / "all"), *map(str, files)]) == 0
    results = [load(file) for file in files]
    assert sentence(results) in capsys.readouterr().out
    text = (tmp_path / "all" / "streaming.md").read_text()
    assert text.startswith("# Scoring while decoding: tiny shared, tiny split")
    assert "1 (16 layers" not in text
    assert "4 (16 layers, 3.989)" in text
    assert "all of 3 once in 8 times" in text
    assert "| 4 | 1 | chunk 8 | 1 | 3.3 | 1.65 | 0.825 | 0.99 | 60 |" in text
    assert (tmp_path / "all" / "streaming.png").is_file()
    panels: list[Any] = figure(results).axes
    assert [panel.get_title(loc="left") for panel in panels] == [
        "tiny shared, Δ = 0",
        "tiny split, Δ = 0",
        "tiny shared, Δ = B/2",
        "tiny split, Δ = B/2",
    ]
    assert [bar.get_height() for bar in panels[0].patches] == pytest.approx(
        [4 / 3, 1.6, 2.0, 4 / 3.1], rel=0.05
    )


def test_a_file_that_is_no_measurement_is_one_line(tmp_path, capsys) -> None:
    file = tmp_path / "streaming.json"
    file.write_text("{}")
    with pytest.raises(
        StateError, match=r"is no file of harness\.measurement\.streaming: model: Field required"
    ):
        load(file)
    assert streaming_report.main([str(tmp_path / "out"), str(tmp_path / "absent.json")]) == 2
    assert "cannot read" in capsys.readouterr().err
