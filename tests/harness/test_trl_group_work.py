"""What stock TRL's trainers of algorithms with groups are asked to do, and what they cannot."""

from __future__ import annotations

import importlib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from trl_groups_watched import SavedWorkload, make_spec, never
from trl_tiny import BOS, EOS, PAD, TinyPrompts, TinyWorkload, require_trl

from harness.runners import trl as runner
from harness.runners import trl_groups
from harness.runners.base import RunSpec
from harness.runners.trl_common import make_optimizer
from harness.runners.trl_reward import RewardOnIds
from oppo_kit.config import TrainConfig
from oppo_kit.errors import ConfigError
from oppo_kit.learner.learner import AccelerateLearner
from oppo_kit.registry import create_algorithm
from oppo_kit.types import Prompt


@pytest.mark.parametrize("lr_scheduler_type", ["linear", "constant", "cosine"])
def test_the_learning_rate_moves_once_a_step_as_in_our_learner(lr_scheduler_type: str) -> None:
    learner = TrainConfig.model_validate(
        {"learner": {"lr_scheduler_type": lr_scheduler_type, "warmup_steps": 2, "learning_rate": 1e-4}}
    ).learner
    workload = TinyWorkload()
    ours = AccelerateLearner(workload.make_policy(), None, config=learner, temperature=1.0, num_steps=5)
    optimizer = make_optimizer(learner, [workload.make_policy()])
    theirs = trl_groups.make_schedule(learner, optimizer, num_steps=5, num_updates=3)
    for _ in range(5):
        for _ in range(3):
            assert theirs.get_last_lr() == pytest.approx(ours._scheduler.get_last_lr())
            optimizer.step()
            theirs.step()
        ours._optimizer.step()
        ours._scheduler.step()
    groups = [optimizer.param_groups, ours._optimizer.param_groups]
    assert [len(group["params"]) for group in groups[0]] == [len(group["params"]) for group in groups[1]]
    for name in ("betas", "eps", "weight_decay"):
        assert groups[0][0][name] == groups[1][0][name]


def test_continuous_batching_is_another_way_to_the_same_work(tmp_path: Path) -> None:
    require_trl()
    steps = runner.run(
        make_spec("grpo", "trl_continuous", num_steps=1), SavedWorkload(tmp_path), never, lambda _: None
    ).steps
    assert [step.responses_trained for step in steps] == [16]
    assert len(set(steps[0].trained_lengths)) > 1, "rows end at their stop tokens"
    assert max(steps[0].trained_lengths) <= 12
    assert steps[0].generate_s > 0


@pytest.mark.parametrize("algo", ["grpo", "rloo", "online_dpo"])
def test_the_drop_in_trainer_does_the_same_work_with_groups_in_the_air(algo: str, tmp_path: Path) -> None:
    require_trl()
    spec = make_spec(algo, "trl_overlap", num_steps=4, overlap={"delta": 2})
    group_size = create_algorithm(algo, spec.train.algo_config).group_size
    steps = runner.run(spec, SavedWorkload(tmp_path), never, lambda _: None).steps
    assert [step.responses_trained for step in steps] == [4 * group_size] * 4
    assert {step.delta for step in steps} == {2}
    assert [step.in_flight + step.queued for step in steps] == [2, 2, 2, 0]
    assert [step.drawn for step in steps] == [6, 10, 14, 16]
    assert any(step.num_deferred for step in steps)
    # Nothing is decoded that is not trained, and nothing twice.
    assert sum(step.tokens_decoded for step in steps) == sum(step.tokens_trained for step in steps) > 0
    for step in steps:
        assert 0 < step.generate_s < step.step_s
        assert step.generate_s + step.score_s + step.train_s == pytest.approx(step.step_s)
    if algo != "online_dpo":
        assert max(step.metrics["oppo/stale_token_frac"] or 0.0 for step in steps) > 0


@pytest.mark.parametrize(
    ("rows", "tokens", "limit", "expected"),
    [(64, 100, 6400, 64), (64, 100, 6399, 32), (64, 100, 10, 1), (6, 10, 45, 3), (7, 10, 60, 1)],
)
def test_a_micro_batch_is_the_largest_divisor_that_fits(
    rows: int, tokens: int, limit: int, expected: int
) -> None:
    assert trl_groups.rows_per_micro_batch(rows, tokens, limit) == expected


