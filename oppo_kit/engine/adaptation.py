"""What a step does differently from the last one: Δ and how responses are scored, by the two controllers."""

from __future__ import annotations

from typing import Any

from oppo_kit.config import OverlapConfig
from oppo_kit.engine.controllers.chunk import ChunkController, ChunkPlan, FixedChunk, create_chunk_controller
from oppo_kit.engine.controllers.delta import DeltaController, create_delta_controller
from oppo_kit.types import EFFECTIVE_SAMPLE, StepReport


class Adaptation:
    """Reads the settings at the start and every report afterwards."""

    def __init__(self, overlap: OverlapConfig) -> None:
        self._delta = _delta_controller(overlap)
        self._chunk = _chunk_controller(overlap)

    @property
    def delta(self) -> int:
        """Δ of the next step."""
        return self._delta.delta

    @property
    def plan(self) -> ChunkPlan:
        """How the next step scores."""
        return self._chunk.plan

    def observe(self, report: StepReport) -> None:
        """Learn from a step; one whose batch was skipped says nothing."""
        if not report.responses_trained:
            return
        if report.reward_mean is not None:
            self._delta.observe(report.reward_mean, report.metrics.get(EFFECTIVE_SAMPLE))
        if report.tokens_decoded and report.tokens_trained:
            # By the tokens of each stage, so that a step that happens to train much costs no more. Training counts,
            # since scorers that are still at work slow it down.
            decode_s = (report.generate_s + report.score_s) / report.tokens_decoded
            cost_s = decode_s + report.train_s / report.tokens_trained
            self._chunk.observe(cost_s, report.tokens_trained / report.responses_trained)

    def state_dict(self) -> dict[str, Any]:
        """Primitives."""
        return {"delta": self._delta.state_dict(), "chunk": self._chunk.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``.

        Raises:
            StateError: it is of other controllers.
        """
        self._delta.load_state_dict(state["delta"])
        self._chunk.load_state_dict(state["chunk"])


def _delta_controller(overlap: OverlapConfig) -> DeltaController:
    kind = "fixed" if overlap.schedule == "sequential" else overlap.delta_control
    return create_delta_controller(kind, delta_max=overlap.delta)


def _chunk_controller(overlap: OverlapConfig) -> ChunkController:
    if overlap.score_at == "auto":
        sizes = sorted(set(overlap.chunk_candidates))
        # A run too short for the search keeps the first: it costs least where it does not pay.
        candidates = [
            ChunkPlan("sample"),
            ChunkPlan("batch"),
            *(ChunkPlan("chunk", chunk_tokens=size) for size in reversed(sizes)),
        ]
        return create_chunk_controller(overlap.chunk_control, plan=candidates[0], candidates=candidates)
    if overlap.score_at == "chunk":
        return FixedChunk(ChunkPlan("chunk", chunk_tokens=overlap.chunk_tokens))
    return FixedChunk(ChunkPlan(overlap.score_at))
