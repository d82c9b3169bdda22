"""``oppo-kit train``: one run of our engine, with trackers, checkpoints and the trained model at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import set_seed

from harness.environment import quieten_transformers
from harness.folders import locked, write_atomically
from harness.runners.oppo import make_engine
from harness.training_summary import summary_lines
from harness.workloads.loading import load_workload
from oppo_kit.checkpoint import CHECKPOINT_NAME, load_checkpoint, save_checkpoint
from oppo_kit.config import TrainConfig
from oppo_kit.engine.loop import OverlapEngine
from oppo_kit.errors import StateError
from oppo_kit.telemetry.trackers import Trackers, open_trackers
from oppo_kit.types import StepReport

CONFIG_NAME = "config.yaml"
LOG_NAME = "steps.jsonl"
# The progress shows the median of so many steps: single ones differ by their longest response.
_SHOWN_STEPS = 10
# Where there is no terminal to draw on, a run is told in so many lines.
_NUM_PLAIN_LINES = 20


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
    _check_folder(folder, train, is_resumed)
    quieten_transformers()
    set_seed(train.seed)
    accelerator = Accelerator(project_dir=str(folder))
    workload = load_workload(train, num_eval_problems=0)
    with make_engine(train, workload, accelerator=accelerator) as engine, locked(folder):
        if is_resumed:
            load_checkpoint(folder, engine)
            if engine.num_steps_done == engine.num_steps:
                console.print(_finished(engine, folder), markup=False, highlight=False)
        trackers = open_trackers(accelerator, report_to, "oppo_kit", train.model_dump(mode="json"))
        # Written last: a start that failed must not occupy the folder.
        write_atomically(folder / CONFIG_NAME, yaml.safe_dump(train.model_dump(mode="json"), sort_keys=False))
        _drop_later_steps(folder / LOG_NAME, engine.num_steps_done)
        try:
            reports = _train(engine, folder, console, trackers, save_every)
        except KeyboardInterrupt:
            console.print(_farewell(engine, folder), markup=False)
            raise
        finally:
            trackers.close()
        engine.learner.save_pretrained(folder / "model", workload.tokenizer)
    for line in summary_lines(reports):
        console.print(line, markup=False, highlight=False)
    return folder / "model"


def _train(
    engine: OverlapEngine, folder: Path, console: Console, trackers: Trackers, save_every: int
) -> list[StepReport]:
    """All remaining steps; returns their reports, without what grows with the tokens."""
    reports: list[StepReport] = []
    every = max(1, engine.num_steps // _NUM_PLAIN_LINES)
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
            finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            log.write(json.dumps({"step": report.step, "oppo/score_at": report.score_at, **finite}) + "\n")
            log.flush()
            reports.append(replace(report, spans=[], trained_lengths=[], metrics={}))
            step_s = median(done.step_s for done in reports[-_SHOWN_STEPS:])
            reward = "" if report.reward_mean is None else f", reward {report.reward_mean:.3f}"
            progress.update(bar, advance=1, note=f"{step_s:.2f} s/step{reward}")
            is_last = engine.num_steps_done == engine.num_steps
            if not console.is_terminal and (is_last or engine.num_steps_done % every == 0):
                console.print(
                    f"step {engine.num_steps_done} of {engine.num_steps}: {step_s:.2f} s/step{reward}"
                )
            if is_last or (save_every and engine.num_steps_done % save_every == 0):
                save_checkpoint(folder, engine)
    return reports


def _finished(engine: OverlapEngine, folder: Path) -> str:
    return (
        f"all {engine.num_steps} steps of this run were done already; start a longer one from its model with: "
        f"oppo-kit train --model {folder / 'model'}"
    )


def _farewell(engine: OverlapEngine, folder: Path) -> str:
    done = f"interrupted after step {engine.num_steps_done} of {engine.num_steps}"
    if (folder / CHECKPOINT_NAME).exists():
        return f"{done}; go on from the last checkpoint with: oppo-kit train --resume --out {folder}"
    return f"{done}; nothing was saved, since no checkpoint was due: set --save-every"


def step_metrics(report: StepReport) -> dict[str, float]:
    """TRL's metric names as the algorithm gives them, and ours under ``oppo/``."""
    numbers: Mapping[str, Any] = {
        key: value
        for key, value in asdict(report).items()
        if isinstance(value, (int, float)) and key not in ("step", "reward_mean")
    }
    lengths = report.trained_lengths
    ours = {f"oppo/{key}": float(value) for key, value in numbers.items()}
    ours["oppo/rejected"] = float(sum(report.rejected.values()))
    ours |= {f"oppo/rejected/{reason}": float(count) for reason, count in report.rejected.items()}
    if lengths:
        ours["oppo/response_length_mean"] = sum(lengths) / len(lengths)
        ours["oppo/response_length_max"] = float(max(lengths))
    episodes_per_s = report.responses_trained / report.step_s if report.step_s else 0.0
    return report.metrics | {"eps": episodes_per_s} | ours


def _check_folder(folder: Path, train: TrainConfig, is_resumed: bool) -> None:
    """Refuse to mix two runs in one folder. Nothing is written; a folder without a checkpoint holds no run yet."""
    has_checkpoint = (folder / CHECKPOINT_NAME).exists()
    if is_resumed and not has_checkpoint:
        raise StateError(
            f"there is no {CHECKPOINT_NAME} in {folder}: nothing was saved there yet; start without --resume, "
            "and set --save-every to save more often than at the end"
        )
    if not has_checkpoint:
        return
    if not is_resumed:
        raise StateError(f"{folder} holds a run already; pass --resume to go on, or another --out")
    saved = _read_config(folder / CONFIG_NAME)
    settings = _flat(train.model_dump(mode="json"))
    # A setting that came with an update is as it would be if nobody set it.
    defaults = _flat(TrainConfig().model_dump(mode="json"))
    values = {
        key: (saved.get(key, defaults.get(key)), settings.get(key, defaults.get(key)))
        for key in sorted(settings | saved)
    }
    different = [key for key, (before, now) in values.items() if before != now]
    if different:
        details = "; ".join(f"{key}: saved {values[key][0]!r}, now {values[key][1]!r}" for key in different)
        raise StateError(
            f"the run in {folder} has another configuration ({details}); resume with the saved one"
            + (
                ""
                if different != ["num_steps"]
                else f", or start a new run from it with --model {folder / 'model'}"
            )
        )


def _read_config(file: Path) -> dict[str, Any]:
    try:
        saved = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise StateError(
            f"cannot read {file}: {error}; restore it, or start anew in another --out"
        ) from error
    if not isinstance(saved, dict):
        raise StateError(f"{file} holds no configuration; restore it, or start anew in another --out")
    return _flat(saved)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key, so that a difference names its leaf."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _drop_later_steps(log_file: Path, num_steps_done: int) -> None:
    """Steps after the checkpoint are done again, so their lines go; a half line of a kill goes too."""
    if not log_file.exists():
        return
    kept = []
    for line in log_file.read_text(encoding="utf-8").splitlines():
        try:
            step = json.loads(line)["step"]
        except (ValueError, LookupError, TypeError):
            continue
        if step < num_steps_done:
            kept.append(line + "\n")
    write_atomically(log_file, "".join(kept))
