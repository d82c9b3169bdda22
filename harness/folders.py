"""Folders of runs: made, claimed by one process, and written so that a reader never meets half a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oppo_kit.errors import ConfigError, StateError


def make_folder(folder: Path) -> Path:
    """The folder, with its parents.

    Raises:
        ConfigError: it is a file, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}; pass another --out") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"the folder {folder} cannot be written; pass another --out")
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes of ours out of the folder; the lock goes with the process, also when it is killed.

    Raises:
        StateError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        yield
        return
    with (make_folder(folder) / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateError(
                f"another process is at work in {folder}; wait for it, or pass another --out"
            ) from error
        yield


def write_atomically(file: Path, text: str) -> None:
    """Replace the file by way of a temporary one beside it."""
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)
