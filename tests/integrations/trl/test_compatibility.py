"""A TRL that is not the one the trainers were written for is refused by name."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from oppo_kit.errors import ConfigError, MissingExtraError
from oppo_kit.integrations import trl as integration
from oppo_kit.integrations.trl import compatibility
from oppo_kit.integrations.trl.compatibility import (
    is_supported,
    require_attributes,
    require_methods,
    require_trl,
    require_word,
)


def test_versions_are_those_that_were_tested() -> None:
    assert [
        is_supported(v) for v in ("1.11.9", "1.12.0", "1.14.2", "1.16.3", "1.17.0", "2.0", "nonsense")
    ] == [
        False,
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_another_version_is_refused_with_both_named(monkeypatch) -> None:
    monkeypatch.setattr(compatibility, "import_module", lambda name: SimpleNamespace(__version__="1.20.0"))
    with pytest.raises(
        ConfigError, match=r"trl 1.20.0 is installed; .* work with trl 1.12 to 1.16: pip install"
    ):
        require_trl()


def test_a_missing_trl_names_the_extra(monkeypatch) -> None:
    def fail(name: str):
        raise ModuleNotFoundError(name=missing)

    monkeypatch.setattr(compatibility, "import_module", fail)
    missing = "trl"
    with pytest.raises(MissingExtraError, match=r"trl is not installed; .* 'oppo-kit\[trl\]'"):
        require_trl()
    missing = "datasets"  # TRL's own dependency, which is its own error
    with pytest.raises(ModuleNotFoundError):
        require_trl()


class Trainer:
    def score(self, rows, extra=None):
        return rows["old"]


def test_a_method_that_is_gone_or_takes_something_else_is_named() -> None:
    require_methods(Trainer, {"score": ("rows",)})
    with pytest.raises(
        ConfigError, match="is not the trainer that overlap was written for: it has no method 'gone'"
    ):
        require_methods(Trainer, {"gone": ()})
    with pytest.raises(
        ConfigError, match=r"'score' takes \['rows', 'extra'\], not \['inputs'\] first; install"
    ):
        require_methods(Trainer, {"score": ("inputs",)})


def test_a_key_that_the_loss_does_not_read_is_named() -> None:
    require_word(Trainer, "score", "old")
    with pytest.raises(ConfigError, match="'score' does not read 'renamed'"):
        require_word(Trainer, "score", "renamed")


def test_missing_attributes_are_named() -> None:
    require_attributes(SimpleNamespace(a=1), ["a"])
    with pytest.raises(ConfigError, match="it has no attribute 'b', 'c'"):
        require_attributes(SimpleNamespace(a=1), ["c", "a", "b"])


def test_names_are_resolved_when_they_are_used() -> None:
    code = (
        "import sys; from oppo_kit.integrations import trl; assert 'trl' not in sys.modules; "
        "assert 'torch' not in sys.modules; assert 'OverlapGRPOTrainer' in dir(trl)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    for name in ("OverlapGRPOTrainer", "OverlapRLOOTrainer"):
        assert getattr(integration, name).__name__ == name
    with pytest.raises(AttributeError, match=r"module 'oppo_kit.integrations.trl' has no attribute 'Nope'"):
        integration.Nope  # noqa: B018
