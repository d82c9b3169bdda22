"""Where scorers run: what ``placement: auto`` stands for, and handles to scorers that run there."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from oppo_kit.config import OverlapConfig
from oppo_kit.placement.inline import InlinePlacement
from oppo_kit.placement.process import place_in_process
from oppo_kit.placement.thread import place_in_thread
from oppo_kit.protocols import Scorer, ScorerHandle


def settle_placement(
    overlap: OverlapConfig, device: torch.device, *, num_threads: int | None = None
) -> OverlapConfig:
    """The settings with ``auto`` replaced by a placement, and on a CPU with a number of threads for decoding.

    Nothing to overlap: inline. On a CPU: a process, since two threads of one interpreter get in each other's way; but a
    thread with ``stream_critic``. On a GPU: a thread, with a stream of its own. Decoding leaves scorers beside it as
    many CPU cores as they have threads.

    Args:
        overlap: settings.
        device: of the policy.
        num_threads: of the actor; None: torch's.
    """
    on_cpu = device.type == "cpu"
    changes: dict[str, object] = {}
    placement = overlap.placement
    if placement == "auto":
        if overlap.scorer_cores is not None:
            placement = "process"
        elif overlap.score_at == "batch":
            placement = "inline"
        else:
            placement = "process" if on_cpu and not overlap.stream_critic else "thread"
        changes["placement"] = placement
    overlaps = overlap.score_at != "batch" and placement != "inline"
    if overlap.decode_threads is None and on_cpu and overlaps:
        num_threads = torch.get_num_threads() if num_threads is None else num_threads
        changes["decode_threads"] = max(1, num_threads - overlap.scorer_threads)
    return overlap.model_copy(update=changes)


def place(
    models: Mapping[str, Scorer], overlap: OverlapConfig, device: torch.device
) -> Mapping[str, ScorerHandle]:
    """All of them at the settled placement.

    Args:
        models: scorers by name.
        overlap: settings without ``auto``.
        device: of the policy, for scorers without a ``scorer_device``.

    Raises:
        PartFailedError: a scoring process did not start.
        ConfigError: the scorers cannot be sent to it, or its cores are not there.
    """
    if overlap.placement == "inline" or not models:
        return {name: InlinePlacement(scorer) for name, scorer in models.items()}
    if overlap.placement == "thread":
        return place_in_thread(models, num_threads=overlap.scorer_threads)
    return place_in_process(
        models,
        num_threads=overlap.scorer_threads,
        cores=overlap.scorer_cores,
        device=overlap.scorer_device or str(device),
    )
