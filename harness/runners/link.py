"""The child's side of the pipes to the process that started it.

Standard output becomes the log (whatever a reward function prints goes there), progress lines go through the pipe, and
the child ends when its parent does: standard input then reports its end.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TextIO

# Set by the parent; without it a run that was started by hand is nobody's child.
PARENT_VARIABLE = "OPPO_KIT_HAS_PARENT"


def connect_to_parent() -> TextIO:
    """The stream for progress lines; call it once, before anything is printed."""
    if os.environ.get(PARENT_VARIABLE) != "1":
        return sys.stdout
    progress = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    return progress


def _end_with_parent() -> None:
    """Blocks until the parent closes the pipe or dies, then ends the process at once."""
    # Not through sys.stdin: its lock would be held when the interpreter shuts down.
    while os.read(0, 1024):
        pass
    os._exit(1)
