"""A run that goes on from a checkpoint is the run that was never stopped."""

from __future__ import annotations

import pytest
import torch
from trl_trainers import (
    logged,
    make_reward_model,
    make_trainer,
    overlap_class,
    parameter_hash,
    stock_class,
    text_data,
    watched,
)

from oppo_kit.errors import StateError
from oppo_kit.integrations.trl.overlapping import STATE_NAME

# Scores are rounded by the shape of the batch they are made in, which with ``sample`` a resumed run has otherwise.
OVERLAP = {"delta": 3, "decode_tokens": 2, "score_at": "batch"}
SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6}


def make(name, folder, *, reward=None, overlap=None, **settings):
    return make_trainer(
        name,
        folder,
        overlap=OVERLAP if overlap is None else overlap,
        reward=reward or make_reward_model(),
        **(SAVING | settings),
    )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", {}),
        ("rloo", {}),
        # Saved in the middle of a batch, which is gone on with.
        ("grpo", {"num_iterations": 2}),
        ("rloo", {"gradient_accumulation_steps": 4, "steps_per_generation": 2}),
    ],
    ids=["grpo", "rloo", "several passes", "rounds within an update"],
)
def test_a_run_that_was_stopped_in_its_second_epoch_goes_on_to_the_bit(name, settings, tmp_path) -> None:
    straight = make(name, tmp_path, **settings)
    straight.train()
    checkpoint = tmp_path / "checkpoint-5"
    state = torch.load(checkpoint / STATE_NAME, weights_only=True)
    assert state["rollouts"]["engine"]["groups"]
    assert not list(checkpoint.glob("*.tmp"))
    resumed = make(name, tmp_path / "again", **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert parameter_hash(resumed.model) == parameter_hash(straight.model)
    assert logged(resumed, "reward") == logged(straight, "reward")


def test_a_checkpoint_of_the_stock_trainer_is_gone_on_with_and_told(tmp_path, caplog) -> None:
    stock = make_trainer("grpo", tmp_path, trainer_class=stock_class("grpo"), **(SAVING | {"max_steps": 2}))
    stock.train()
    caplog.clear()
    ours = make_trainer(
        "grpo",
        tmp_path / "again",
        trainer_class=watched(overlap_class("grpo")),
        overlap={"delta": 2},
        **SAVING,
    )
    ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "has no oppo_kit.pt, so it is taken as a checkpoint of TRL's own trainer" in caplog.text
    assert "goes on with prompt 8" in caplog.text
    draws = sorted(group.draw_id for batch, _ in ours.seen for group in batch.groups)
    assert draws == list(range(8, 24))


def test_other_data_than_the_checkpoints_is_refused(tmp_path) -> None:
    make("rloo", tmp_path, max_steps=2).train()
    other = make("rloo", tmp_path / "again", data=text_data([f"other {i}" for i in range(12)]))
    with pytest.raises(
        StateError, match="answer another prompt than the data has there now; go on with the data"
    ):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_damaged_state_is_refused(tmp_path) -> None:
    make("rloo", tmp_path, max_steps=1).train()
    file = tmp_path / "checkpoint-1" / STATE_NAME
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(StateError, match=r"oppo_kit.pt is damaged: .*; restore a copy or start anew"):
        make("rloo", tmp_path / "again").train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_second_training_begins_anew(tmp_path) -> None:
    trainer = make_trainer(
        "grpo", tmp_path, trainer_class=watched(overlap_class("grpo")), overlap={"delta": 2}
    )
    trainer.train()
    trainer.train()
    draws = [
        sorted(group.draw_id for batch, _ in half for group in batch.groups)
        for half in (trainer.seen[:3], trainer.seen[3:])
    ]
    assert draws == [list(range(12))] * 2


def test_a_model_only_checkpoint_has_no_state(tmp_path) -> None:
    make("grpo", tmp_path, save_only_model=True, max_steps=1).train()
    assert not (tmp_path / "checkpoint-1" / STATE_NAME).exists()
