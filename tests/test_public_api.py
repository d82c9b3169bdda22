"""What `from oppo_kit import …` offers, and that importing it costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import oppo_kit


def test_the_public_names_are_pinned_and_resolve() -> None:
    assert oppo_kit.__all__ == [
        "AlgorithmBase",
        "AlgorithmConfig",
        "LearnerConfig",
        "OppoError",
        "OverlapConfig",
        "OverlapEngine",
        "PromptDataset",
        "SamplingConfig",
        "TrainConfig",
        "build_engine",
    ]
    for name in oppo_kit.__all__:
        assert getattr(oppo_kit, name).__name__ == name
    assert set(oppo_kit.__all__) <= set(dir(oppo_kit))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'oppo_kit' has no attribute 'Nope'"):
        oppo_kit.Nope  # noqa: B018


def test_importing_the_package_loads_no_model_library() -> None:
    code = "import sys, oppo_kit; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_engine_needs_no_model_library() -> None:
    code = (
        "import sys; from oppo_kit import OverlapEngine;"
        "assert not {'transformers', 'accelerate', 'peft', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
