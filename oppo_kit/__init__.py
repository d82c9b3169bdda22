"""Online RL of language models with an overlapped pipeline.

The public names; everything else is found by its module. Importing this loads no model library: names are resolved
when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oppo_kit.algorithm import AlgorithmBase, AlgorithmConfig
    from oppo_kit.build import build_engine
    from oppo_kit.config import LearnerConfig, OverlapConfig, SamplingConfig, TrainConfig
    from oppo_kit.data import PromptDataset
    from oppo_kit.engine.loop import OverlapEngine
    from oppo_kit.errors import OppoError

__version__ = "0.1.0"

_HOMES = {
    "AlgorithmBase": "oppo_kit.algorithm",
    "AlgorithmConfig": "oppo_kit.algorithm",
    "LearnerConfig": "oppo_kit.config",
    "OppoError": "oppo_kit.errors",
    "OverlapConfig": "oppo_kit.config",
    "OverlapEngine": "oppo_kit.engine.loop",
    "PromptDataset": "oppo_kit.data",
    "SamplingConfig": "oppo_kit.config",
    "TrainConfig": "oppo_kit.config",
    "build_engine": "oppo_kit.build",
}

__all__ = [
    "AlgorithmBase",
    "AlgorithmConfig",
    "LearnerConfig",
    "OppoError",
    "OverlapConfig",
    "OverlapEngine",
    "PromptDataset",
    "SamplingConfig",
    "TrainConfig",
    "build_engine",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'oppo_kit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
