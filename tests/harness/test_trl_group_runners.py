"""Runs stock TRL's GRPO, RLOO and OnlineDPO trainers for real, on tiny random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_groups_watched import (
    ALGORITHMS,
    BATCH_SIZE,
    EVALUATION_S,
    GROUP_SIZES,
    SavedWorkload,
    Watched,
    make_spec,
    never,
)
from trl_tiny import EOS, PAD, TinyPrompts, make_classifier, require_trl

from harness.runners import oppo


@pytest.fixture(scope="module", params=list(ALGORITHMS))
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    require_trl()
    return Watched(make_spec(request.param, eval_every=1), SavedWorkload(tmp_path_factory.mktemp("policy")))


def test_each_step_trains_the_draws_that_ours_would_and_each_as_often(watched: Watched) -> None:
    size = watched.group_size
    assert size == GROUP_SIZES[watched.algo]
    num_rows = BATCH_SIZE * size
    for number in (0, 1):
        drawn = [TinyPrompts().draw(number * BATCH_SIZE + index).token_ids for index in range(BATCH_SIZE)]
        rows = watched.rows[number * num_rows : (number + 1) * num_rows]
        assert sorted(query for query, _ in rows) == sorted(drawn * size)
    assert len(watched.widths) == 2, "one call of generate a step"
    assert [step.responses_trained for step in watched.steps] == [num_rows] * 2
    assert [(s.step, s.drawn, s.trained, s.in_flight) for s in watched.steps] == [(0, 4, 4, 0), (1, 8, 8, 0)]


def test_no_token_after_the_stop_token_is_sampled_or_counted(watched: Watched) -> None:
    lengths = [len(response) for _, response in watched.responses()]
    for (_, row), length in zip(watched.rows, lengths, strict=True):
        assert set(row[length:]) <= {PAD}, "HF pads a row that has stopped"
    assert 0 < sum(EOS in row for _, row in watched.rows) < len(watched.rows)
    num_rows = BATCH_SIZE * watched.group_size
    for number, step in enumerate(watched.steps):
        assert step.trained_lengths == lengths[number * num_rows : (number + 1) * num_rows]
        assert step.tokens_decoded == step.tokens_trained == sum(step.trained_lengths)
        assert watched.widths[number] == max(step.trained_lengths), "no decoding beyond the slowest row"


def test_both_sides_give_a_response_the_same_reward(watched: Watched) -> None:
    """BOS, prompt, response and its EOS by themselves, without padding: what our scorer reads."""
    model: Any = make_classifier(1)
    with torch.no_grad():
        expected = [
            float(model.score(model.model(torch.tensor([[*query, *response]])).last_hidden_state)[0, -1, 0])
            for query, response in watched.responses()
        ]
    assert watched.scores == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for score in expected}) > len(expected) // 2
    num_rows = BATCH_SIZE * watched.group_size
    for number, step in enumerate(watched.steps):
        raw = expected[number * num_rows : (number + 1) * num_rows]
        assert step.reward_mean == pytest.approx(sum(raw) / num_rows, abs=1e-5)


def test_generation_uses_the_cache_and_no_setting_of_the_model_folder(watched: Watched) -> None:
    for config in watched.generation_configs:
        assert (config.use_cache, config.eos_token_id, config.pad_token_id) == (True, EOS, PAD)
        assert (config.repetition_penalty, config.temperature) == (1.0, 0.9)
        assert not config.min_p


def test_the_parts_of_a_step_add_up_to_no_more_than_the_step(watched: Watched) -> None:
    for step in watched.steps:
        parts_s = (step.generate_s, step.score_s, step.train_s)
        assert min(parts_s) > 0
        assert sum(parts_s) <= step.step_s + 1e-9
    assert watched.progress == watched.steps


def test_evaluation_is_in_no_step(watched: Watched) -> None:
    assert watched.skew_s == 3 * EVALUATION_S
    assert max(step.step_s for step in watched.steps) < EVALUATION_S
    num_rows = BATCH_SIZE * watched.group_size
    seen = [(e.step, e.responses_trained) for e in watched.evaluations]
    assert seen == [(0, 0), (1, num_rows), (2, 2 * num_rows)]
    assert len({e.score_mean for e in watched.evaluations}) == 3, (
        "the policy under training is what is evaluated"
    )


def test_the_kl_is_that_of_whole_responses_without_padding(watched: Watched) -> None:
    first, second = (step.kl for step in watched.steps)
    if watched.algo == "grpo":
        assert (first, second) == (None, None), "beta is 0: there is no reference"
        return
    assert first == pytest.approx(0.0, abs=1e-4)
    assert second is not None
    assert abs(second) > 1e-3
    if watched.algo == "rloo":  # whose own metric is the mean over tokens
        step = watched.steps[1]
        per_token = step.metrics["kl"]
        assert per_token is not None
        assert second == pytest.approx(per_token * step.tokens_trained / step.responses_trained, rel=1e-3)


def test_a_step_is_an_optimizer_step_over_all_rows_unless_asked_otherwise(watched: Watched) -> None:
    assert watched.num_optimizer_steps == 2
    arguments = watched.trainer.args
    assert arguments.gradient_accumulation_steps == 1
    rows = BATCH_SIZE * (1 if watched.algo == "online_dpo" else watched.group_size)
    assert arguments.per_device_train_batch_size == rows
    same = {
        "bf16": False,
        "gradient_checkpointing": False,
        "max_grad_norm": 0.0,
        "temperature": 0.9,
        "seed": 3,
    }
    assert {name: getattr(arguments, name) for name in same} == same
    settings = ALGORITHMS[watched.algo]
    assert {name: getattr(arguments, name) for name in settings} == settings


@pytest.mark.parametrize("algo", ["grpo", "rloo"])
def test_passes_mini_batches_and_a_token_budget_are_laid_out(
    algo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two passes of two optimizer steps, each over rows that come in as many forward passes as fit the budget."""
    require_trl()
    algo_config = {"num_generations": 4, "num_iterations": 2, "num_mini_batches": 2, "beta": 0.1}
    # 8 rows a mini-batch, 17 tokens at most a row.
    learner = {"learning_rate": 1e-2, "micro_batch_tokens": 70, "max_grad_norm": 0.5}
    spec = make_spec(algo, algo_config=algo_config, learner=learner, save_to=tmp_path / "model", eval_every=0)
    watched = Watched(spec, SavedWorkload(tmp_path / "policy"))
    arguments = watched.trainer.args
    layout = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    assert [getattr(arguments, name) for name in layout] == [4, 2, 4]
    assert watched.num_optimizer_steps == 2 * 2 * 2
    assert len(watched.steps) == len(watched.widths) == 2
    assert [step.responses_trained for step in watched.steps] == [16, 16]
    assert watched.steps[0].kl == pytest.approx(0.0, abs=1e-3)
    assert abs(watched.steps[1].kl or 0.0) > 1e-3
    assert arguments.max_grad_norm == 0.5
    assert watched.evaluations == []
    assert capsys.readouterr().out == "", "standard output belongs to the progress"
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert any(not torch.equal(p, watched.before[name]) for name, p in saved.named_parameters())
    assert saved.config.use_cache
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token_id == EOS


