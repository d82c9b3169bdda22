"""The measurement of decoding alone: both sides do the same work, and the file says what was done."""

from __future__ import annotations

import json

import pytest

from harness.measurement.decoding import (
    MAX_TOKENS,
    NUM_REQUESTS,
    Decoding,
    draw_limits,
    main,
    measure,
    render,
)


def test_the_limits_are_fixed_and_long_tailed() -> None:
    limits = draw_limits()
    assert limits == draw_limits()
    assert len(limits) == NUM_REQUESTS
    assert sum(limits) == 1979
    assert max(limits) == MAX_TOKENS
    assert sum(limits) / len(limits) < max(limits) / 5


def test_both_sides_are_timed_in_pairs_and_the_profile_is_kept() -> None:
    decoding = measure("tiny", [1, 3, 9, 4] * 5, num_pairs=2, command="by hand")
    assert decoding.num_requests == 20
    assert decoding.num_tokens == 85
    assert [set(pair) for pair in decoding.pairs] == [{"generate", "ours"}] * 2
    ratios = sorted(pair["generate"] / pair["ours"] for pair in decoding.pairs)
    assert decoding.ratio_median == pytest.approx(sum(ratios) / 2)
    assert 0 < sum(operator.share for operator in decoding.operators) <= 1
    assert Decoding.model_validate(json.loads(decoding.model_dump_json())) == decoding
    text = render(decoding)
    assert "20 requests, 85 tokens, the longest 9" in text
    assert f"{decoding.pairs[1]['ours']:.2f}" in text
    assert decoding.operators[0].name in text


def test_an_unknown_model_is_one_line(tmp_path, capsys) -> None:
    assert main(["--model", "tinny", "--out", str(tmp_path)]) == 2
    assert "tinny" in capsys.readouterr().err
