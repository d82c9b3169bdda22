"""What a model's name stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.models import ALIASES, offline_names, resolve_model
from oppo_kit.errors import ConfigError, UnknownNameError


def test_an_alias_gives_the_model_of_the_role() -> None:
    assert resolve_model("qwen2.5-7b") == "Qwen/Qwen2.5-7B-Instruct"
    assert resolve_model("qwen2.5-3b") == "Qwen/Qwen2.5-3B-Instruct"
    assert Path(resolve_model("tiny")).parts[-2:] == ("tiny", "policy")
    assert Path(resolve_model("tiny", "reward")).parts[-2:] == ("tiny", "reward")


def test_a_critic_is_the_reward_model_of_a_pair_and_else_the_policy() -> None:
    assert resolve_model("tiny", "critic") == resolve_model("tiny", "reward")
    assert resolve_model("qwen2.5-3b", "critic") == resolve_model("qwen2.5-3b")


def test_the_names_that_work_offline_are_folders_of_this_package() -> None:
    assert offline_names() == ["tiny"]
    for name in offline_names():
        assert (Path(ALIASES[name].policy) / "model.safetensors").is_file()


def test_hub_ids_and_folders_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model("owner/name") == "owner/name"
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    (tmp_path / "my_model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("my_model") == "my_model"


def test_an_unknown_short_name_lists_the_nearest_aliases() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown model 'qwen2.5_7b'; did you mean 'qwen2.5-7b' or .*known: .*tiny"
    ):
        resolve_model("qwen2.5_7b")


def test_an_alias_without_a_reward_model_says_what_to_pass() -> None:
    with pytest.raises(
        ConfigError,
        match=r"model 'qwen2.5-7b' comes without a reward model; .*alias that has one: smollm2-135m, tiny",
    ):
        resolve_model("qwen2.5-7b", "reward")


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "runs/a/policy"])
def test_a_path_that_is_no_folder_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="is no folder; pass one written by save_pretrained"):
        resolve_model(path)
