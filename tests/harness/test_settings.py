"""Layers of settings: the last word wins, sections merge, and everything is checked before a model is loaded."""

from __future__ import annotations

import pytest

from harness.settings import load_train_config
from oppo_kit.errors import ConfigError, UnknownNameError
from oppo_kit.registry import create_algorithm


def test_the_layers_go_from_defaults_over_task_and_file_to_options_and_sets(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("batch_size: 12\nsampling: {response_length: 99}\nalgo_config: {lam: 0.9}\n")
    train = load_train_config(
        file, options={"seed": 4, "batch_size": None}, overrides=["sampling.temperature=0.5"]
    )
    assert (train.batch_size, train.seed) == (12, 4)
    assert (train.sampling.response_length, train.sampling.temperature) == (99, 0.5)
    assert train.algo_config["lam"] == 0.9
    assert train.algo_config["num_mini_batches"] == 4, "the task's own setting for PPO"
    assert train.learner.learning_rate == 1.2e-4, "the task's own setting"


def test_delta_is_half_of_b_where_nobody_says_anything() -> None:
    assert load_train_config(options={"batch_size": 10}).overlap.delta == 5
    assert load_train_config(overrides=["overlap.delta=0"]).overlap.delta == 0
    assert load_train_config(overrides=["overlap.schedule=sequential"]).overlap.delta == 0
    assert load_train_config(options={"task": "math"}).overlap.delta == 32
    assert load_train_config(overrides=["batch_size='8'"]).overlap.delta == 4
    assert load_train_config(overrides=["overlap.max_age=0"]).overlap.delta == 0


@pytest.mark.parametrize(
    ("options", "overrides", "error", "message"),
    [
        ({"algo": "pop"}, [], UnknownNameError, "unknown algorithm 'pop'; did you mean 'ppo'"),
        ({"task": "tyni"}, [], UnknownNameError, "unknown task 'tyni'; did you mean 'tiny'"),
        (
            {},
            ["learner.learning_rte=1"],
            ConfigError,
            "unknown key 'learner.learning_rte'; did you mean 'learning_rate'",
        ),
        (
            {},
            ["algo_config.clip=1"],
            ConfigError,
            "algo_config of ppo: unknown key 'clip'; did you mean 'cliprange'",
        ),
        ({}, ["overlap=5"], ConfigError, "overlap = 5"),
        ({}, ["batch_size=many"], ConfigError, "batch_size = 'many'"),
    ],
)
def test_what_does_not_fit_is_named(options, overrides, error, message) -> None:
    with pytest.raises(error, match=message):
        load_train_config(options=options, overrides=overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "holds a list; it must be a mapping"),
        ("a: [", "is not valid YAML"),
        ("bach_size: 2", "unknown key"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, message) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_train_config(file)


def test_a_file_in_another_encoding_is_refused(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes("model: tiny # Größe".encode("latin-1"))
    with pytest.raises(ConfigError, match="is no UTF-8 text; save it as UTF-8"):
        load_train_config(file)


def test_a_missing_file_is_named_and_an_empty_one_is_fine(tmp_path) -> None:
    with pytest.raises(
        ConfigError, match="cannot read .*none.yaml: No such file or directory; pass a YAML file"
    ):
        load_train_config(tmp_path / "none.yaml")
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    assert load_train_config(empty).model == "tiny"


@pytest.mark.parametrize(
    ("algo", "sizes"),
    [("ppo", (32, 1, 16)), ("grpo", (8, 8, 4)), ("rloo", (16, 4, 8)), ("online_dpo", (32, 2, 16))],
)
def test_the_embedded_task_has_a_size_for_every_algorithm(algo, sizes) -> None:
    train = load_train_config(options={"algo": algo})
    algorithm = create_algorithm(algo, train.algo_config)
    assert (train.batch_size, algorithm.group_size, train.overlap.delta) == sizes
    assert load_train_config(options={"algo": algo, "batch_size": 4}).overlap.delta == 2
    small = load_train_config(options={"algo": algo, "model": "smollm2-135m"})
    assert small.task == "reviews"
    assert small.batch_size % create_algorithm(algo, small.algo_config).num_mini_batches == 0
