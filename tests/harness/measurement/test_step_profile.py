"""One step, profiled in its two halves."""

from __future__ import annotations

import json

from harness.measurement.step_profile import StepProfile, main, measure, render


def test_both_halves_of_a_step_are_profiled() -> None:
    settings = ["batch_size=4", "overlap.delta=2", "sampling.response_length=24"]
    profile = measure("tiny", num_threads=1, command="by hand", overrides=settings)
    assert StepProfile.model_validate(json.loads(profile.model_dump_json())) == profile
    assert set(profile.stages_s) == {"generate", "score", "train", "sync"}
    assert min(profile.stages_s.values()) > 0
    assert profile.tokens_trained > 0
    for operators in (profile.collect, profile.update):
        shares = [operator.share for operator in operators]
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 1
    # Only the update computes gradients.
    assert not any("backward" in operator.name.lower() for operator in profile.collect)
    text = render(profile)
    assert f"{profile.tokens_decoded} tokens decoded" in text
    assert profile.update[0].name in text


def test_an_unknown_model_is_one_line(tmp_path, capsys) -> None:
    assert main(["--model", "tinny", "--out", str(tmp_path)]) == 2
    assert "tinny" in capsys.readouterr().err
