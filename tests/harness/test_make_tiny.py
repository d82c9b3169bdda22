"""The script that trained the ``tiny`` assets: its labels, its mix and its command line; no training."""

import random
from itertools import islice

import pytest

pytest.importorskip("torch")

from harness.assets.make_tiny import __main__ as command
from harness.assets.make_tiny.judging import judge
from harness.assets.make_tiny.responses import corrupted, degenerate, reward_rows
from harness.assets.make_tiny.tokens import IGNORED, VOCABULARY, encode
from harness.workloads import rewrite_chain as chain

PROBLEM = "54+3-2"


def shown(labels: list[int]) -> str:
    return "".join("." if label == IGNORED else str(label) for label in labels)


def test_a_verdict_stands_at_every_token_of_a_response() -> None:
    row = judge(PROBLEM, "=58-2=56<eos>")
    # 8 is the first wrong character; 56 = 58 - 2 is a right step again, on a chain that stays wrong.
    assert shown(row.is_step_right) == "......." + "110001111"
    assert shown(row.is_chain_right) == "......." + "110000000"
    assert not row.is_right


def test_what_comes_next_is_what_a_right_solver_would_write() -> None:
    row = judge(PROBLEM, "=57-2=55<eos>")
    expected = "".join("." if token == IGNORED else VOCABULARY[token] for token in row.expected)
    assert expected == "......=57-2=55<eos>."
    assert row.is_right


def test_a_response_is_labelled_right_exactly_if_the_checker_says_so() -> None:
    generator = random.Random(0)
    for problem in islice(chain.iterate_problems(0, "train"), 300):
        noisy = chain.noisy_response(problem, generator)
        for response in (noisy, corrupted(noisy, generator), degenerate(problem, generator)):
            assert judge(problem, response).is_right == chain.is_correct(problem, response)


def test_right_and_wrong_are_balanced_within_each_number_of_terms() -> None:
    surplus = dict.fromkeys(range(1, chain.MAX_NUM_TERMS + 1), 0)
    for row in islice(reward_rows([], 0), 3000):
        num_prompt = next(
            (i for i, label in enumerate(row.is_step_right) if label != IGNORED), len(row.tokens)
        )
        prompt = "".join(VOCABULARY[token] for token in row.tokens[1:num_prompt])
        surplus[chain.num_terms(prompt)] += 1 if row.is_right else -1
    # Beyond 20 the other kind is drawn instead, though a careless draw may come out right after all.
    assert max(map(abs, surplus.values())) <= 24


def test_special_tokens_in_the_middle_of_a_response_are_one_token_each() -> None:
    assert encode("=5<pad>7<eos>") == [VOCABULARY.index(text) for text in ("=", "5", "<pad>", "7", "<eos>")]


def test_an_unknown_stage_is_refused_with_the_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path
) -> None:
    monkeypatch.setattr("sys.argv", ["make_tiny", "reward", "--work-dir", str(tmp_path)])
    with pytest.raises(SystemExit):
        command.main()
    message = capsys.readouterr().err
    assert (
        "stage is 'reward'; use all or one of clean, oracle, policy, samples, sharp_samples, reward_1"
        in message
    )
