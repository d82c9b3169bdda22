"""Names of models: an alias, a hub id or a folder becomes something that transformers can load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.packaged_models import smollm2_policy, smollm2_reward
from oppo_kit.errors import ConfigError, UnknownNameError

Role = Literal["policy", "reward", "critic"]

_ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True, slots=True)
class ModelAlias:
    """What a short name stands for.

    Attributes:
        policy: folder or hub id of the language model, or a function that makes the folder when it is asked for.
        reward: the same of a reward model with the same vocabulary; None: there is none.
        is_offline: both come with this package, no network is needed.
        task: the task that the model is for, where none is named; None: the general default.
    """

    policy: str | Callable[[], Path]
    reward: str | Callable[[], Path] | None = None
    is_offline: bool = False
    task: str | None = None


ALIASES = {
    "qwen2.5-3b": ModelAlias("Qwen/Qwen2.5-3B-Instruct", task="math"),
    "qwen2.5-7b": ModelAlias("Qwen/Qwen2.5-7B-Instruct", task="math"),
    "smollm2-135m": ModelAlias(smollm2_policy, smollm2_reward, task="reviews"),
    "tiny": ModelAlias(str(_ASSETS / "tiny" / "policy"), str(_ASSETS / "tiny" / "reward"), is_offline=True),
}


def offline_names() -> list[str]:
    """Aliases that work without a network, sorted."""
    return sorted(name for name, alias in ALIASES.items() if alias.is_offline)


def resolve_model(name: str, role: Role = "policy") -> str:
    """Folder or hub id of an alias, a folder or a hub id.

    An alias of a pair gives its reward model for ``reward``; for ``critic`` too, since that has the same
    class, but an alias without one gives its language model.

    Raises:
        UnknownNameError: a short name that is neither an alias nor a folder.
        ConfigError: an alias without a reward model is asked for one, or a path is no folder.
        OppoError: a model that is made on demand cannot be made.
    """
    alias = ALIASES.get(name)
    if alias is not None:
        if role == "policy" or (role == "critic" and alias.reward is None):
            return _location(alias.policy)
        if alias.reward is None:
            with_reward = ", ".join(sorted(key for key, value in ALIASES.items() if value.reward is not None))
            raise ConfigError(
                f"model {name!r} comes without a reward model; pass --reward a hub id or folder of a "
                "sequence classifier with the same vocabulary, a module:function, or an alias that has one: "
                f"{with_reward}"
            )
        return _location(alias.reward)
    if Path(name).is_dir():
        return name
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise ConfigError(
            f"{role} model: {name!r} is no folder; pass one written by save_pretrained, a hub id or an alias"
        )
    if "/" not in name:
        raise UnknownNameError("model", name, ALIASES, "A folder or a hub id (owner/name) will do as well.")
    return name


def default_task(model: str) -> str | None:
    """The task that an alias is for; None for other names."""
    alias = ALIASES.get(model)
    return None if alias is None else alias.task


def _location(where: str | Callable[[], Path]) -> str:
    return where if isinstance(where, str) else str(where())
