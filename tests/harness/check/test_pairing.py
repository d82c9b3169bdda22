"""What may be compared: every refusal with its words, and how runs are paired."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from check_results import REFERENCE, make_checked, save
from results_factory import make_result, make_run, without_accuracy

from harness.check.pairing import SAME_WORK, curves_of
from harness.check.pairing import pair_results as pair_scores
from harness.schema import Result, Workload
from oppo_kit.errors import ConfigError, StateError, UnknownNameError

# The factory gives accuracies by hand.
pair_results = partial(pair_scores, by="accuracy")


def make_two() -> tuple[Result, Result]:
    return make_checked([REFERENCE] * 2), make_checked([REFERENCE] * 2, runner="trl")


def with_config(result: Result, **values: Any) -> Result:
    result.workload.config.update(values)
    return result


# --- files


def test_folders_and_files_are_read_and_paired_by_seed(tmp_path: Path) -> None:
    run = save(make_checked({3: (0.2, 0.5, 0.7), 1: (0.2, 0.4, 0.6)}), tmp_path / "run")
    reference = save(
        make_checked({1: (0.2, 0.3, 0.5), 3: (0.2, 0.1, 0.9)}, runner="trl"), tmp_path / "reference"
    )
    found = pair_results(run, reference / "result.json")
    assert found.seeds == (1, 3)
    assert found.run.tolist() == [[0.2, 0.4, 0.6], [0.2, 0.5, 0.7]]
    assert found.reference.tolist() == [[0.2, 0.3, 0.5], [0.2, 0.1, 0.9]]
    assert found.responses.tolist() == [0, 24, 48]
    assert (found.run_label, found.reference_label) == ("both", "trl")
    assert (found.spare, found.is_smoke) == (None, False)


def test_a_smoke_run_on_either_side_is_marked() -> None:
    run, reference = make_two()
    assert pair_results(run, reference.model_copy(update={"is_quick": True})).is_smoke
    assert pair_results(run.model_copy(update={"is_quick": True}), reference).is_smoke


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    folder = save(make_checked([REFERENCE]), tmp_path / "run")
    values = json.loads((folder / "result.json").read_text()) | {"schema_version": 99}
    (folder / "result.json").write_text(json.dumps(values))
    with pytest.raises(StateError, match="has schema_version 99, this release reads 1"):
        pair_results(folder, make_checked([REFERENCE]))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    folder = save(make_checked([REFERENCE]), tmp_path / "run")
    text = (folder / "result.json").read_text()
    (folder / "result.json").write_text(text[: len(text) // 2])
    with pytest.raises(StateError, match="does not fit schema version 1: the file: Invalid JSON: EOF"):
        pair_results(make_checked([REFERENCE]), folder)


def test_a_nan_in_a_file_is_refused(tmp_path: Path) -> None:
    folder = save(make_checked([REFERENCE]), tmp_path / "run")
    text = (folder / "result.json").read_text()
    (folder / "result.json").write_text(text.replace('"accuracy":0.6', '"accuracy":NaN'))
    with pytest.raises(StateError, match=r"evaluations\.2\.accuracy: Input should be a finite number"):
        pair_results(make_checked([REFERENCE]), folder)


# --- runners


def test_a_result_with_several_runners_asks_which() -> None:
    several = make_result({"trl": [make_run([1.0] * 12)], "both": [make_run([1.0] * 12)]})
    one = make_checked([(0.2, 0.5, 0.8)])
    with pytest.raises(ConfigError, match="the run holds the runners both, trl; choose one with --runner"):
        pair_results(several, one)
    with pytest.raises(
        ConfigError, match="the reference holds the runners both, trl; choose one with --reference-runner"
    ):
        pair_results(one, several)
    found = pair_results(several, several, runner="both", reference_runner="trl")
    assert (found.run_label, found.reference_label) == ("both", "trl")


def test_an_unknown_runner_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown runner of the run 'bth'; did you mean 'both'\? known: both"
    ):
        pair_results(*make_two(), runner="bth")


def test_a_result_without_runners_or_runs_is_refused() -> None:
    with pytest.raises(StateError, match="the run holds no runner; pass a benchmark that has run"):
        pair_results(make_result({}), make_checked([REFERENCE]))
    with pytest.raises(StateError, match="runner 'trl' of the reference has no runs"):
        pair_results(make_checked([REFERENCE]), make_result({"trl": []}))


def test_a_runner_is_not_compared_with_itself(tmp_path: Path) -> None:
    folder = save(make_checked([REFERENCE] * 2), tmp_path / "run")
    with pytest.raises(ConfigError, match="runner 'both' of .* would be compared with itself; pass another"):
        pair_results(folder, folder / "result.json")
    again = save(make_checked([REFERENCE] * 2), tmp_path / "again")
    assert pair_results(folder, again).seeds == (0, 1)


def test_labels_tell_the_sides_apart() -> None:
    results = [make_checked([REFERENCE], name=name) for name in ("monday", "tuesday")]
    found = pair_results(*results)
    assert (found.run_label, found.reference_label) == ("monday", "tuesday")
    found = pair_results(results[0], results[0])
    assert (found.run_label, found.reference_label) == ("the run", "the reference")


# --- the same work


def test_of_many_differences_six_are_named_and_the_others_counted() -> None:
    run, reference = make_two()
    for name in SAME_WORK:
        setattr(run.workload, name, "this")
    with pytest.raises(StateError, match=f"; and {len(SAME_WORK) - 6} more; run both") as error:
        pair_results(run, reference)
    assert str(error.value).count(" in the run, ") == 6


@pytest.mark.parametrize("name", SAME_WORK)
def test_every_part_of_the_workload_must_be_the_same(name: str) -> None:
    run, reference = make_two()
    kind = Workload.model_fields[name].annotation
    ours, theirs = (7, 8) if kind is int else (0.25, 0.75) if kind is float else ("this", "that")
    setattr(run.workload, name, ours)
    setattr(reference.workload, name, theirs)
    message = (
        f"not the same work: workload.{name} is {ours!r} in the run, {theirs!r} in the reference; run both"
    )
    with pytest.raises(StateError, match=message):
        pair_results(run, reference)


def test_what_only_concerns_speed_may_differ() -> None:
    run, reference = make_two()
    run.workload.num_warmup_steps = 5
    run.workload.placement = "split"
    run.workload.backend = "vllm"
    with_config(
        run, overlap={"delta": 16, "schedule": "oppo"}, seed=4, backend="vllm", vllm={"kv_cache_gib": 9.0}
    )
    with_config(reference, overlap={"delta": 0}, seed=0)
    assert pair_results(run, reference).seeds == (0, 1)


def test_another_setting_is_refused_by_its_path() -> None:
    run, reference = make_two()
    with_config(run, learner={"learning_rate": 1e-4}, algo_config={"kl_coef": 0.1})
    with_config(reference, learner={"learning_rate": 1e-5}, algo_config={"kl_coef": 0.1, "cliprange": 0.2})
    message = (
        r"workload.config.algo_config.cliprange is 'not set' in the run, 0.2 in the reference; "
        r"workload.config.learner.learning_rate is 0.0001 in the run, 1e-05 in the reference"
    )
    with pytest.raises(StateError, match=message):
        pair_results(run, reference)


def test_a_setting_that_an_older_release_did_not_know_has_its_default() -> None:
    run, reference = make_two()
    with_config(run, reward_threads=32, actor_lora=None)
    assert pair_results(run, reference).seeds == (0, 1)
    with_config(run, actor_lora={"r": 8})
    with pytest.raises(StateError, match=r"workload.config.actor_lora.r is 8 in the run, 'not set' in the"):
        pair_results(run, reference)


def test_a_setting_is_not_named_twice() -> None:
    run, reference = make_two()
    run.workload.dtype = "bfloat16"
    with_config(run, dtype="bfloat16")
    with_config(reference, dtype="float32")
    with pytest.raises(StateError, match=r"workload.dtype is 'bfloat16'") as refused:
        pair_results(run, reference)
    assert "workload.config.dtype" not in str(refused.value)


# --- what is compared


def test_scores_are_compared_unless_accuracy_is_asked_for() -> None:
    run, reference = make_two()
    assert pair_scores(run, reference).run == pytest.approx(2 * pair_results(run, reference).run)
    with pytest.raises(
        UnknownNameError, match=r"unknown held-out value 'acuracy'; did you mean 'accuracy'\?"
    ):
        pair_scores(run, reference, by="acuracy")  # type: ignore[arg-type]
    with pytest.raises(
        StateError,
        match=r"seed 0 of the run has no held-out accuracy after step 0, as where .* choose another value with --by",
    ):
        pair_results(without_accuracy(run), reference)


def test_curves_of_one_result_are_those_that_would_be_paired() -> None:
    run, reference = make_two()
    responses, curves = curves_of(run, by="accuracy")
    paired = pair_results(run, reference)
    assert responses.tolist() == paired.responses.tolist()
    assert curves.tolist() == paired.run.tolist()
    run.runners["both"].runs[1].evaluations.pop(0)
    with pytest.raises(
        StateError, match="seed 1 of the result is evaluated after steps 6, 12, seed 0 of the result"
    ):
        curves_of(run)


# --- the same evaluations


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "no held-out accuracy after step 6, as where"),
        (math.nan, "held-out accuracy nan after step 6; a check"),
        (math.inf, "held-out accuracy inf after step 6; a check"),
    ],
    ids=["none", "nan", "inf"],
)
def test_a_missing_value_is_refused(value: float | None, words: str) -> None:
    run, reference = make_two()
    run.runners["both"].runs[1].evaluations[1].accuracy = value
    with pytest.raises(StateError, match=f"seed 1 of the run has {words}"):
        pair_results(run, reference)


def test_evaluations_at_other_steps_are_refused() -> None:
    run, reference = make_checked([(0.2, 0.4, 0.5, 0.6)]), make_checked([REFERENCE])
    with pytest.raises(
        StateError,
        match=r"seed 0 of the run is evaluated after steps 0, 4, 8, 12, seed 0 of the reference after 0, 6, 12",
    ):
        pair_results(run, reference)


def test_evaluations_after_other_work_are_refused() -> None:
    run, reference = make_two()
    run.runners["both"].runs[0].evaluations[1].responses_trained = 23
    with pytest.raises(
        StateError,
        match=r"seed 0 of the run had trained 0, 23, 48 responses at its evaluations, seed 0 of the reference 0, 24",
    ):
        pair_results(run, reference)


def test_a_run_with_fewer_steps_is_refused() -> None:
    run, reference = make_two()
    del run.runners["both"].runs[1].steps[-2:]
    with pytest.raises(
        StateError, match="seed 1 of the run has 10 steps, seed 0 of the reference has 12; run"
    ):
        pair_results(run, reference)


@pytest.mark.parametrize(
    ("kept", "listed"), [(slice(0, 1), "0"), (slice(1, 3), "6, 12"), (slice(0, 0), "none")]
)
def test_a_curve_without_its_start_or_any_training_is_refused(kept: slice, listed: str) -> None:
    results = make_two()
    for result in results:
        for runner in result.runners.values():
            for run in runner.runs:
                run.evaluations = run.evaluations[kept]
    with pytest.raises(
        StateError,
        match=f"seed 0 of the reference is evaluated after steps {listed}; a check needs the evaluation",
    ):
        pair_results(*results)


# --- seeds


def test_results_without_a_common_seed_are_refused() -> None:
    run, reference = make_checked({5: REFERENCE, 4: REFERENCE}), make_checked([REFERENCE] * 2, runner="trl")
    with pytest.raises(StateError, match="no seed in common: the run has 4, 5, the reference 0, 1; run both"):
        pair_results(run, reference)


def test_seeds_on_one_side_only_are_refused_by_name() -> None:
    run = make_checked({0: REFERENCE, 1: REFERENCE, 7: REFERENCE})
    reference = make_checked([REFERENCE] * 4, runner="trl")
    with pytest.raises(
        StateError,
        match="seed 7 only in the run and seeds 2, 3 only in the reference: seeds that are left out",
    ):
        pair_results(run, reference)
    del run.runners["both"].runs[-1]
    with pytest.raises(StateError, match="^seeds 2, 3 only in the reference: seeds that are left out"):
        pair_results(run, reference)


def test_a_single_seed_keeps_the_other_side_for_its_spread() -> None:
    reference = make_checked([(0.2, 0.5, 0.6), (0.2, 0.5, 0.7), (0.2, 0.5, 0.8)], runner="trl")
    found = pair_results(make_checked({1: REFERENCE}), reference)
    assert found.seeds == (1,)
    assert found.reference.tolist() == [[0.2, 0.5, 0.7]]
    assert found.spare is not None
    assert found.spare[:, -1].tolist() == [0.6, 0.7, 0.8]
