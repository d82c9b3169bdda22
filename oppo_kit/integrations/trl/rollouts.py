"""The engine under a trainer that trains by itself: it brings batches, and is told when the weights have changed.

    collect() ─► the trainer scores, trains ─► commit() ─► collect() …

Knows no trainer and no data set; what is special to one trainer stands beside that trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from oppo_kit.algorithm import AlgorithmBase, AlgorithmConfig
from oppo_kit.backends.hf_generator import HFGenerator
from oppo_kit.backends.sampler import Truncation
from oppo_kit.config import OverlapConfig
from oppo_kit.engine.loop import OverlapEngine
from oppo_kit.errors import StateError
from oppo_kit.integrations.trl.prompts import ReplayedPrompts
from oppo_kit.integrations.trl.weights import bare_twin
from oppo_kit.protocols import ScorerHandle, State
from oppo_kit.types import MicroBatch, PolicyOutputs, RolloutBatch, StepReport, TrainBatch

REWARD = "reward"
"""Name under which the trainer's own total is told to the controller of Δ."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How the trainer's arguments say to sample; see ``HFGenerator``."""

    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int
    truncation: Truncation | None = None
    dtype: torch.dtype | None = None


class TrainedElsewhere(AlgorithmBase):
    """What the engine must know of an algorithm that a trainer runs: how large a group is, and what is scored."""

    name: ClassVar[str] = "trainer"

    def __init__(self, group_size: int, scorers: frozenset[str]) -> None:
        super().__init__(AlgorithmConfig())
        self.group_size = group_size
        self.scorers = scorers

    def prepare(self, batch: RolloutBatch) -> TrainBatch:  # noqa: ARG002
        """Never asked.

        Raises:
            StateError: always.
        """
        raise StateError("the trainer trains this batch; call commit(batch) instead of step(batch)")

    def loss(
        self,
        micro_batch: MicroBatch,  # noqa: ARG002
        outputs: PolicyOutputs,  # noqa: ARG002
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Never asked.

        Raises:
            StateError: always.
        """
        raise StateError("the trainer has its own loss; call commit(batch) instead of step(batch)")


