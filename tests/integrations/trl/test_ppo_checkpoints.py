"""What PPO's trainer saves, goes on from and shows."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from ppo_trainers import LORA, OVERLAP, ROWS, TOKENIZER, make_trainer, weights
from tiny_models import tiny_causal_lm, tiny_classifier
from transformers import AutoModelForSequenceClassification, TrainerCallback
from transformers.trainer_callback import ExportableState

from oppo_kit.errors import StateError
from oppo_kit.integrations.trl.ppo import OverlapPPOTrainer


@pytest.fixture(autouse=True, scope="session")
def _trl() -> None:
    """Instead of the folder's, which wants TRL: our PPO needs none."""


@pytest.fixture
def make(tmp_path):
    return partial(make_trainer, tmp_path)


class Counting(TrainerCallback, ExportableState):
    """Counts steps, over checkpoints too."""

    def __init__(self) -> None:
        self.num_steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.num_steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"num_steps": self.num_steps}}


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_resumed_run_is_equal_to_the_bit_to_one_that_was_never_interrupted(make, lora) -> None:
    changes: dict[str, Any] = {
        "total_episodes": 16,
        "overlap": OVERLAP,
        "peft_config": lora,
        "restore_callback_states_from_checkpoint": True,
        "response_length": 16,
    }

    def run(**more: Any) -> OverlapPPOTrainer:
        torch.manual_seed(0)  # of a fresh adapter
        return make(**changes, **more)

    straight = run()
    straight.train()
    first = run(save_strategy="steps", save_steps=2)
    first.add_callback(Counting)

    class Kill(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                assert first.engine.num_in_flight + first.engine.num_queued == 2
                raise KeyboardInterrupt

    first.add_callback(Kill)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    resumed = run()
    counting = Counting()
    resumed.add_callback(counting)
    resumed.train(resume_from_checkpoint=True)
    assert counting.num_steps == 4
    assert all(
        map(
            torch.equal,
            weights(straight.model, straight.value_model),
            weights(resumed.model, resumed.value_model),
        )
    )
    timed = ("_s", "eps")
    assert [
        {name: value for name, value in entry.items() if not name.endswith(timed)}
        for entry in resumed.state.log_history
    ] == [
        {name: value for name, value in entry.items() if not name.endswith(timed)}
        for entry in straight.state.log_history
    ]


def test_a_checkpoint_holds_policy_critic_tokenizer_and_state_and_old_ones_go(make, tmp_path) -> None:
    trainer = make(save_strategy="steps", save_steps=1, save_total_limit=1)
    trainer.train()
    [folder] = (tmp_path / "run").iterdir()
    assert folder.name == "checkpoint-3"
    critic = AutoModelForSequenceClassification.from_pretrained(folder / "critic")
    assert all(map(torch.equal, weights(critic), weights(trainer.value_model)))
    names = {file.name for file in folder.iterdir()}
    assert {"model.safetensors", "tokenizer.json", "training_args.bin", "checkpoint.pt"} <= names
    only = make(save_strategy="epoch", save_only_model=True, output_dir=str(tmp_path / "only"))
    only.train()
    [folder] = (tmp_path / "only").iterdir()
    assert not (folder / "checkpoint.pt").exists()
    with pytest.raises(StateError, match=r"there is no checkpoint\.pt"):
        make().train(resume_from_checkpoint=folder)


def test_a_checkpoint_that_is_not_there_is_named(make, tmp_path) -> None:
    with pytest.raises(
        StateError, match="resume_from_checkpoint=True: there is no checkpoint .*/run; pass a"
    ):
        make().train(resume_from_checkpoint=True)
    with pytest.raises(StateError, match="resume_from_checkpoint='/nowhere': there is no checkpoint"):
        make().train(resume_from_checkpoint="/nowhere")


def test_samples_of_the_evaluation_prompts_are_printed_with_their_scores(make, capsys) -> None:
    policy, reward = tiny_causal_lm(), tiny_classifier()
    trainer = make(model=policy, reward_model=reward, eval_dataset=ROWS[:3], per_device_eval_batch_size=2)
    samples = trainer.generate_completions()
    assert [sample["query"] for sample in samples] == ["ab", "cat 12", "the 3 dogs"]
    config = policy.generation_config
    for row, sample in zip(ROWS, samples, strict=False):
        ids = torch.tensor([row["input_ids"]])
        for _ in range(8):
            with torch.no_grad():
                ids = torch.cat([ids, policy(ids).logits[:, -1:].argmax(-1)], 1)
            if ids[0, -1] == 10:
                break
        with torch.no_grad():
            assert sample["score"] == pytest.approx(reward(ids).logits.item(), abs=1e-4)
        assert sample["model response"] == TOKENIZER.decode(ids[0, len(row["input_ids"]) :])
    assert policy.generation_config is config
    capsys.readouterr()
    trainer.train()
    assert capsys.readouterr().out.count("model response") == 3
    assert make().generate_completions() == []


def test_trackers_are_those_of_report_to(make, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    make(report_to=["tensorboard"], total_episodes=4).train()
    [file] = (tmp_path / "board").rglob("events.*")
    assert b"objective/scores" in file.read_bytes()
