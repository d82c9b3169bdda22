"""Algorithms are found by entry point, and only the named one is loaded."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from oppo_kit import registry
from oppo_kit.errors import ConfigError, MissingExtraError, UnknownNameError


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


def entry_point(target: str, package: str | None = None, name: str = "theirs") -> EntryPoint:
    point = EntryPoint(name, target, registry.ALGORITHM_GROUP)
    # As importlib.metadata does for what it finds on the search path.
    vars(point)["dist"] = None if package is None else SimpleNamespace(name=package)
    return point


ODDITIES = """
from oppo_kit import AlgorithmBase

class Nameless(AlgorithmBase):
    def prepare(self, batch): ...
    def loss(self, micro_batch, outputs): ...

class OddConfig(Nameless):
    name = "theirs"
    config_class = dict

class Unfinished(AlgorithmBase):
    name = "theirs"

class Forgetful(Nameless):
    name = "theirs"
    def __init__(self, config):
        self.own = config

class Failing(Nameless):
    name = "theirs"
    def __init__(self, config):
        super().__init__(config)
        {}["weights"]
"""


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "no_such_package:X",
            r"'theirs' of package 'their-package' \(no_such_package:X\) cannot be loaded: ModuleNotFoundError: .*; "
            "correct or reinstall that package",
        ),
        ("json:loads", "is not a subclass of oppo_kit.AlgorithmBase; correct that package"),
        ("json:nothing", "cannot be loaded: AttributeError: .*nothing"),
        ("oddities:Unfinished", "'theirs' of package 'their-package' .* has no loss and no prepare"),
        ("oddities:Nameless", "calls itself None, where its entry point says 'theirs'"),
        ("oddities:OddConfig", "a config_class that is not a subclass of oppo_kit.AlgorithmConfig"),
        ("raises_at_import:X", "cannot be loaded: ZeroDivisionError: division by zero"),
        ("is_no_python:X", "cannot be loaded: SyntaxError: "),
    ],
)
def test_a_broken_plug_in_is_named(tmp_path, monkeypatch, target, message) -> None:
    (tmp_path / "oddities.py").write_text(ODDITIES)
    (tmp_path / "raises_at_import.py").write_text("1 / 0\n")
    (tmp_path / "is_no_python.py").write_text("class X(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "oddities", raising=False)
    points = {"theirs": [entry_point(target, "their-package")]}
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    with pytest.raises(ConfigError, match=message):
        registry.load_algorithm_class("theirs")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "oddities:Forgetful",
            r"'theirs' \(oddities.Forgetful\) has no config; its __init__ must call super\(\)",
        ),
        (
            "oddities:Failing",
            r"'theirs' \(oddities.Failing\) failed on its settings \{'num_epochs': 2\}: KeyError: 'weights'; correct",
        ),
    ],
)
def test_a_plug_in_that_fails_on_its_settings_is_named(tmp_path, monkeypatch, target, message) -> None:
    (tmp_path / "oddities.py").write_text(ODDITIES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "oddities", raising=False)
    monkeypatch.setattr(registry, "_entry_points", lambda: {"theirs": [entry_point(target)]})
    with pytest.raises(ConfigError, match=message):
        registry.create_algorithm("theirs", {"num_epochs": 2})


def test_what_a_plug_in_says_in_our_words_is_handed_on(tmp_path, monkeypatch) -> None:
    (tmp_path / "needs_an_extra.py").write_text(
        "from oppo_kit.errors import MissingExtraError\nraise MissingExtraError('vllm', 'vllm')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    points = {"theirs": [entry_point("needs_an_extra:X")]}
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    with pytest.raises(MissingExtraError, match="vllm is not installed"):
        registry.load_algorithm_class("theirs")


def test_a_name_that_two_packages_register_is_refused_and_both_are_named(monkeypatch) -> None:
    points = {
        "theirs": [entry_point("json:loads", "their-package"), entry_point("yaml:load", "another-package")],
        "ppo": [entry_point("algorithms.ppo:PPO", name="ppo")],
    }
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    with pytest.raises(
        ConfigError,
        match=r"algorithm 'theirs' is registered by package 'another-package' \(yaml:load\) and "
        r"package 'their-package' \(json:loads\); uninstall one of them, or give its algorithm another name",
    ):
        registry.load_algorithm_class("theirs")
    assert registry.load_algorithm_class("ppo").name == "ppo"


def test_listing_names_imports_no_algorithm() -> None:
    code = (
        "import sys; from oppo_kit.registry import algorithm_names; assert 'ppo' in algorithm_names();"
        "assert not any(name.split('.')[0] == 'algorithms' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
