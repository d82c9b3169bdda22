"""Groups to primitives and back, so that ``torch.load(weights_only=True)`` reads an engine's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oppo_kit.errors import StateError
from oppo_kit.types import Group, Prompt, Rollout, RolloutKey

STATE_VERSION = 4
# What an engine that goes on from a state must have in common with the one that saved it.
_IDENTITY = ("state_version", "batch_size", "group_size")


def check_state(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Whether an engine can go on from a state.

    Args:
        state: the saved one.
        own: that of the engine.

    Raises:
        StateError: it is of another format, B or group size, or something is missing.
    """
    for field in _IDENTITY:
        if state.get(field) != own[field]:
            raise StateError(f"saved state has {field}={state.get(field)}, this engine has {own[field]}")
    missing = sorted(set(own) - set(state))
    if missing:
        raise StateError(f"saved state lacks {missing}; it is damaged")


def pack_group(group: Group) -> dict[str, Any]:
    """A group as lists, numbers and strings."""
    return {
        "draw_id": group.draw_id,
        "prompt_ids": list(group.prompt.token_ids),
        "max_new_tokens": group.prompt.max_new_tokens,
        "columns": dict(group.prompt.columns),
        "admitted_step": group.admitted_step,
        "ended_step": group.ended_step,
        "rollouts": [
            {
                "token_ids": list(rollout.token_ids),
                "behaviour_logprobs": list(rollout.behaviour_logprobs),
                "versions": list(rollout.versions),
                "proximal_logprobs": list(rollout.proximal_logprobs),
                "sampling_logprobs": list(rollout.sampling_logprobs),
                "finish_reason": rollout.finish_reason,
                "end_tick": rollout.end_tick,
                "scores": dict(rollout.scores),
            }
            for rollout in group.rollouts
        ],
    }


def unpack_group(packed: dict[str, Any]) -> Group:
    """The inverse of ``pack_group``.

    Raises:
        StateError: a rollout whose per-token lists differ in length, or that exceeds its limit.
    """
    prompt = Prompt(
        draw_id=packed["draw_id"],
        token_ids=tuple(packed["prompt_ids"]),
        max_new_tokens=packed["max_new_tokens"],
        columns=dict(packed["columns"]),
    )
    rollouts = [
        Rollout(key=RolloutKey(prompt.draw_id, index), prompt=prompt, **_copied(fields))
        for index, fields in enumerate(packed["rollouts"])
    ]
    for rollout in rollouts:
        lengths = {
            len(rollout.token_ids),
            len(rollout.behaviour_logprobs),
            len(rollout.versions),
            len(rollout.proximal_logprobs),
            len(rollout.sampling_logprobs),
        }
        if len(lengths) != 1 or rollout.remaining_tokens < 0:
            raise StateError(
                f"saved rollout {rollout.key} is damaged: {len(rollout.token_ids)} tokens, "
                f"{len(rollout.behaviour_logprobs)} log-probs, {len(rollout.versions)} versions, "
                f"limit {prompt.max_new_tokens}"
            )
    return Group(
        prompt=prompt,
        rollouts=rollouts,
        admitted_step=packed["admitted_step"],
        ended_step=packed["ended_step"],
    )


def _copied(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.copy() if isinstance(value, (list, dict)) else value for name, value in fields.items()
    }
