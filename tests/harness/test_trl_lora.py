"""Stock TRL with an adapter, and with a limit of its own for every row."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from trl_tiny import BOS, EOS, PAD, TinyPrompts, TinyWorkload, require_trl

from harness.runners import oppo, trl_ppo
from harness.runners import trl as runner
from harness.runners.base import RunSpec
from harness.runners.trl_row_limits import RowLimits
from harness.schema import Step
from oppo_kit.config import TrainConfig
from oppo_kit.types import Prompt


def make_spec(runner_name: str = "trl", **train: Any) -> RunSpec:
    values: dict[str, Any] = {
        "batch_size": 8,
        "num_steps": 2,
        "sampling": {"response_length": 12, "temperature": 0.9},
        "learner": {"max_grad_norm": None, "learning_rate": 1e-2},
        "algo_config": {"num_ppo_epochs": 2},
    }
    return RunSpec(runner=runner_name, seed=3, train=TrainConfig(**(values | train)))


def never(*_: Any, **__: Any) -> Any:
    pytest.fail("nothing is evaluated")


class LimitedPrompts(TinyPrompts):
    """Limits 1 to 11, and another one for the second of two equal prompts."""

    def draw(self, draw_id: int) -> Prompt:
        return Prompt(draw_id, super().draw(draw_id).token_ids, max_new_tokens=1 + draw_id * 7 % 11)


class Seen:
    """A run of TRL, and its queries, responses and models."""

    trainer: Any
    before: dict[str, torch.Tensor]

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spec: RunSpec, workload: TinyWorkload) -> None:
        module = runner.import_module("ppo")
        self.rows: list[tuple[tuple[int, ...], list[int]]] = []
        self.widths: list[int] = []
        generate, build = module.batch_generation, trl_ppo._build_trainer

        def seen_generate(model: Any, queries: torch.Tensor, *args: Any) -> Any:
            outputs = generate(model, queries, *args)
            responses = outputs[0][:, queries.shape[1] :]
            self.widths.append(responses.shape[1])
            for query, response in zip(queries.tolist(), responses.tolist(), strict=True):
                self.rows.append((tuple(token for token in query if token != PAD), response))
            return outputs

        def seen_build(*args: Any) -> Any:
            self.trainer = build(*args)
            self.before = {name: p.detach().clone() for name, p in self.trainer.model.named_parameters()}
            return self.trainer

        monkeypatch.setattr(module, "batch_generation", seen_generate)
        monkeypatch.setattr(trl_ppo, "_build_trainer", seen_build)
        self.steps: list[Step] = []
        runner.run(spec, workload, never, self.steps.append)


def test_lora_trains_the_adapter_and_the_critic_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    require_trl()
    seen = Seen(monkeypatch, make_spec(actor_lora={"r": 4}), TinyWorkload())
    assert seen.trainer.ref_model is None, "the base is the reference"
    changed = {n for n, p in seen.trainer.model.named_parameters() if not torch.equal(p, seen.before[n])}
    adapter = {name for name in seen.before if "lora_" in name}
    critic = {name for name in seen.before if name.startswith("value_model.")}
    assert len(adapter) == 2 * 7 * 2, "A and B of seven linear layers in two blocks"
    assert adapter <= changed <= adapter | critic
    assert changed & critic
    first_kl, second_kl = (step.metrics["objective/kl"] or 0.0 for step in seen.steps)
    assert first_kl == pytest.approx(0.0, abs=1e-3)
    assert abs(second_kl) > 1e-3, "the reference stays untrained"


def test_lora_gives_both_sides_the_same_parameters_to_optimise(tmp_path: Any) -> None:
    require_trl()
    spec, workload = make_spec(actor_lora={"r": 4}), TinyWorkload()
    module, algorithm = runner.import_module("ppo"), trl_ppo.check_ppo(spec.train, workload)
    trainer = trl_ppo._build_trainer(module, spec, workload, algorithm, str(tmp_path))
    with oppo.make_engine(spec.train, workload) as engine:
        ours: Any = engine.learner
        shapes = [
            [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]
            for optimizer in (trainer.optimizer, ours._optimizer)
        ]
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) > 2 * 7 * 2


def test_the_reference_pass_of_an_adapter_is_scoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL hands the policy itself to the reference pass when there is no reference model."""
    require_trl()
    module = runner.import_module("ppo")
    forward = module.forward
    now_s = [0.0]

    def slow_forward(model: Any, *args: Any) -> Any:
        now_s[0] += 100.0 if type(model).__name__.startswith("Peft") else 0.0
        return forward(model, *args)

    monkeypatch.setattr(module, "forward", slow_forward)
    steps, _, _ = runner.run(
        make_spec(actor_lora={"r": 4}), TinyWorkload(), never, lambda _: None, clock=lambda: now_s[0]
    )
    assert [step.score_s for step in steps] == [100.0, 100.0]
    assert [step.train_s for step in steps] == [0.0, 0.0]


@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_each_row_ends_at_its_own_limit_and_the_batch_with_the_slowest(
    monkeypatch: pytest.MonkeyPatch, lora: dict[str, int] | None
) -> None:
    require_trl()
    workload = TinyWorkload(stop_token_ids=(), prompts=LimitedPrompts())
    seen = Seen(monkeypatch, make_spec(actor_lora=lora), workload)
    expected = Counter(
        (prompt.token_ids, prompt.max_new_tokens) for prompt in map(workload.prompts.draw, range(16))
    )
    lengths = [(query, len(row) - row.count(PAD)) for query, row in seen.rows]
    assert Counter(lengths) == expected
    for query_and_row, (_, length) in zip(seen.rows, lengths, strict=True):
        assert PAD not in query_and_row[1][:length], "padding stands at the end only"
    for number, step in enumerate(seen.steps):
        of_step = [length for _, length in lengths[number * 8 : number * 8 + 8]]
        assert step.trained_lengths == of_step
        assert step.tokens_decoded == step.tokens_trained == sum(of_step)
        assert seen.widths[number] == max(of_step), "no decoding beyond the slowest row"


def test_our_engine_gives_the_same_draws_the_same_lengths() -> None:
    workload = TinyWorkload(stop_token_ids=(), prompts=LimitedPrompts())
    spec = make_spec("sequential", sampling={"response_length": 12, "stop_token_ids": ()})
    steps = oppo.run(spec, workload, never, lambda _: None).steps
    expected = [workload.prompts.draw(draw_id).max_new_tokens for draw_id in range(16)]
    assert sorted(steps[0].trained_lengths) == sorted(expected[:8])
    assert sorted(steps[1].trained_lengths) == sorted(expected[8:])


def test_a_stop_token_before_the_limit_still_ends_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    require_trl()
    seen = Seen(monkeypatch, make_spec(), TinyWorkload(prompts=LimitedPrompts()))
    num_early = 0
    lengths = [length for step in seen.steps for length in step.trained_lengths]
    limits = RowLimits(map(LimitedPrompts().draw, range(16)))
    for (query, row), length in zip(seen.rows, lengths, strict=True):
        limit = limits.take(query)
        assert length == (min(row.index(EOS) + 1, limit) if EOS in row else limit)
        num_early += length < limit
    assert num_early > 0


def test_equal_prompts_get_their_limits_in_turn() -> None:
    limits = RowLimits([Prompt(0, (BOS, 3), 5), Prompt(1, (BOS, 4), 6), Prompt(2, (BOS, 3), 7)])
    assert [limits.take([BOS, 3]), limits.take([BOS, 3]), limits.take([BOS, 4])] == [5, 7, 6]
