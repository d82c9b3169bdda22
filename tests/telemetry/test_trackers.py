"""Accelerate's trackers through ours, with a real tensorboard event file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator, tracking

from oppo_kit.errors import ConfigError, MissingExtraError, UnknownNameError
from oppo_kit.telemetry.trackers import open_trackers


def read_scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_what_is_logged_to_tensorboard_is_read_back_step_by_step(tmp_path: Path) -> None:
    trackers = open_trackers(Accelerator(project_dir=tmp_path), ["tensorboard"], "chains", {})
    trackers.log(0, {"reward_mean": 0.25, "kl": 1.5})
    trackers.log(3, {"reward_mean": 0.5})
    trackers.close()
    assert read_scalars(tmp_path / "chains", "reward_mean") == [(0, 0.25), (3, 0.5)]
    assert read_scalars(tmp_path / "chains", "kl") == [(0, 1.5)]


def test_a_nested_configuration_is_stored_flat_with_text_for_what_is_no_primitive(tmp_path: Path) -> None:
    config = {"batch_size": 8, "overlap": {"delta": 4, "stop": None}, "betas": [0.9, 0.95], "is_quick": True}
    open_trackers(Accelerator(project_dir=tmp_path), ["tensorboard"], "chains", config).close()
    (stored,) = (tmp_path / "chains").glob("*/hparams.yml")
    assert stored.read_text().splitlines() == [
        "batch_size: 8",
        "betas: '[0.9, 0.95]'",
        "is_quick: true",
        "overlap.delta: 4",
        "overlap.stop: None",
    ]


def test_without_trackers_logging_goes_nowhere(tmp_path: Path) -> None:
    trackers = open_trackers(Accelerator(project_dir=tmp_path), [], "chains", {"a": 1})
    trackers.log(0, {"reward_mean": 0.25})
    trackers.close()
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_is_closed_once_however_often_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []

    def finish(self: tracking.GeneralTracker) -> None:
        closed.append(self)

    monkeypatch.setattr(tracking.TensorBoardTracker, "finish", finish)
    accelerator = Accelerator(project_dir=tmp_path)
    trackers = open_trackers(accelerator, ["tensorboard"], "chains", {})
    trackers.close()
    trackers.close()
    assert len(closed) == 1
    assert accelerator.trackers == []


@pytest.mark.parametrize("name", ["tensorbord", "all"])
def test_an_unknown_tracker_is_refused_with_the_known_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        UnknownNameError, match=rf"unknown tracker '{name}'; .*known: .*tensorboard, trackio, wandb"
    ):
        open_trackers(Accelerator(project_dir=tmp_path), [name], "chains", {})


def test_a_misspelt_tracker_is_told_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'tensorboard'"):
        open_trackers(Accelerator(project_dir=tmp_path), ["tensorbord"], "chains", {})


def test_without_tensorboard_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "get_available_trackers", list)
    with pytest.raises(
        MissingExtraError, match=r"tensorboard is not installed; .*pip install 'oppo-kit\[trackers\]'"
    ):
        open_trackers(Accelerator(project_dir=tmp_path), ["tensorboard"], "chains", {})


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("comet_ml", "comet-ml")])
def test_a_tracker_outside_the_extra_names_its_own_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setattr(tracking, "get_available_trackers", list)
    with pytest.raises(ConfigError, match=f"tracker '{name}' needs a package .* run: pip install {package}"):
        open_trackers(Accelerator(project_dir=tmp_path), [name], "chains", {})


def test_a_tracker_that_writes_files_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"tracker 'tensorboard' writes files.*give it a project_dir"):
        open_trackers(Accelerator(), ["tensorboard"], "chains", {})