class _Trainee:
    """A learner for the engine's eyes: it only holds the policy."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy


class TrainerRollouts:
    """Batches of B groups with B + Δ in the air, for a trainer.

    Args:
        policy: the model that the trainer trains, as it is on its device; adapters included.
        prompts: in the trainer's order.
        sampling: how to sample.
        scorers: placed reward models; closed here.
        batch_size: B.
        group_size: G.
        num_rounds: batches of the whole training, after which nothing is left in the air; it grows when more are asked
            for.
        overlap: what overlaps.
    """

    def __init__(
        self,
        policy: nn.Module,
        prompts: ReplayedPrompts,
        *,
        sampling: SamplingSettings,
        scorers: Mapping[str, ScorerHandle],
        batch_size: int,
        group_size: int,
        num_rounds: int,
        overlap: OverlapConfig,
    ) -> None:
        self.prompts = prompts
        self.batch: RolloutBatch | None = None
        self._collected_at = 0
        twin = bare_twin(policy)
        generator = HFGenerator(
            twin,
            temperature=sampling.temperature,
            stop_token_ids=sampling.stop_token_ids,
            seed=sampling.seed,
            dtype=sampling.dtype,
            truncation=sampling.truncation,
            carried_cache=overlap.carried_cache,
            num_threads_shared=overlap.decode_threads,
        )
        learner: Any = _Trainee(twin)
        self.engine = OverlapEngine(
            algorithm=TrainedElsewhere(group_size, frozenset(scorers)),
            generator=generator,
            scorers=scorers,
            learner=learner,
            prompts=prompts,
            batch_size=batch_size,
            num_steps=num_rounds,
            overlap=overlap,
        )

    def collect(self, update: int) -> RolloutBatch:
        """The next batch; the one before it must be committed.

        Args:
            update: updates of the weights so far.

        Raises:
            StateError: it is not.
        """
        if self.batch is not None:
            raise StateError("the last batch was not committed; call commit(update) first")
        self.engine.num_steps = max(self.engine.num_steps, self.engine.num_steps_done + 1)
        self.batch = self.engine.collect()
        self._collected_at = update
        return self.batch

    def answers(self, prompt_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Token ids of the batch's responses, for a trainer that asks with its prompts.

        Raises:
            StateError: it encodes them otherwise than they were answered, or there is no batch.
        """
        expected = [] if self.batch is None else self.batch.prompt_ids
        if self.batch is None or [list(ids) for ids in prompt_ids] != expected:
            raise StateError(
                "the trainer encodes the prompts of the batch otherwise than when they were drawn; a tokenizer, its "
                "chat template and chat_template_kwargs must stay as they are during training"
            )
        return [list(rollout.token_ids) for group in self.batch.groups for rollout in group.rollouts]

    def tell_rewards(self, rewards: Tensor) -> None:
        """What the trainer makes of all its reward functions, [R]; NaN where none of them scored."""
        if self.batch is not None and not rewards.isnan().all():
            self.batch.scores[REWARD] = rewards.detach().float().cpu()

    def commit(self, update: int) -> StepReport | None:
        """The trainer is done with the last batch; None if there is none.

        Args:
            update: updates of the weights so far: whether any came since ``collect``.
        """
        if self.batch is None:
            return None
        report = self.engine.commit(self.batch, has_new_weights=update != self._collected_at)
        self.batch = None
        return report

    def skip_to(self, num_rounds: int) -> None:
        """Go on behind so many batches that somebody else has trained."""
        num_groups = num_rounds * self.engine.batch_size
        fresh = self.engine.state_dict()
        counts = {"num_steps_done": num_rounds, "version": num_rounds}
        self.engine.load_state_dict(fresh | counts | {"num_drawn": num_groups, "num_trained": num_groups})

    def state_dict(self) -> State:
        """All between two calls, the batch that is being trained included; columns are read from the data again."""
        state = self.engine.state_dict()
        for group in state["groups"]:
            group["columns"] = {}
        if self.batch is None:
            return {"engine": state, "batch": None}
        rewards = self.batch.scores.get(REWARD)
        return {"engine": state, "batch": {"collected_at": self._collected_at, REWARD: rewards}}

    def load_state_dict(self, state: State) -> None:
        """Go on from a saved state; the policy's weights must be loaded before.

        Raises:
            StateError: the data set's prompts are others, or the state does not fit.
        """
        engine = dict(state["engine"])
        engine["groups"] = [self._with_columns(group) for group in engine["groups"]]
        self.engine.load_state_dict(engine)
        self.batch = None
        if state["batch"] is not None:
            # Its groups have ended and are scored: the same ones are chosen, and nothing is decoded.
            batch = self.collect(state["batch"]["collected_at"])
            if state["batch"][REWARD] is not None:
                batch.scores[REWARD] = state["batch"][REWARD]

    def close(self) -> None:
        """Close the scorers' placements; safe to call twice."""
        self.engine.close()

    def _with_columns(self, group: Mapping[str, Any]) -> dict[str, Any]:
        prompt = self.prompts.draw(group["draw_id"])
        if list(prompt.token_ids) != list(group["prompt_ids"]):
            raise StateError(
                f"the saved responses to draw {prompt.draw_id} answer another prompt than the data has there now; go "
                "on with the data set, the seed and the tokenizer that the checkpoint was made with"
            )
        return {**group, "columns": dict(prompt.columns), "max_new_tokens": prompt.max_new_tokens}


def batch_metrics(batch: RolloutBatch, engine: OverlapEngine) -> dict[str, float]:
    """What is known of a batch when it is chosen."""
    tokens = batch.response_mask
    num_stale = (tokens & ~batch.is_current).sum()
    return {
        "oppo/in_flight": float(engine.num_in_flight),
        "oppo/queued": float(engine.num_queued - len(batch.groups)),
        "oppo/stale_token_frac": float(num_stale / tokens.sum().clamp(min=1)),
    }


def report_metrics(report: StepReport) -> dict[str, float]:
    """What is known of a batch when it is trained."""
    return {
        "oppo/delta": float(report.delta),
        "oppo/age_mean": report.age_mean,
        "oppo/age_max": float(report.age_max),
        "oppo/num_deferred": float(report.num_deferred),
        "oppo/tokens_decoded": float(report.tokens_decoded),
        "oppo/generate_s": report.generate_s,
        "oppo/score_s": report.score_s,
        "oppo/train_s": report.train_s,
        "oppo/sync_s": report.sync_s,
        "oppo/step_s": report.step_s,
    } | report.metrics
