"""``oppo-kit train``: one run of our engine, with trackers, checkpoints and the trained model at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import set_seed

from harness.environment import quieten_transformers
from harness.runners.oppo import make_engine
from harness.workloads.loading import load_workload
from oppo_kit.checkpoint import load_checkpoint, save_checkpoint
from oppo_kit.config import TrainConfig
from oppo_kit.engine.loop import OverlapEngine
from oppo_kit.errors import StateError
from oppo_kit.telemetry.trackers import Trackers, open_trackers
from oppo_kit.types import StepReport

CONFIG_NAME = "config.yaml"
LOG_NAME = "steps.jsonl"


def run_training(
    train: TrainConfig,
    folder: Path,
    console: Console,
    *,
    report_to: Sequence[str] = (),
    save_every: int = 0,
    is_resumed: bool = False,
) -> Path:
    """Train and save; returns the folder of the model.

    Args:
        train: the configuration; written beside the model.
        folder: for model, checkpoint, configuration and ``steps.jsonl``.
        console: for the progress.
        report_to: trackers by accelerate's names.
        save_every: steps between checkpoints; 0: only at the end.
        is_resumed: go on from the folder's checkpoint.

    Raises:
        StateError: the folder holds another run, or nothing to resume.
    """
    _claim_folder(folder, train, is_resumed)
    quieten_transformers()
    set_seed(train.seed)
    accelerator = Accelerator(project_dir=str(folder))
    workload = load_workload(train, num_eval_problems=0)
    with make_engine(train, workload, accelerator=accelerator) as engine:
        if is_resumed:
            load_checkpoint(folder, engine)
        trackers = open_trackers(accelerator, report_to, "oppo_kit", train.model_dump(mode="json"))
        try:
            _train(engine, folder, console, trackers, save_every)
        finally:
            trackers.close()
        engine.learner.save_pretrained(folder / "model", workload.tokenizer)
    return folder / "model"


def _train(
    engine: OverlapEngine, folder: Path, console: Console, trackers: Trackers, save_every: int
) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress, (folder / LOG_NAME).open("a") as log:
        bar = progress.add_task("training", total=engine.num_steps, completed=engine.num_steps_done, note="")
        for report in engine.run():
            metrics = step_metrics(report)
            trackers.log(report.step, metrics)
            log.write(json.dumps({"step": report.step, **metrics}) + "\n")
            log.flush()
            reward = "" if report.reward_mean is None else f", reward {report.reward_mean:.3f}"
            progress.update(bar, advance=1, note=f"{report.step_s:.2f} s/step{reward}")
            is_last = engine.num_steps_done == engine.num_steps
            if is_last or (save_every and engine.num_steps_done % save_every == 0):
                save_checkpoint(folder, engine)


def step_metrics(report: StepReport) -> dict[str, float]:
    """TRL's metric names as the algorithm gives them, and ours under ``oppo/``."""
    numbers: Mapping[str, Any] = {
        key: value
        for key, value in asdict(report).items()
        if isinstance(value, (int, float)) and key not in ("step", "reward_mean")
    }
    lengths = report.trained_lengths
    ours = {f"oppo/{key}": float(value) for key, value in numbers.items()}
    ours |= {f"oppo/rejected/{reason}": float(count) for reason, count in report.rejected.items()}
    if lengths:
        ours["oppo/response_length_mean"] = sum(lengths) / len(lengths)
        ours["oppo/response_length_max"] = float(max(lengths))
    episodes_per_s = report.responses_trained / report.step_s if report.step_s else 0.0
    return report.metrics | {"eps": episodes_per_s} | ours


def _claim_folder(folder: Path, train: TrainConfig, is_resumed: bool) -> None:
    """Refuse to mix two runs in one folder; write down what is run."""
    config_file = folder / CONFIG_NAME
    settings = train.model_dump(mode="json")
    if config_file.exists():
        if not is_resumed:
            raise StateError(f"{folder} holds a run already; pass --resume to go on, or another --out")
        saved = yaml.safe_load(config_file.read_text())
        different = sorted(key for key in settings | saved if settings.get(key) != saved.get(key))
        if different:
            details = "; ".join(
                f"{key}: saved {saved.get(key)!r}, now {settings.get(key)!r}" for key in different
            )
            raise StateError(
                f"the run in {folder} has another configuration ({details}); resume with the saved one"
            )
    folder.mkdir(parents=True, exist_ok=True)
    config_file.write_text(yaml.safe_dump(settings, sort_keys=False))
