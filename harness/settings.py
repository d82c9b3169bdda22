"""One training configuration from its layers: defaults < task < task and algorithm < YAML < options < ``--set``.

Where no layer names a task, the model's alias does. Δ, where no layer sets it, is B / 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.models import default_task
from harness.workloads.base import get_task
from oppo_kit.config import TrainConfig, apply_overrides, parse_config
from oppo_kit.errors import ConfigError
from oppo_kit.registry import create_algorithm


def load_train_config(
    config_file: Path | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> TrainConfig:
    """Settle every setting, the algorithm's own included.

    Args:
        config_file: YAML with TrainConfig's keys.
        options: command line options; None values are left out.
        overrides: ``a.b=value``, the last word.

    Raises:
        ConfigError: a key or value that does not fit, an unknown task or algorithm, an unreadable file.
    """
    own = _merge(_read_yaml(config_file) if config_file else {}, _given(options or {}))
    own = apply_overrides(own, overrides)
    if own.get("task") is None:
        own["task"] = default_task(str(own.get("model"))) or TrainConfig.model_fields["task"].default
    task = get_task(str(own["task"]))
    algo = str(own.get("algo", TrainConfig.model_fields["algo"].default))
    values = _merge(task.default_overrides, task.algorithm_overrides.get(algo, {}))
    train = _with_default_delta(_merge(values, own), source=str(config_file or "settings"))
    create_algorithm(train.algo, train.algo_config)
    return train


def _with_default_delta(values: dict[str, Any], *, source: str) -> TrainConfig:
    """Δ = B / 2 where nobody said anything: a mean age of half a step; less where the age cap allows less."""
    train = parse_config(TrainConfig, values, source=source)
    overlap = train.overlap
    if overlap.schedule == "sequential" or "delta" in overlap.model_fields_set:
        return train
    delta = min(train.batch_size // 2, train.batch_size * overlap.max_age)
    return train.model_copy(update={"overlap": overlap.model_copy(update={"delta": delta})})


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; pass a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text; save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds a {type(values).__name__}; it must be a mapping such as 'batch_size: 32'"
        )
    return values


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Sections are merged key by key; anything else is replaced."""
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        if isinstance(lower, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(lower, value)
        else:
            merged[key] = value
    return merged