def test_evaluating_more_often_changes_no_training(tmp_path: Path) -> None:
    require_trl()
    ends = []
    for eval_every in (1, 5):
        watched = Watched(make_spec("grpo", eval_every=eval_every), SavedWorkload(tmp_path))
        ends.append(([s.trained_lengths for s in watched.steps], [s.metrics["loss"] for s in watched.steps]))
    assert [e.step for e in watched.evaluations] == [0, 2]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("algo", list(ALGORITHMS))
def test_lora_trains_the_adapter_and_the_reference_pass_is_scoring(algo: str, tmp_path: Path) -> None:
    require_trl()
    config = ALGORITHMS[algo] | ({"beta": 0.1} if algo != "online_dpo" else {})
    spec = make_spec(algo, actor_lora={"r": 4}, algo_config=config)
    watched = Watched(spec, SavedWorkload(tmp_path))
    model, meter_s = watched.trainer.model, [step.score_s for step in watched.steps]
    assert watched.trainer.ref_model is None, "the base is the reference"
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, watched.before[n])}
    assert changed == {name for name in watched.before if "lora_" in name}
    assert len(changed) == 2 * 7 * 2, "A and B of seven linear layers in two blocks"
    assert min(meter_s) > 0
    first, second = (step.kl for step in watched.steps)
    assert first == pytest.approx(0.0, abs=1e-4), "an adapter begins as nothing"
    assert second is not None
    assert abs(second) > 1e-4, "the reference stays untrained"


@pytest.mark.parametrize("algo", list(ALGORITHMS))
def test_reward_functions_see_what_they_see_in_our_engine(algo: str, tmp_path: Path) -> None:
    require_trl()
    seen: list[dict[str, Any]] = []

    def count_letters(completions: list[str], **columns: Any) -> list[float]:
        seen.append({"completions": completions} | columns)
        return [float(len(text)) for text in completions]

    workload = SavedWorkload(tmp_path, reward_path=None, reward_functions=[count_letters])
    watched = Watched(make_spec(algo), workload)
    theirs, num_calls = merged(seen), len(seen)
    assert num_calls == 2, "one call a step"
    assert theirs["completion_ids"] == [response for _, response in watched.responses()]
    assert theirs["is_stopped"] == [EOS in row for row in theirs["completion_ids"]]
    assert [step.reward_mean for step in watched.steps] == pytest.approx(
        [float(torch.tensor([float(len(text)) for text in call["completions"]]).mean()) for call in seen]
    )
    seen.clear()
    oppo.run(make_spec(algo, "sequential"), workload, never, lambda _: None)
    ours = merged(seen)
    assert set(ours) == set(theirs), "the same arguments"
    assert sorted(ours["prompts"]) == sorted(theirs["prompts"])
    assert all(prompt.isalpha() for prompt in theirs["prompts"]), "in words, without BOS"


def merged(calls: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """All calls as one."""
    return {name: [value for call in calls for value in call[name]] for name in calls[0]}
