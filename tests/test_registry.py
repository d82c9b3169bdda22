"""Algorithms are found by entry point, and only the named one is loaded."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from oppo_kit import registry
from oppo_kit.errors import ConfigError, UnknownNameError


def test_ppo_is_found_by_its_entry_point() -> None:
    assert "ppo" in registry.algorithm_names()
    algorithm = registry.create_algorithm("ppo", {"num_ppo_epochs": 3, "lam": 0.5})
    assert (algorithm.name, algorithm.num_epochs, algorithm.config.lam) == ("ppo", 3, 0.5)


def test_an_unknown_algorithm_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown algorithm 'pop'; did you mean 'ppo'"):
        registry.create_algorithm("pop", {})


def test_an_unknown_setting_of_an_algorithm_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match="algo_config of ppo: unknown key 'kl_coeff'; did you mean 'kl_coef'"
    ):
        registry.create_algorithm("ppo", {"kl_coeff": 0.1})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_package:X", r"algorithm 'theirs' \(no_such_package:X\) cannot be loaded: No module named"),
        ("json:loads", "is not a subclass of oppo_kit.AlgorithmBase"),
        ("json:nothing", "cannot be loaded: .*nothing"),
    ],
)
def test_a_broken_plug_in_is_named(monkeypatch, target, message) -> None:
    points = {"theirs": EntryPoint("theirs", target, registry.ALGORITHM_GROUP)}
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    with pytest.raises(ConfigError, match=message):
        registry.load_algorithm_class("theirs")


def test_listing_names_imports_no_algorithm() -> None:
    code = (
        "import sys; from oppo_kit.registry import algorithm_names; assert 'ppo' in algorithm_names();"
        "assert not any(name.split('.')[0] == 'algorithms' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
