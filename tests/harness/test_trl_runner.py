"""Runs stock TRL for real, on tiny random models."""

from __future__ import annotations

import ast
import gc
import random
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl_tiny import BOS, EOS, PAD, TinyWorkload, make_tokenizer, require_trl

from harness.runners import trl as runner
from harness.runners import trl_ppo
from harness.runners.base import RunSpec
from harness.runners.trl_common import prepare_tokenizer
from harness.schema import Evaluation, Step
from oppo_kit.config import TrainConfig
from oppo_kit.errors import ConfigError, MissingExtraError
from oppo_kit.learner.learner import AccelerateLearner

EVALUATION_S = 1000.0


def make_spec(eval_every: int = 1, save_to: Path | None = None, **train: Any) -> RunSpec:
    values: dict[str, Any] = {
        "batch_size": 8,
        "num_steps": 2,
        "sampling": {"response_length": 12, "temperature": 0.9},
        "learner": {"max_grad_norm": None, "learning_rate": 1e-3},
        "algo_config": {"num_ppo_epochs": 2, "missing_eos_penalty": 0.5},
    }
    config = TrainConfig(**(values | train))
    return RunSpec(runner="trl", seed=3, train=config, eval_every=eval_every, save_to=save_to)


class Watched:
    """A run, and what was seen of TRL's insides and of the evaluation meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spec: RunSpec, workload: TinyWorkload) -> None:
        module = runner.import_module("ppo")
        self.query_rows: list[list[int]] = []
        self.response_rows: list[list[list[int]]] = []
        self.raw_scores: list[torch.Tensor] = []
        self.num_optimizer_steps = 0
        self.generation_configs: list[Any] = []
        self.num_frozen: list[int] = []
        self.model_modes: list[bool] = []
        self.progress: list[Step] = []
        self.skew_s = 0.0
        self._watch(monkeypatch, module)
        self.globals_before = (module.batch_generation, module.get_reward, module.forward)
        self.steps, self.evaluations, _ = runner.run(
            spec,
            workload,
            self.evaluate,
            self.progress.append,
            clock=lambda: time.perf_counter() + self.skew_s,
        )
        self.globals_after = (module.batch_generation, module.get_reward, module.forward)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        generate, reward, build = module.batch_generation, module.get_reward, trl_ppo._build_trainer

        def watched_generate(model: Any, queries: torch.Tensor, *args: Any) -> Any:
            self.generation_configs.append(model.generation_config)
            self.num_frozen.append(gc.get_freeze_count())
            outputs = generate(model, queries, *args)
            self.query_rows += [[t for t in row if t != PAD] for row in queries.tolist()]
            self.response_rows.append(outputs[0][:, queries.shape[1] :].tolist())
            return outputs

        def watched_build(*args: Any) -> Any:
            trainer = build(*args)

            def count(*_: Any) -> None:
                self.num_optimizer_steps += 1

            def watched_reward(model: Any, *args: Any) -> Any:
                outputs = reward(model, *args)
                if model is trainer.reward_model:
                    self.raw_scores.append(outputs[1].clone())
                return outputs

            trainer.optimizer.optimizer.register_step_pre_hook(count)
            monkeypatch.setattr(module, "get_reward", watched_reward)
            self.globals_before = (module.batch_generation, module.get_reward, module.forward)
            return trainer

        monkeypatch.setattr(module, "batch_generation", watched_generate)
        monkeypatch.setattr(trl_ppo, "_build_trainer", watched_build)

    def evaluate(
        self, policy: Any, *, step: int, elapsed_train_s: float, responses_trained: int
    ) -> Evaluation:
        self.model_modes.append(policy.training)
        policy.eval()
        torch.rand(step + 1)
        np.random.rand(step + 1)
        random.random()
        self.skew_s += EVALUATION_S
        return Evaluation(
            step=step,
            elapsed_train_s=elapsed_train_s,
            responses_trained=responses_trained,
            accuracy=None,
            score_mean=float(next(policy.parameters()).sum()),
            length_mean=0.0,
            eval_s=EVALUATION_S,
        )


@pytest.fixture(scope="module")
def watched() -> Any:
    require_trl()
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Watched(monkeypatch, make_spec(), TinyWorkload())


def test_every_draw_is_trained_exactly_once(watched: Watched) -> None:
    workload = TinyWorkload()
    drawn = Counter(workload.prompts.draw(n).token_ids for n in range(16))
    assert max(drawn.values()) == 2
    assert Counter(tuple(row) for row in watched.query_rows) == drawn
    assert [step.responses_trained for step in watched.steps] == [8, 8]
    assert [(s.step, s.drawn, s.trained, s.in_flight, s.queued) for s in watched.steps] == [
        (0, 8, 8, 0, 0),
        (1, 16, 16, 0, 0),
    ]


def expected_length(row: list[int], ends: set[int]) -> int:
    """Tokens up to the first of ``ends``, an end that is EOS included."""
    for place, token in enumerate(row):
        if token in ends:
            return place + (token == EOS)
    return len(row)


def test_no_token_after_the_stop_token_is_sampled_or_counted(watched: Watched) -> None:
    """trl#2387: without a stop token in the model's generation config, TRL decodes on to the limit."""
    num_early = 0
    for rows, step in zip(watched.response_rows, watched.steps, strict=True):
        for row in rows:
            end = expected_length(row, {EOS})
            num_early += end < len(row)
            assert set(row[end:]) <= {PAD}, "HF pads a row that has stopped"
        assert step.tokens_decoded == sum(expected_length(row, {EOS}) for row in rows)
        assert step.trained_lengths == [expected_length(row, {EOS, PAD}) for row in rows]
        assert step.tokens_trained == sum(step.trained_lengths)
        assert step.metrics["val/num_eos_tokens"] == sum(EOS in row for row in rows)
    assert 0 < num_early < 16


