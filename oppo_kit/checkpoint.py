"""A run on disk: the learner's weights and optimizer, the engine's rollouts and counts, in one file.

Written to a temporary name, flushed and renamed, so a kill leaves the last whole checkpoint. Tensors and primitives
only: read with ``weights_only=True``.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import torch

from oppo_kit.engine.loop import OverlapEngine
from oppo_kit.errors import StateError

CHECKPOINT_NAME = "checkpoint.pt"


def save_checkpoint(folder: Path, engine: OverlapEngine) -> Path:
    """Write ``folder/checkpoint.pt``; call it between two steps."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / CHECKPOINT_NAME
    temporary = file.with_suffix(".tmp")
    with temporary.open("wb") as stream:
        torch.save({"learner": engine.learner.state_dict(), "engine": engine.state_dict()}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
    return file


def load_checkpoint(folder: Path, engine: OverlapEngine) -> None:
    """Go on where ``save_checkpoint`` was called; the engine must be built from the same configuration.

    Raises:
        StateError: there is no checkpoint, it is damaged, or it belongs to another configuration.
    """
    file = folder / CHECKPOINT_NAME
    if not file.exists():
        raise StateError(
            f"there is no {CHECKPOINT_NAME} in {folder}; start without --resume, or pass the run's folder"
        )
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        learner_state, engine_state = state["learner"], state["engine"]
    except (RuntimeError, EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise StateError(f"{file} is damaged: {error}; restore a copy or start anew") from error
    try:
        engine.learner.load_state_dict(learner_state)
    except (RuntimeError, ValueError, LookupError, TypeError) as error:
        raise StateError(f"{file} does not fit this configuration's models or optimizer: {error}") from error
    engine.load_state_dict(engine_state)
