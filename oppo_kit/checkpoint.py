"""A run on disk: the learner's weights and optimizer, the engine's rollouts and counts, in one file.

Written to a temporary name, flushed and renamed, so a kill leaves the last whole checkpoint. Tensors and primitives
only: read with ``weights_only=True``.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path

import torch

from oppo_kit.engine.loop import OverlapEngine
from oppo_kit.errors import StateError
from oppo_kit.protocols import State

CHECKPOINT_NAME = "checkpoint.pt"


def save_checkpoint(folder: Path, engine: OverlapEngine) -> Path:
    """Write ``folder/checkpoint.pt``; call it between two steps."""
    file = folder / CHECKPOINT_NAME
    write_state(file, {"learner": engine.learner.state_dict(), "engine": engine.state_dict()})
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
    state = read_state(file, ("learner", "engine"))
    try:
        engine.learner.load_state_dict(state["learner"])
    except (RuntimeError, ValueError, LookupError, TypeError) as error:
        raise StateError(f"{file} does not fit this configuration's models or optimizer: {error}") from error
    engine.load_state_dict(state["engine"])


def write_state(file: Path, state: State) -> None:
    """Write tensors and primitives, all of them or nothing; the folder is made if need be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    with temporary.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)


def read_state(file: Path, names: Sequence[str]) -> State:
    """What ``write_state`` wrote, with all of these entries.

    Raises:
        StateError: it is damaged, or lacks one of them.
    """
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        return {name: state[name] for name in names}
    except (RuntimeError, EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise StateError(f"{file} is damaged: {error}; restore a copy or start anew") from error
