"""The overlap engine: fill, decode, choose, score, learn, hand over the weights.

    admit to B + Δ ─► decode a chunk, hand it to the scorers ─► has a batch ended? ─no─┐   consumes: prompts, chunks,
         ▲                  ▲──────────────────────────────────────────────────────────┘   scores; waits for: the first
         │                        yes ─► scores ─► prepare ─► update ─► load_weights(version + 1)  B groups, scores
         └────────────────────────── the unfinished keep their tokens ◄──────────┘

Knows no model, tokenizer or algorithm; all parts come through ``oppo_kit.protocols``. It runs in one thread; only
scorer handles work elsewhere. Whatever a part raises ends the step with an error that names the part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from oppo_kit.config import OverlapConfig
from oppo_kit.engine.adaptation import Adaptation
from oppo_kit.engine.buffer import Ended, OvercommitBuffer
from oppo_kit.engine.checks import check_settings
from oppo_kit.engine.parts import named_failure
from oppo_kit.engine.reporting import make_report
from oppo_kit.engine.schedules import create_schedule
from oppo_kit.engine.scoring import ScoringDesk
from oppo_kit.engine.state import STATE_VERSION, check_state, pack_group, unpack_group
from oppo_kit.engine.streaks import RejectedGroups, SkippedBatches
from oppo_kit.errors import NonFiniteError, PartFailedError, StateError
from oppo_kit.protocols import (
    Algorithm,
    Clock,
    EventListener,
    Generator,
    Learner,
    PromptSource,
    ScorerHandle,
    State,
)
from oppo_kit.telemetry.clock import MonotonicClock
from oppo_kit.telemetry.stopwatch import Stopwatch
from oppo_kit.types import Group, Rollout, RolloutBatch, RolloutKey, StepReport, TrainBatch

NON_FINITE_LOSS = "non_finite"


class OverlapEngine:
    """Trains ``num_steps`` batches of B groups with B + Δ in the air.

    ``run()`` is the whole loop. For a loop of one's own: ``batch = engine.collect()`` and
    ``report = engine.step(batch)``, in turn, ``num_steps`` times; ``engine.commit(batch)`` instead of ``step`` where
    the loop itself trains the policy.

    Args:
        algorithm: what is learned from a batch.
        generator: samples responses; holds the same weights as the learner at the start (version 0).
        scorers: by the names that the algorithm asks for; ``critic`` too, where its values are streamed.
        learner: owns the models under training.
        prompts: draw n is prompt n.
        batch_size: B, groups per step.
        num_steps: steps in all; steps × B groups are drawn, plus one for each that scoring rejects.
        overlap: schedule, Δ, chunk size.
        clock: monotonic seconds.
        listeners: called with every event.

    Raises:
        ConfigError: the algorithm needs a scorer that is not given, or the settings contradict each other.
    """

    def __init__(
        self,
        *,
        algorithm: Algorithm,
        generator: Generator,
        scorers: Mapping[str, ScorerHandle],
        learner: Learner,
        prompts: PromptSource,
        batch_size: int,
        num_steps: int,
        overlap: OverlapConfig | None = None,
        clock: Clock | None = None,
        listeners: Sequence[EventListener] = (),
    ) -> None:
        overlap = overlap or OverlapConfig()
        check_settings(algorithm, scorers, batch_size, num_steps, overlap)
        self.algorithm = algorithm
        self.batch_size = batch_size
        self.num_steps = num_steps
        self.overlap = overlap
        self.num_steps_done = 0
        self.version = 0
        self.generator = generator
        self.learner = learner
        self.prompts = prompts
        self._schedule = create_schedule(overlap)
        self._buffer = OvercommitBuffer()
        self._adaptation = Adaptation(overlap)
        has_critic_scorer = algorithm.needs_critic and "critic" in scorers
        names = algorithm.scorers | ({"critic"} if has_critic_scorer else set())
        self.scorers = {name: scorers[name] for name in sorted(names)}
        self._desk = ScoringDesk(self.scorers)
        self._stopwatch = Stopwatch(clock or MonotonicClock(), stages=("generate", "score", "train", "sync"))
        self._listeners = list(listeners)
        self._tick = 0
        self._tokens_decoded = 0
        self._ticks_since_feed = 0
        self._skipped = SkippedBatches()
        self._collected_s = 0.0

    @property
    def num_in_flight(self) -> int:
        """Groups with at least one live response."""
        return self._buffer.num_in_flight

    @property
    def num_queued(self) -> int:
        """Ended groups that wait for their training."""
        return self._buffer.num_queued

    def run(self) -> Iterator[StepReport]:
        """All remaining steps; yields a report after each."""
        while self.num_steps_done < self.num_steps:
            yield self.step(self.collect())

    def collect(self) -> RolloutBatch:
        """Decode until B groups are ended and scored; asked again before ``step`` it returns the same groups.

        Raises:
            PartFailedError: the generator or a scorer failed, or every group is rejected.
            StateError: all steps are done.
        """
        if self.num_steps_done >= self.num_steps:
            raise StateError(f"all {self.num_steps} steps are done; build an engine with more num_steps")
        self._stopwatch.start_step()
        self._schedule.delta = self._adaptation.delta
        self._admit(self._num_to_admit())
        rejected = RejectedGroups(self.batch_size)
        while True:
            groups = self._decode_until_selectable()
            with self._part("score", "scorer", groups):
                rejections = self._desk.settle(groups)
            if not rejections:
                break
            rejected.count(groups, rejections)
            for group in groups:
                if group.draw_id in rejections:
                    self._reject(group, rejections[group.draw_id])
            self._admit(max(0, self.batch_size - len(self._buffer)))
        batch = RolloutBatch.from_groups(groups, self.version)
        if "critic" in self.scorers:
            batch.values = batch.scores.pop("critic")
        elif self.algorithm.needs_critic:
            with self._part("train", "learner", groups):
                batch.values = self.learner.compute_values(batch)
        policy_logprobs = getattr(self.generator, "policy_logprobs", None)
        if self.algorithm.needs_proximal and policy_logprobs is not None:
            with self._part("train", "generator", groups):
                batch.proximal_logprobs = policy_logprobs(batch)
        self._emit("selected", draws=[group.draw_id for group in groups], version=self.version)
        with self._part("train", f"hook on_batch of {self.algorithm.name!r}", groups):
            self.algorithm.on_batch(batch)
        self._collected_s = self._stopwatch.now_s()
        return batch

    def step(self, batch: RolloutBatch) -> StepReport:
        """Train on a collected batch and hand the new weights to the generator.

        A batch whose loss is not finite before any weight changed is rejected as ``non_finite``: it counts as a
        step, and the version stays.

        Raises:
            PartFailedError: the learner or the generator failed.
            StateError: the batch was trained before, or belongs to another version.
        """
        self._check_batch(batch)
        with self._part("score", "scorer", batch.groups):
            self._desk.before_update(self._buffer.groups)
        with self._part("train", "learner", batch.groups):
            train_batch = self.algorithm.prepare(batch)
            metrics = self._update(train_batch)
        return self._finish(batch, train_batch.metrics | metrics)

    def commit(self, batch: RolloutBatch, *, has_new_weights: bool = True) -> StepReport:
        """``step`` for a batch that the caller has trained, with the learner's policy: the algorithm is not asked.

        Args:
            batch: what ``collect`` returned last.
            has_new_weights: False where no weight has changed since then, so that the version stays.

        Raises:
            PartFailedError: the generator failed.
            StateError: the batch was trained before, or belongs to another version.
        """
        self._check_batch(batch)
        self._stopwatch.add_since("train", self._collected_s)
        self._buffer.take_trained(batch.groups)
        if has_new_weights:
            self._hand_over_weights()
        return self._finish(batch, {}, is_trained=True)

    def _check_batch(self, batch: RolloutBatch) -> None:
        if batch.version != self.version:
            raise StateError(
                f"the batch was collected at version {batch.version}, the engine is at {self.version}; "
                "call collect() and step() in turn"
            )
        if not self._buffer.holds(batch.groups):
            raise StateError("the batch was trained or rejected before; call collect() for the next one")

    def _finish(
        self, batch: RolloutBatch, metrics: dict[str, float], *, is_trained: bool | None = None
    ) -> StepReport:
        report = self._report(
            batch, metrics, is_trained=self.version != batch.version if is_trained is None else is_trained
        )
        self._emit("updated", version=self.version, step=report.step)
        with self._part("train", f"hook on_update of {self.algorithm.name!r}", batch.groups):
            self.algorithm.on_update(report)
        return report

    def close(self) -> None:
        """Close the scorers' placements; safe to call twice."""
        self._desk.close()

    def __enter__(self) -> OverlapEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> State:
        """Everything between two calls: rollouts in flight and queued, counts, versions, data position.

        Tensors and primitives only. Scores that are still being computed are left out and asked for again.
        """
        return {
            "state_version": STATE_VERSION,
            "batch_size": self.batch_size,
            "group_size": self.algorithm.group_size,
            "num_steps_done": self.num_steps_done,
            "version": self.version,
            "tick": self._tick,
            "num_drawn": self._buffer.num_drawn,
            "num_trained": self._buffer.num_trained,
            "rejected": dict(self._buffer.rejected),
            "controllers": self._adaptation.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "groups": [pack_group(group) for group in self._buffer.groups],
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from a saved state; the learner's weights must be loaded before.

        Raises:
            StateError: another format, B or group size, or damaged counts and rollouts.
        """
        check_state(state, self.state_dict())
        groups = [unpack_group(packed) for packed in state["groups"]]
        before = self._buffer.groups
        self._buffer.restore(
            groups,
            num_drawn=state["num_drawn"],
            num_trained=state["num_trained"],
            rejected=state["rejected"],
        )
        self._adaptation.load_state_dict(state["controllers"])
        self.algorithm.load_state_dict(state["algorithm"])
        self.generator.evict([rollout.key for group in before for rollout in group.rollouts])
        for group in before:
            self._desk.forget(group)
        self._desk.reset()
        self._stopwatch.reset()
        self._tokens_decoded = self._ticks_since_feed = 0
        self._skipped.reset()
        self.num_steps_done, self.version, self._tick = (
            state["num_steps_done"],
            state["version"],
            state["tick"],
        )
        self.generator.load_weights(self.version)
        self.generator.admit(self._buffer.live_rollouts)

    def _num_to_admit(self) -> int:
        num_left = (self.num_steps - self.num_steps_done) * self.batch_size - len(self._buffer)
        return self._schedule.num_to_admit(len(self._buffer), self.batch_size, num_left)

    def _admit(self, num_groups: int) -> None:
        if not num_groups:
            return
        admitted: list[Rollout] = []
        for _ in range(num_groups):
            prompt = self.prompts.draw(self._buffer.num_drawn)
            keys = [RolloutKey(prompt.draw_id, index) for index in range(self.algorithm.group_size)]
            rollouts = [Rollout(key=key, prompt=prompt) for key in keys]
            self._buffer.add(Group(prompt=prompt, rollouts=rollouts, admitted_step=self.num_steps_done))
            admitted += rollouts
        with self._part("generate", "generator", ()):
            self.generator.admit(admitted)
        self._emit("admitted", draws=sorted({rollout.key.draw_id for rollout in admitted}))

    def _decode_until_selectable(self) -> list[Group]:
        while True:
            groups = self._schedule.select(
                self._buffer.groups, self.batch_size, self.version, self.num_steps_done
            )
            if groups is not None:
                return groups
            if not self._buffer.live_rollouts:
                raise StateError(
                    f"nothing is in flight and {len(self._buffer)} ended groups make no batch of {self.batch_size}"
                )
            self._decode()

    def _decode(self) -> None:
        self.generator.set_shared(self._desk.is_busy)
        with self._part("generate", "generator", ()):
            chunks = self.generator.decode(self.overlap.decode_tokens)
        if not chunks:
            raise PartFailedError(
                f"the generator returned no chunk while {len(self._buffer.live_rollouts)} responses are in flight"
            )
        ended = self._buffer.apply(chunks, base_tick=self._tick, step=self.num_steps_done)
        self._tick += self.overlap.decode_tokens
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        self._tokens_decoded += num_tokens
        with self._part("train", f"hook on_chunk of {self.algorithm.name!r}", ()):
            self.algorithm.on_chunk(chunks)
        self._emit("decoded", num_tokens=num_tokens, num_rows=len(chunks))
        for group in ended.groups:
            with self._part("train", f"hook on_complete of {self.algorithm.name!r}", (group,)):
                self.algorithm.on_complete(group)
            self._emit("ended", draw=group.draw_id, tick=group.end_tick)
        with self._part("score", "scorer", ended.groups):
            self._hand_to_scorers(ended)

    def _hand_to_scorers(self, ended: Ended) -> None:
        """As this step's plan says: nothing, what ended, or what is unfinished too."""
        plan = self._adaptation.plan
        self._desk.check()
        if plan.score_at == "batch":
            return
        if ended.rollouts:
            self._desk.submit_ended(ended)
        self._ticks_since_feed += self.overlap.decode_tokens
        if plan.score_at == "chunk" and self._ticks_since_feed >= plan.chunk_tokens:
            self._ticks_since_feed = 0
            if live := self._buffer.live_rollouts:
                self._desk.feed(live)

    def _reject(self, group: Group, reason: str) -> None:
        self._desk.forget(group)
        self.generator.evict(self._buffer.reject(group, reason))
        self._emit("rejected", draw=group.draw_id, reason=reason)

    def _update(self, train_batch: TrainBatch) -> dict[str, float]:
        groups = train_batch.rollouts.groups
        try:
            metrics = self.learner.update(train_batch, self.algorithm)
        except NonFiniteError as error:
            for group in groups:
                self._reject(group, NON_FINITE_LOSS)
            self._skipped.count(error)
            return {"oppo/skipped_non_finite": 1.0}
        self._skipped.reset()
        self._buffer.take_trained(groups)
        self._hand_over_weights()
        return metrics

    def _hand_over_weights(self) -> None:
        self.version += 1
        with self._part("sync", "generator", ()):
            self.generator.load_weights(self.version)

    def _report(self, batch: RolloutBatch, metrics: dict[str, float], *, is_trained: bool) -> StepReport:
        times = self._stopwatch.stop_step()
        report = make_report(
            batch,
            self._buffer,
            step=self.num_steps_done,
            is_trained=is_trained,
            delta=self._schedule.delta,
            plan=self._adaptation.plan,
            tokens_decoded=self._tokens_decoded,
            times=times,
            spans=self._stopwatch.take_spans() + self._desk.take_spans(),
            metrics=metrics,
        )
        self._adaptation.observe(report)
        self._tokens_decoded = 0
        self.num_steps_done += 1
        return report

    @contextmanager
    def _part(self, stage: str, part: str, groups: Sequence[Group]) -> Iterator[None]:
        with self._stopwatch.measure(stage), named_failure(part, self.num_steps_done, groups):
            yield

    def _emit(self, kind: str, **facts: Any) -> None:
        for listener in self._listeners:
            listener(kind, {"time_s": self._stopwatch.now_s(), **facts})
