"""All of these need TRL; some start tiny trainings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState
from trl_trainers import require_supported_trl


@pytest.fixture(autouse=True, scope="session")
def _trl() -> None:
    require_supported_trl()


@pytest.fixture(autouse=True)
def _own_precision() -> Iterator[None]:
    """A trainer with autocast sets it for all later accelerators of the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