def test_generation_uses_the_cache_and_no_setting_of_the_model_folder(watched: Watched) -> None:
    for config in watched.generation_configs:
        assert config.use_cache is True
        assert config.eos_token_id == [EOS]
        assert (config.repetition_penalty, config.min_p) == (None, None)


def test_the_parts_of_a_step_add_up_to_no_more_than_the_step(watched: Watched) -> None:
    for step in watched.steps:
        parts_s = (step.generate_s, step.score_s, step.train_s)
        assert min(parts_s) > 0
        assert sum(parts_s) <= step.step_s + 1e-9


def test_evaluation_is_in_no_step_and_leaves_the_modes_alone(watched: Watched) -> None:
    assert watched.skew_s == 3 * EVALUATION_S
    assert max(step.step_s for step in watched.steps) < EVALUATION_S
    assert [(e.step, e.responses_trained) for e in watched.evaluations] == [(0, 0), (1, 8), (2, 16)]
    elapsed_s = [e.elapsed_train_s for e in watched.evaluations]
    assert elapsed_s == pytest.approx([0.0, watched.steps[0].step_s, sum(s.step_s for s in watched.steps)])
    assert watched.model_modes[1:] == [True, True], "eval() of the evaluation must not stick"
    weights = [e.score_mean for e in watched.evaluations]
    assert len(set(weights)) == 3, "the policy under training is what is evaluated"


def test_the_raw_score_is_reported_and_trl_penalises_a_missing_stop_token(watched: Watched) -> None:
    for step, scores, rows in zip(watched.steps, watched.raw_scores, watched.response_rows, strict=True):
        assert step.reward_mean is not None
        assert step.reward_mean == pytest.approx(float(scores.mean()), abs=1e-6)
        # A pad token sampled before EOS does not hide it here: TRL looks at the whole truncated response.
        num_missing = sum(EOS not in row for row in rows)
        assert step.metrics["objective/scores"] == pytest.approx(
            step.reward_mean - 0.5 * num_missing / 8, abs=1e-6
        )
        assert step.kl == step.metrics["objective/kl"]


