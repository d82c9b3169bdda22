"""Function rewards by name: ``module:function``, and what a function is called in messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oppo_kit.backends.function_scorer import load_reward_function
from oppo_kit.errors import ConfigError


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_function_of_the_current_directory_is_found(folder: Path) -> None:
    (folder / "brief_rewards.py").write_text(
        "def brevity(completions, **columns):\n    return [-len(c) for c in completions]\n"
    )
    assert load_reward_function("brief_rewards:brevity")(completions=["a", "bb", ""]) == [-1, -2, 0]


def test_a_missing_function_lists_the_nearest(folder: Path) -> None:
    (folder / "my_rewards2.py").write_text("LIMIT = 3\ndef brevity(**columns):\n    return []\n")
    with pytest.raises(
        ConfigError, match=r"'my_rewards2' has no 'brevty'; did you mean 'brevity'\? known: brevity"
    ):
        load_reward_function("my_rewards2:brevty")
    with pytest.raises(ConfigError, match=r"reward 'my_rewards2:LIMIT' is a int, not a function"):
        load_reward_function("my_rewards2:LIMIT")


def test_a_missing_module_lists_the_nearest_of_the_directory(folder: Path) -> None:
    (folder / "my_rewards3.py").write_text("")
    with pytest.raises(ConfigError, match=r"no module 'my_reward3'; in .*did you mean 'my_rewards3'"):
        load_reward_function("my_reward3:brevity")
    with pytest.raises(ConfigError, match=r"reward 'nowhere.inside:f': no module 'nowhere'"):
        load_reward_function("nowhere.inside:f")


def test_a_module_that_fails_says_why(folder: Path) -> None:
    (folder / "needs_more.py").write_text("import absent_package\n")
    (folder / "broken_module.py").write_text("1 / 0\n")
    (folder / "script.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(ConfigError, match="importing 'needs_more' needs 'absent_package', which is missing"):
        load_reward_function("needs_more:f")
    with pytest.raises(ConfigError, match=r"importing 'broken_module' failed: ZeroDivisionError"):
        load_reward_function("broken_module:f")
    with pytest.raises(ConfigError, match=r"importing 'script' failed: SystemExit\(0\)"):
        load_reward_function("script:f")


@pytest.mark.parametrize("reference", ["rewards", "rewards:", ":brevity", ""])
def test_another_form_is_refused(reference: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form module:function"):
        load_reward_function(reference)
