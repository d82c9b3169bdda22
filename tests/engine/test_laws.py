"""The engine's laws as a hypothesis state machine: any lengths, groups, Δ, age cap, rejections, saves and loads."""

from __future__ import annotations

import io
import math

import torch
from fakes import build_fake_engine, stable_hash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oppo_kit.config import OverlapConfig

NUM_STEPS = 7


class EngineMachine(RuleBasedStateMachine):
    """Drives one engine; at any boundary its state may move to a fresh engine through a file."""

    @initialize(
        batch_size=st.integers(1, 5),
        group_size=st.integers(1, 3),
        max_age=st.integers(0, 3),
        delta_share=st.one_of(st.just(1.0), st.floats(0, 1)),
        decode_tokens=st.sampled_from([1, 3, 16]),
        schedule=st.sampled_from(["oppo", "oppo", "oppo", "sequential"]),
        score_at=st.sampled_from(["batch", "sample", "chunk", "auto"]),
        delta_control=st.sampled_from(["fixed", "paper", "robust"]),
        group_call=st.sampled_from(["response", "group", "batch"]),
        seed=st.integers(0, 2**16),
        slow_share=st.sampled_from([0.05, 0.3, 0.6]),
        are_first_slow=st.booleans(),
        reject_one_in=st.sampled_from([0, 3, 6]),
        non_finite=st.frozensets(st.integers(0, NUM_STEPS), max_size=2),
    )
    def build(
        self,
        batch_size,
        group_size,
        max_age,
        delta_share,
        decode_tokens,
        schedule,
        score_at,
        delta_control,
        group_call,
        seed,
        slow_share,
        are_first_slow,
        reject_one_in,
        non_finite,
    ):
        delta = 0 if schedule == "sequential" else round(delta_share * batch_size * max_age)
        self.batch_size, self.group_size, self.max_age = batch_size, group_size, max_age
        self.limit = 60
        self.num_slow_first = delta if are_first_slow else 0
        self.seed, self.slow_share, self.reject_one_in = seed, slow_share, reject_one_in
        self.non_finite = non_finite
        self.num_update_calls = 0
        self.overlap = OverlapConfig(
            schedule=schedule,
            delta=delta,
            delta_control=delta_control,
            max_age=max_age,
            decode_tokens=decode_tokens,
            score_at=score_at,
            chunk_tokens=4,
            chunk_candidates=(2, 20),
        )
        self.call_per = group_call
        self.engine = self.make_engine(non_finite)
        self.trained: list[int] = []
        self.rejected_non_finite: list[int] = []
        self.batch = None
        self.report = None

    def length_of(self, draw_id: int, sample_index: int) -> int:
        """0 to 80 with a limit of 60: empty, short, slow and cut responses; by option the first Δ draws are slow."""
        share = stable_hash(self.seed, draw_id, sample_index) % 1000 / 1000
        if draw_id < self.num_slow_first:
            return 40 + int(40 * share)
        return 30 + int(50 * share) if share < self.slow_share else int(6 * share)

    def score_of(self, rollout):
        if self.reject_one_in:
            draw = stable_hash(self.seed, rollout.key.draw_id, 77) % self.reject_one_in
            if draw == 0:
                return None if rollout.key.draw_id % 2 else math.nan
            if self.does_abstain(*rollout.key):
                return None
        return float(len(rollout.token_ids))

    def make_engine(self, non_finite):
        return build_fake_engine(
            length_of=self.length_of,
            batch_size=self.batch_size,
            num_steps=NUM_STEPS,
            overlap=self.overlap,
            group_size=self.group_size,
            score_of=self.score_of,
            non_finite=non_finite,
            limit=self.limit,
            call_per=self.call_per,
        )

    @property
    def has_steps_left(self) -> bool:
        return self.engine.num_steps_done < NUM_STEPS

    @precondition(lambda self: self.has_steps_left)
    @rule()
    def collect(self):
        before = None if self.batch is None else [group.draw_id for group in self.batch.groups]
        self.batch = self.engine.collect()
        draws = [group.draw_id for group in self.batch.groups]
        assert before is None or draws == before, "collect() asked again gives the same batch"
        assert draws == sorted(draws)
        assert len(draws) == self.batch_size, "every batch has B groups"
        assert self.batch.num_rows == self.batch_size * self.group_size, "groups are whole"
        self.check_order()
        for group in self.batch.groups:
            assert group.age(self.engine.version) <= self.max_age, "the age cap holds"
            for rollout in group.rollouts:
                expected = min(self.length_of(*rollout.key), self.limit)
                assert len(rollout.token_ids) == expected, "budgets carry over steps"
                assert rollout.token_ids == [stable_hash(*rollout.key, p) % 100 for p in range(expected)]
                assert len(rollout.versions) == len(rollout.behaviour_logprobs) == expected
                assert rollout.versions == sorted(rollout.versions)

    def check_order(self):
        """Where the age cap forces nobody, the chosen are the first B: queued before, end tick, draw id."""
        held, version, step = self.engine._buffer.groups, self.engine.version, self.engine.num_steps_done
        slacks = [self.max_age - group.age(version) for group in held]
        if any(sum(slack <= k for slack in slacks) > self.batch_size * k for k in range(self.max_age + 1)):
            return
        ended = sorted(
            (group for group in held if group.is_ended),
            key=lambda group: (
                group.ended_step == step,
                max(rollout.end_tick for rollout in group.rollouts),
                group.draw_id,
            ),
        )
        assert {g.draw_id for g in self.batch.groups} == {g.draw_id for g in ended[: self.batch_size]}

    @precondition(lambda self: self.batch is not None)
    @rule()
    def step(self):
        draws = [group.draw_id for group in self.batch.groups]
        version = self.engine.version
        is_non_finite = self.num_update_calls in self.non_finite
        self.num_update_calls += 1
        self.report = self.engine.step(self.batch)
        self.batch = None
        if is_non_finite:
            self.rejected_non_finite += draws
            assert self.engine.version == version, "a skipped batch does not advance the version"
            assert self.report.groups_trained == self.report.tokens_trained == 0
        else:
            assert not set(draws) & set(self.trained), "no draw is trained twice"
            self.trained += draws
            assert self.engine.version == version + 1
        report = self.report
        assert report.drawn == report.trained + report.in_flight + report.queued + sum(
            report.rejected.values()
        )
        assert report.trained == len(self.trained)
        assert report.rejected.get("non_finite", 0) == len(self.rejected_non_finite)
        assert report.age_max <= self.max_age
        self.check_scorer()

    def check_scorer(self):
        """Nothing is submitted twice, fed after its end, or fed backwards; calls hold what they must."""
        handle = self.engine.scorers["reward"]
        if self.call_per != "batch":
            assert len(handle.submitted) == len(set(handle.submitted))
        fed: dict = {}
        for call in handle.fed:
            for key, num_tokens in call:
                assert fed.get(key, 0) <= num_tokens < max(1, min(self.length_of(*key), self.limit))
                fed[key] = num_tokens
        for call in handle.calls:
            by_draw = {
                draw: sum(key.draw_id == draw for key in call) for draw in {key.draw_id for key in call}
            }
            if self.call_per == "group":
                assert list(by_draw.values()) == [self.group_size], "one group a call"
            if self.call_per == "batch":
                assert list(by_draw.values()) == [self.group_size] * self.batch_size, "one batch a call"

    @rule()
    def save_and_load(self):
        file = io.BytesIO()
        torch.save(self.engine.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        remaining = frozenset(index - self.num_update_calls for index in self.non_finite)
        before, self.engine = self.engine, self.make_engine(remaining)
        self.engine.load_state_dict(state)
        assert self.engine.state_dict() == state
        assert self.engine._buffer.groups == before._buffer.groups
        self.batch = None

    @invariant()
    def never_holds_more_than_batch_and_delta(self):
        if hasattr(self, "engine"):
            held = self.engine.num_in_flight + self.engine.num_queued
            assert held <= self.batch_size + self.overlap.delta

    def teardown(self):
        """Whatever was done so far, the rest of the run drains: nothing is left over and nothing is lost."""
        if not hasattr(self, "engine"):
            return
        while self.has_steps_left:
            self.collect()
            self.step()
        report = self.report
        if report is None:
            return
        assert report.in_flight == report.queued == 0, "the tail drains by itself"
        num_rejected_by_score = sum(report.rejected.values()) - len(self.rejected_non_finite)
        assert report.drawn == NUM_STEPS * self.batch_size + num_rejected_by_score
        assert sorted(self.trained + self.rejected_non_finite) == [
            draw for draw in range(report.drawn) if not self.is_rejected_by_score(draw)
        ]

    def is_rejected_by_score(self, draw_id: int) -> bool:
        if not self.reject_one_in:
            return False
        num_scored = sum(not self.does_abstain(draw_id, sample) for sample in range(self.group_size))
        is_bad_draw = stable_hash(self.seed, draw_id, 77) % self.reject_one_in == 0
        return is_bad_draw or num_scored < min(2, self.group_size)

    def does_abstain(self, draw_id: int, sample_index: int) -> bool:
        return stable_hash(self.seed, draw_id, sample_index, 78) % 4 == 0


TestEngineLaws = EngineMachine.TestCase
TestEngineLaws.settings = settings(
    max_examples=120, stateful_step_count=18, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