def test_progress_is_told_and_trl_is_left_as_it_was(watched: Watched) -> None:
    assert watched.progress == watched.steps
    assert watched.globals_after == watched.globals_before
    assert watched.num_optimizer_steps == 2 * 2


def test_trls_garbage_collections_do_not_walk_all_loaded_libraries(watched: Watched) -> None:
    assert min(watched.num_frozen) > 10_000
    assert gc.get_freeze_count() == 0


def test_every_mini_batch_is_an_optimizer_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL alone accumulates over the mini-batches: one step an epoch. And: no evaluation, saved, silent.

    Two steps, because on the last batch of a data loader accelerate never accumulates.
    """
    require_trl()
    algo_config = {"num_ppo_epochs": 2, "num_mini_batches": 4}
    spec = make_spec(eval_every=0, save_to=tmp_path / "model", algo_config=algo_config)
    watched = Watched(monkeypatch, spec, TinyWorkload())
    assert watched.num_optimizer_steps == 2 * 2 * 4
    assert watched.evaluations == []
    assert capsys.readouterr().out == "", "standard output belongs to the progress"
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model" / "critic")
    for model, untrained in ((saved, TinyWorkload().make_policy()), (critic, TinyWorkload().make_critic())):
        before = untrained.state_dict()
        assert any(not torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token_id == EOS


def test_evaluating_more_often_changes_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    require_trl()
    # Two mini-batches, so that numpy's shuffle of the rows counts.
    algo_config = {"num_ppo_epochs": 1, "num_mini_batches": 2}
    ends = []
    for eval_every in (1, 5):
        with pytest.MonkeyPatch.context() as patch:
            watched = Watched(patch, make_spec(eval_every, algo_config=algo_config), TinyWorkload())
        lengths = [step.trained_lengths for step in watched.steps]
        ends.append((lengths, [step.metrics["loss/policy_avg"] for step in watched.steps]))
    assert [e.step for e in watched.evaluations] == [0, 2]
    assert ends[0] == ends[1]


def test_the_algorithm_and_sampling_settings_reach_trl() -> None:
    require_trl()
    algo_config = {
        "num_ppo_epochs": 3,
        "num_mini_batches": 2,
        "gamma": 0.9,
        "lam": 0.8,
        "kl_coef": 0.2,
        "kl_estimator": "k3",
        "cliprange": 0.3,
        "cliprange_value": 0.4,
        "vf_coef": 0.6,
        "whiten_rewards": True,
        "missing_eos_penalty": 2.0,
    }
    spec = make_spec(batch_size=16, algo_config=algo_config)
    algorithm = trl_ppo.check_ppo(spec.train, TinyWorkload())
    arguments = trl_ppo._arguments(runner.import_module("ppo"), spec, algorithm, "unused", has_stop=True)
    same = algo_config | {
        "temperature": 0.9,
        "response_length": 12,
        "total_episodes": 32,
        "stop_token": "eos",
    }
    same |= {"per_device_train_batch_size": 8, "bf16": False}
    same |= {"gradient_checkpointing": False, "local_rollout_forward_batch_size": 16, "seed": 3}
    assert {name: getattr(arguments, name) for name in same} == same


@pytest.mark.parametrize("lr_scheduler_type", ["linear", "constant", "cosine"])
def test_trl_gets_the_optimizer_and_the_learning_rates_of_our_learner(
    lr_scheduler_type: str, tmp_path: Path
) -> None:
    require_trl()
    learner = {
        "learning_rate": 1e-4,
        "adam_beta1": 0.8,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-6,
        "weight_decay": 0.1,
        "max_grad_norm": None,
        "lr_scheduler_type": lr_scheduler_type,
        "warmup_steps": 2,
    }
    spec, workload = make_spec(num_steps=5, learner=learner), TinyWorkload()
    module, algorithm = runner.import_module("ppo"), trl_ppo.check_ppo(spec.train, workload)
    trainer = trl_ppo._build_trainer(module, spec, workload, algorithm, str(tmp_path))
    ours = AccelerateLearner(
        workload.make_policy(),
        workload.make_critic(),
        config=spec.train.learner,
        temperature=1.0,
        num_steps=5,
    )
    for _ in range(5):
        assert trainer.lr_scheduler.get_last_lr() == pytest.approx(ours._scheduler.get_last_lr())
        trainer.lr_scheduler.step()
        ours._scheduler.step()
    groups = [[g for g in optimizer.param_groups] for optimizer in (trainer.optimizer, ours._optimizer)]
    assert [len(group["params"]) for group in groups[0]] == [len(group["params"]) for group in groups[1]]
    for name in ("betas", "eps", "weight_decay"):
        assert groups[0][0][name] == groups[1][0][name]


@pytest.mark.parametrize(
    ("train", "workload", "words"),
    [
        (
            {"sampling": {"top_k": 5}},
            {},
            r"top_k=5, top_p=1.0, min_p=0.0: TRL's .* full distribution; .* or leave",
        ),
        ({}, {"reward_path": None}, "reward models only, .* or leave the trl runner out"),
        ({"learner": {"max_grad_norm": 1.0}}, {}, r"max_grad_norm is 1.0, .* set learner.max_grad_norm=null"),
        ({"algo_config": {"num_mini_batches": 3}}, {}, "batch_size=8 is no multiple of num_mini_batches=3"),
        (
            {"algo_config": {"whiten_rewards": True, "num_mini_batches": 2}},
            {},
            "with 4 rows a mini-batch: TRL needs 8",
        ),
        ({}, {"stop_token_ids": (EOS, 5)}, r"missing_eos_penalty with the stop tokens \[2, 5\]"),
        ({"algo_config": {"kl_coeff": 1}}, {}, "unknown key 'kl_coeff'; did you mean 'kl_coef'"),
    ],
)
def test_work_that_trl_cannot_do_is_refused(
    train: dict[str, Any], workload: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        trl_ppo.check_ppo(make_spec(**train).train, TinyWorkload(**workload))


def test_another_series_of_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "1.16.0")
    with pytest.raises(
        ConfigError, match=r"trl 1.16.0 is installed, .* needs 1.12.x, .*oppo-kit\[baseline\]"
    ):
        runner.run(make_spec(), TinyWorkload(), None, print)  # pyright: ignore[reportArgumentType]


def test_a_missing_trl_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(MissingExtraError, match=r"trl is not installed; .*oppo-kit\[baseline\]"):
        runner.run(make_spec(), TinyWorkload(), None, print)  # pyright: ignore[reportArgumentType]


def test_the_pad_token_neither_stops_nor_occurs_in_a_prompt() -> None:
    """trl#5303: with pad equal to EOS, TRL would mask the EOS that the policy sampled."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = "<eos>"
    prepared = prepare_tokenizer(tokenizer, (EOS,), [[5, 6]])
    assert (prepared.pad_token_id, prepared.eos_token_id, prepared.padding_side) == (BOS, EOS, "left")
    assert tokenizer.pad_token_id == EOS, "the caller's tokenizer is left alone"
    with pytest.raises(
        ConfigError, match=r"the special tokens \[1, 2\] all stop a response or occur in a prompt"
    ):
        prepare_tokenizer(tokenizer, (EOS,), [[BOS, 6]])


def test_the_stop_token_is_what_trl_takes_for_eos() -> None:
    assert prepare_tokenizer(make_tokenizer(), (5,), [[BOS, 6]]).eos_token_id == 5


def test_trl_is_imported_inside_functions_only() -> None:
    """Listing runners, or a run without TRL, must not need it."""
    tree = ast.parse(Path(runner.__file__).read_text())
    at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert at_import
    assert not [node for node in at_import if ast.unparse(node).split()[1].split(".")[0] == "trl"]
