"""Settings: unknown keys name the nearest, contradictions say what to change, overrides have the last word."""

from __future__ import annotations

import pytest

from oppo_kit.config import OverlapConfig, TrainConfig, apply_overrides, parse_config
from oppo_kit.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batchsize": 3}, "unknown key 'batchsize'; did you mean 'batch_size'"),
        ({"overlap": {"dleta": 3}}, "unknown key 'overlap.dleta'; did you mean 'delta'"),
        (
            {"actor_lora": {"rank": 3}},
            r"unknown key 'actor_lora.rank'; .*known: lora_alpha, lora_dropout, r, target",
        ),
        (
            {"sampling": {"temperature": 0}},
            "sampling.temperature = 0: Input should be greater than or equal to 0.01",
        ),
        (
            {"batch_size": 4, "overlap": {"delta": 9}},
            "overlap.delta=9 exceeds batch_size × max_age = 8.*lower delta",
        ),
        ({"overlap": 3}, "overlap = 3: Input should be a valid dictionary"),
        *(
            (
                {"backend": "vllm", "sampling": sampling},
                "backend 'vllm' draws from the full distribution only.*top_k, top_p and min_p at 0, 1 and 0, or use",
            )
            for sampling in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1})
        ),
        (
            {"backend": "vllm", "sampling": {"batch_invariant": True}},
            "backend 'vllm' cannot be batch_invariant: .*switch sampling.batch_invariant off, or use backend 'hf'",
        ),
        (
            {"backend": "vllm", "sampling": {"temperature": 2.5}},
            "sampling.temperature=2.5 is above 2, the highest of backend 'vllm'; lower it",
        ),
        ({"backend": "sglang"}, "backend = 'sglang': Input should be 'hf' or 'vllm'"),
    ],
)
def test_bad_settings_are_named_with_what_is_allowed(values, message) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(TrainConfig, values)


def test_overrides_enter_sections_and_read_yaml() -> None:
    base = {"overlap": {"delta": 2}, "seed": 1}
    merged = apply_overrides(
        base, ["overlap.delta=8", "learner.max_grad_norm=null", "algo_config.lam=0.9", "model=a/b"]
    )
    assert merged == {
        "overlap": {"delta": 8},
        "seed": 1,
        "learner": {"max_grad_norm": None},
        "algo_config": {"lam": 0.9},
        "model": "a/b",
    }
    assert base == {"overlap": {"delta": 2}, "seed": 1}, "the base is left alone"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("overlap.delta", "is not of the form a.b=value, for example overlap.delta=8"),
        ("=3", "is not of the form a.b=value"),
        ("seed.x=3", "'seed' is a single value, not a section"),
        ("model=[", "the value is not valid YAML"),
    ],
)
def test_an_override_that_cannot_be_read_says_why(override, message) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_overrides({"seed": 1}, [override])


def test_configs_are_frozen_and_every_field_says_what_it_is() -> None:
    with pytest.raises(ValueError, match="frozen"):
        OverlapConfig().delta = 3  # type: ignore[misc]
    for model in (TrainConfig, *(f.annotation for f in TrainConfig.model_fields.values())):
        for name, field in getattr(model, "model_fields", {}).items():
            assert field.description or hasattr(field.annotation, "model_fields"), name
