"""Fakes behind the protocols, on a virtual clock: for schedules and laws only, never in place of a real model."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from oppo_kit.algorithm import AlgorithmBase, AlgorithmConfig
from oppo_kit.engine.loop import OverlapEngine
from oppo_kit.errors import NonFiniteError
from oppo_kit.types import Prompt, RolloutBatch, TokenChunk, TrainBatch


def stable_hash(*parts: int) -> int:
    return zlib.crc32(repr(parts).encode())


class VirtualClock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s


class FakePrompts:
    def __init__(self, limit: int = 50) -> None:
        self.limit = limit

    def draw(self, draw_id: int) -> Prompt:
        return Prompt(draw_id, (draw_id % 7 + 1,), self.limit, {"text": f"prompt {draw_id}"})


class FakeGenerator:
    """Response lengths come from a function; tokens are a hash of (key, position), so no schedule changes them."""

    def __init__(
        self, length_of: Callable[[int, int], int], clock: VirtualClock, tick_s: float = 1.0
    ) -> None:
        self.length_of = length_of
        self.clock = clock
        self.tick_s = tick_s
        self.version = 0
        self.rows: dict = {}
        self.admitted: list[int] = []

    def admit(self, rollouts) -> None:
        for rollout in rollouts:
            self.rows[rollout.key] = [len(rollout.token_ids), rollout.prompt.max_new_tokens]
            self.admitted.append(rollout.key.draw_id)

    def evict(self, keys) -> None:
        for key in keys:
            self.rows.pop(key, None)

    def load_weights(self, version: int) -> None:
        self.version = version

    def set_shared(self, is_shared: bool) -> None:
        self.is_shared = is_shared

    def decode(self, max_tokens: int) -> list[TokenChunk]:
        chunks = []
        for key, (start, limit) in list(self.rows.items()):
            end = min(self.length_of(*key), limit)
            stop = min(start + max_tokens, end)
            positions = range(start, stop)
            reason = None
            if stop == end:
                reason = "stop" if self.length_of(*key) <= limit else "length"
                del self.rows[key]
            else:
                self.rows[key][0] = stop
            chunks.append(
                TokenChunk(
                    key=key,
                    token_ids=[stable_hash(*key, position) % 100 for position in positions],
                    behaviour_logprobs=[
                        -float(stable_hash(*key, position, 1) % 50) / 10 for position in positions
                    ],
                    version=self.version,
                    last_tick=len(positions),
                    finish_reason=reason,
                )
            )
        self.clock.time_s += self.tick_s * max_tokens
        return chunks


class FakeHandle:
    """A scorer handle: futures are done at once; every rollout that was submitted or fed is remembered."""

    can_stream = True
    is_busy = False

    def __init__(
        self,
        name: str,
        score_of: Callable,
        clock: VirtualClock | None = None,
        cost_s: float = 0.0,
        call_per: str = "response",
        follows_weights: bool = False,
    ) -> None:
        self.name = name
        self.call_per = call_per
        self.follows_weights = follows_weights
        self.score_of = score_of
        self.submitted: list = []
        self.calls: list[list] = []
        self.fed: list[list] = []
        self.forgotten: list = []
        self.failure: Exception | None = None
        self.is_closed = False
        self._clock = clock
        self._cost_s = cost_s

    def submit(self, rollouts) -> list[Future]:
        self.submitted += [rollout.key for rollout in rollouts]
        self.calls.append([rollout.key for rollout in rollouts])
        futures = []
        for rollout in rollouts:
            future: Future = Future()
            try:
                future.set_result(self.score_of(rollout))
            except Exception as error:
                future.set_exception(error)
            futures.append(future)
        if self._clock is not None:
            self._clock.time_s += self._cost_s * len(rollouts)
        return futures

    def feed(self, rollouts) -> None:
        self.fed.append([(rollout.key, len(rollout.token_ids)) for rollout in rollouts])

    def set_awaited(self, is_awaited: bool) -> None:
        pass

    def forget(self, keys) -> None:
        self.forgotten.append(keys)

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def take_spans(self) -> list:
        return []

    def close(self) -> None:
        self.is_closed = True


class FakeLearner:
    """Remembers what it trained; refuses the updates whose index is in ``non_finite``."""

    def __init__(
        self, clock: VirtualClock | None = None, cost_s: float = 0.0, non_finite: frozenset[int] = frozenset()
    ):
        self.batches: list[RolloutBatch] = []
        self.num_calls = 0
        self.non_finite = non_finite
        self._clock = clock
        self._cost_s = cost_s

    def compute_values(self, batch: RolloutBatch) -> torch.Tensor:
        return torch.zeros_like(batch.behaviour_logprobs)

    def update(self, batch: TrainBatch, algorithm) -> dict[str, float]:
        index, self.num_calls = self.num_calls, self.num_calls + 1
        if self._clock is not None:
            self._clock.time_s += self._cost_s
        if index in self.non_finite:
            raise NonFiniteError("loss is nan")
        self.batches.append(batch.rollouts)
        return {"loss": 0.5}


class FakeAlgorithm(AlgorithmBase):
    name = "fake"

    def __init__(self, group_size: int = 1, scorers: frozenset[str] = frozenset({"reward"})) -> None:
        super().__init__(AlgorithmConfig())
        self.group_size = group_size
        self.scorers = scorers
        self.hooks: list[tuple] = []

    def prepare(self, batch: RolloutBatch) -> TrainBatch:
        return TrainBatch(batch, {}, {"prepared": 1.0})

    def loss(self, micro_batch, outputs):
        raise AssertionError("the fake learner never asks")

    def on_chunk(self, chunks: Sequence[TokenChunk]) -> None:
        self.hooks.append(("chunk", len(chunks)))

    def on_complete(self, group) -> None:
        self.hooks.append(("complete", group.draw_id))

    def on_batch(self, batch) -> None:
        self.hooks.append(("batch", [group.draw_id for group in batch.groups]))

    def on_update(self, report) -> None:
        self.hooks.append(("update", report.version))


def build_fake_engine(
    *,
    length_of: Callable[[int, int], int],
    batch_size: int,
    num_steps: int,
    overlap,
    group_size: int = 1,
    score_of: Callable = lambda rollout: float(len(rollout.token_ids)),
    non_finite: frozenset[int] = frozenset(),
    limit: int = 50,
    call_per: str = "response",
    listeners: Sequence = (),
    decode_s: float = 1.0,
    score_s: float = 0.0,
    train_s: float = 0.0,
) -> OverlapEngine:
    clock = VirtualClock()
    return OverlapEngine(
        algorithm=FakeAlgorithm(group_size),
        generator=FakeGenerator(length_of, clock, decode_s),
        scorers={"reward": FakeHandle("reward", score_of, clock, score_s, call_per)},
        learner=FakeLearner(clock, train_s, non_finite),
        prompts=FakePrompts(limit),
        batch_size=batch_size,
        num_steps=num_steps,
        overlap=overlap,
        clock=clock,
        listeners=listeners,
    )