class LimitedPrompts(TinyPrompts):
    """The last draw has a limit of its own."""

    def draw(self, draw_id: int) -> Prompt:
        return Prompt(draw_id, super().draw(draw_id).token_ids, max_new_tokens=5 if draw_id == 7 else 12)


class OtherPrompts(TinyPrompts):
    """With a token that no text gives."""

    def draw(self, draw_id: int) -> Prompt:
        return Prompt(draw_id, (BOS, 99), max_new_tokens=12)


@pytest.mark.parametrize(
    ("algo", "algo_config", "workload", "words"),
    [
        ("grpo", {}, {"stop_token_ids": (EOS, 5)}, r"GRPOConfig knows one token .* this run has \[2, 5\]"),
        ("rloo", {}, {"stop_token_ids": ()}, r"RLOOConfig knows one token .* this run has \[\]"),
        (
            "online_dpo",
            {"num_mini_batches": 2},
            {},
            "num_mini_batches=2: TRL's OnlineDPO takes one optimizer step",
        ),
        (
            "online_dpo",
            {"ties": "skip"},
            {},
            "algo_config.ties='skip': TRL's OnlineDPOConfig has no such setting; .*'first'",
        ),
        (
            "grpo",
            {"num_mini_batches": 3},
            {},
            "batch_size=4 is no multiple of num_mini_batches=3, which TRL",
        ),
        (
            "grpo",
            {},
            {"prompts": LimitedPrompts()},
            "draw 7 may have 5 tokens and others 12: TRL has one limit",
        ),
        (
            "grpo",
            {},
            {"prompts": OtherPrompts()},
            r"the tokenizer makes \[1.*\] of .*, which is \[1, 99\] here",
        ),
    ],
)
def test_work_that_trl_cannot_do_is_refused(
    algo: str, algo_config: dict[str, Any], workload: dict[str, Any], words: str
) -> None:
    require_trl()
    with pytest.raises(ConfigError, match=words):
        runner.run(make_spec(algo, algo_config=algo_config), TinyWorkload(**workload), never, print)


@pytest.mark.parametrize(
    ("algo", "runner_name", "words"),
    [
        ("reinforce", "trl", "algo is 'reinforce', and the trl runner runs grpo, online_dpo, ppo, rloo only"),
        ("ppo", "trl_continuous", "algo is 'ppo', and the trl_continuous runner runs grpo, rloo only"),
    ],
)
def test_an_algorithm_that_trl_has_not_is_refused(algo: str, runner_name: str, words: str) -> None:
    spec = RunSpec(runner=runner_name, seed=0, train=TrainConfig(algo=algo))
    with pytest.raises(ConfigError, match=words):
        runner.run(spec, TinyWorkload(), never, print)


def test_later_series_of_trl_will_do_where_the_trainer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: name)
    monkeypatch.setattr(metadata, "version", lambda name: "1.16.0")
    assert runner.import_module("grpo") == "trl"
    monkeypatch.setattr(metadata, "version", lambda name: "1.17.0")
    with pytest.raises(
        ConfigError, match=r"trl 1.17.0 is installed, .* needs 1.12.x to 1.16.x for its GRPOTrainer"
    ):
        runner.import_module("grpo")


class LengthScorer:
    """The number of tokens; nothing for one that did not stop."""

    name = "reward"

    def score(self, rollouts: Any) -> list[float | None]:
        return [float(len(r.token_ids)) if r.finish_reason == "stop" else None for r in rollouts]


def test_a_response_ends_at_its_first_stop_token_whatever_follows() -> None:
    reward = RewardOnIds(LengthScorer(), [TinyPrompts().draw(3)], (EOS,))  # type: ignore[arg-type]
    found = reward(
        completion_ids=[[5, EOS, PAD, EOS], [5, 6, 7], [EOS]], draw_id=[3, 3, 3], trainer_state=None
    )
    assert found == [2.0, None, 1.0]
