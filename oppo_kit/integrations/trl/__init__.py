"""Drop-in trainers for users of TRL: the same constructor arguments, and ``overlap=OverlapConfig(...)``.

    from oppo_kit import OverlapConfig
    from oppo_kit.integrations.trl import OverlapGRPOTrainer

    trainer = OverlapGRPOTrainer(..., overlap=OverlapConfig(delta=8))

Importing this imports no TRL: names are resolved when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oppo_kit.integrations.trl.grpo import OverlapGRPOTrainer
    from oppo_kit.integrations.trl.online_dpo import OverlapOnlineDPOTrainer
    from oppo_kit.integrations.trl.ppo import OverlapPPOTrainer
    from oppo_kit.integrations.trl.ppo_config import OverlapPPOConfig
    from oppo_kit.integrations.trl.rloo import OverlapRLOOTrainer

_HOMES = {
    "OverlapGRPOTrainer": "oppo_kit.integrations.trl.grpo",
    "OverlapOnlineDPOTrainer": "oppo_kit.integrations.trl.online_dpo",
    "OverlapPPOConfig": "oppo_kit.integrations.trl.ppo_config",
    "OverlapPPOTrainer": "oppo_kit.integrations.trl.ppo",
    "OverlapRLOOTrainer": "oppo_kit.integrations.trl.rloo",
}

__all__ = [
    "OverlapGRPOTrainer",
    "OverlapOnlineDPOTrainer",
    "OverlapPPOConfig",
    "OverlapPPOTrainer",
    "OverlapRLOOTrainer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'oppo_kit.integrations.trl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
