"""Fixtures of several files: no hub can be reached, or a made-up one answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets
import huggingface_hub.constants
import pytest

from harness.workloads import free_form, math_task, tiny


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(math_task, "NUM_TRAIN_ROWS", 40)
    monkeypatch.setattr(free_form, "NUM_STAND_IN_ROWS", 40)
    monkeypatch.setattr(tiny, "NUM_TRAIN_PROBLEMS", 40)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, list[dict[str, Any]]]], None]:
    """A hub with the given splits or data folders."""

    def install(parts: dict[str, list[dict[str, Any]]]) -> None:
        def load_dataset(
            hub_id: str, config: str | None, *, split: str, data_dir: str | None, streaming: bool
        ) -> Any:
            return iter(parts[data_dir or split])

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    return install
