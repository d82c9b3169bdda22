"""Accelerators of a process share their state: what one test leaves there must not reach another."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _no_loader_of_another_test() -> None:
    """A training that was broken off in an epoch's last batch would shorten what later trainers gather for metrics."""
    state = sys.modules.get("accelerate.state")
    if state is not None and state.GradientState._shared_state:
        state.GradientState._shared_state["_dataloader_references_ref"] = [None]
