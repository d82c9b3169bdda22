"""A step's report, from what the engine counted and what its parts say."""

from __future__ import annotations

from collections.abc import Sequence

from oppo_kit.engine.buffer import OvercommitBuffer
from oppo_kit.engine.controllers.chunk import ChunkPlan
from oppo_kit.telemetry.spans import ACTOR_LANE
from oppo_kit.types import RolloutBatch, Span, StepReport


def make_report(
    batch: RolloutBatch,
    buffer: OvercommitBuffer,
    *,
    step: int,
    is_trained: bool,
    delta: int,
    plan: ChunkPlan,
    tokens_decoded: int,
    times: dict[str, float],
    spans: Sequence[Span],
    metrics: dict[str, float],
) -> StepReport:
    """The report of a step whose batch was trained, or skipped."""
    ages = [group.age(batch.version) for group in batch.groups]
    lengths = batch.response_lengths.tolist()
    rewards = batch.scores.get("reward")
    of_scorers = [span for span in spans if span.lane != ACTOR_LANE]
    return StepReport(
        step=step,
        version=batch.version,
        delta=delta,
        score_at=plan.score_at,
        chunk_tokens=plan.chunk_tokens,
        groups_trained=len(batch.groups) if is_trained else 0,
        responses_trained=batch.num_rows if is_trained else 0,
        drawn=buffer.num_drawn,
        trained=buffer.num_trained,
        in_flight=buffer.num_in_flight,
        queued=buffer.num_queued,
        rejected=dict(buffer.rejected),
        tokens_decoded=tokens_decoded,
        tokens_trained=sum(lengths) if is_trained else 0,
        **times,
        score_busy_s=sum(span.stop_s - span.start_s for span in of_scorers),
        tokens_prefetched=_tokens(of_scorers, "feed"),
        tokens_scored=_tokens(of_scorers, "score"),
        age_mean=sum(ages) / len(ages),
        age_max=max(ages),
        num_deferred=sum(group.admitted_step < step for group in batch.groups),
        trained_lengths=lengths,
        reward_mean=None if rewards is None else float(rewards.nanmean()),
        metrics=metrics | _kept_mass(batch),
        spans=sorted(spans, key=lambda span: span.start_s),
    )


def _tokens(spans: Sequence[Span], kind: str) -> int:
    return sum(span.num_tokens for span in spans if span.name.startswith(f"{kind} "))


def _kept_mass(batch: RolloutBatch) -> dict[str, float]:
    """Reported where truncation took something away."""
    kept = batch.kept_mass_mean
    return {"oppo/kept_mass": kept} if kept < 1.0 else {}
