"""Parameters are counted, without a network and without memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import MambaConfig, T5Config

from harness.dry_run.models import Shape, count_models, embedded_config, is_function, known_config
from harness.models import ALIASES
from harness.settings import load_train_config
from oppo_kit.errors import ConfigError, ModelError, UnknownNameError
from oppo_kit.registry import create_algorithm

# As the model cards have them, to the digits that they give: 7.61 B, 3.09 B, 135 M.
PUBLISHED = {"qwen2.5-7b": 7_615_616_512, "qwen2.5-3b": 3_085_938_688, "smollm2-135m": 134_515_008}


def counted(*overrides: str, **options):
    train = load_train_config(options=options, overrides=overrides)
    return count_models(train, create_algorithm(train.algo, train.algo_config))


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_aliases_have_as_many_parameters_as_is_published(model: str) -> None:
    models = counted(model=model, algo="grpo", reward="harness.workloads.math_task:math_reward")
    assert models.policy.num_parameters == PUBLISHED[model]
    assert models.policy.num_bytes == models.policy.trained_bytes == 4 * PUBLISHED[model]
    assert models.policy.architecture == "comes with this package"
    assert (models.critic, models.reward) == (None, None)


def test_a_critic_of_a_policy_has_one_score_instead_of_the_vocabulary() -> None:
    models = counted("dtype=bfloat16", model="qwen2.5-7b", reward="harness.workloads.math_task:math_reward")
    head = 152_064 * 3584
    assert models.critic is not None
    assert models.critic.num_parameters == PUBLISHED["qwen2.5-7b"] - head + 3584
    assert models.reference is not None
    assert models.reference.num_bytes == 2 * PUBLISHED["qwen2.5-7b"]
    assert models.reference.trained_bytes == 0
    # An embedding is larger than a layer of 233 million.
    assert models.policy.block_bytes == 2 * head


def test_an_adapter_alone_is_trained_in_float32_over_a_half_precision_policy() -> None:
    models = counted("dtype=bfloat16", "actor_lora.r=8", model="smollm2-135m", algo="grpo")
    # Per layer and rank: q and o 576 + 576 each, k and v 576 + 192 each, three of the feed-forward part 576 + 1536.
    num_adapter = 8 * 30 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    assert models.policy.trained_bytes == 4 * num_adapter
    assert models.policy.num_bytes == 2 * PUBLISHED["smollm2-135m"] + 4 * num_adapter
    assert models.policy.num_parameters == PUBLISHED["smollm2-135m"] + num_adapter


def test_the_reward_model_of_an_alias_is_its_own_and_the_critic_starts_from_it() -> None:
    models = counted(model="smollm2-135m")
    assert models.reward is not None
    assert models.critic is not None
    assert models.reward.shape.num_layers == models.critic.shape.num_layers == 16
    assert (
        models.reward.num_parameters
        == 49_152 * 576 + 16 * (134_515_008 - 49_152 * 576 - 576) // 30 + 576 + 576
    )
    tiny = counted()
    assert tiny.reward is not None
    assert tiny.reward.architecture == "its folder's config.json"


def test_a_critic_starts_from_the_policy_where_the_reward_model_reads_text() -> None:
    models = counted(model="smollm2-135m", task="tiny")
    assert models.reward is not None
    assert models.critic is not None
    assert models.reward.name == "tiny"
    assert models.critic.shape == models.policy.shape


def test_a_reward_model_that_is_not_here_is_taken_to_be_as_large_as_the_policy() -> None:
    models = counted(model="qwen2.5-3b", reward="nobody/no-such-reward")
    assert models.reward is not None
    assert models.reward.shape == models.policy.shape
    assert models.reward.architecture == "not in the hub's cache: taken to be as large as the policy"
    unnamed = counted(model="qwen2.5-3b", task="free_form")
    assert unnamed.reward is not None
    assert unnamed.reward_name is None
    assert unnamed.reward.architecture == "taken to be as large as the policy"


def test_a_critic_of_its_own_is_counted() -> None:
    models = counted(
        "critic=smollm2-135m", model="qwen2.5-3b", reward="harness.workloads.math_task:math_reward"
    )
    assert models.critic is not None
    assert models.critic.shape.num_layers == 16


def test_a_folder_has_its_own_configuration(tmp_path: Path) -> None:
    embedded_config("smollm2-135m", num_hidden_layers=3).save_pretrained(tmp_path)
    config, origin = known_config(str(tmp_path), "policy")
    assert (Shape.of(config).num_layers, Shape.of(config).key_value, origin) == (
        3,
        192,
        "its folder's config.json",
    )


def test_a_policy_of_which_nothing_is_known_is_refused() -> None:
    with pytest.raises(
        ModelError,
        match="nothing is known here of the policy 'nobody/no-such-policy': .*hf download nobody/no-such-policy",
    ):
        counted(model="nobody/no-such-policy")
    with pytest.raises(UnknownNameError, match="unknown model 'qwen7b'"):
        counted(model="qwen7b")
    with pytest.raises(ConfigError, match="comes without a reward model"):
        counted(model="qwen2.5-3b", reward="qwen2.5-3b")


def test_a_hub_id_is_known_by_the_hub_s_cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--name"
    embedded_config("smollm2-135m", num_hidden_layers=2).save_pretrained(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    config, origin = known_config("owner/name", "policy")
    assert (Shape.of(config).num_layers, origin) == (2, "the hub's cache")


def test_what_is_no_language_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(
        ModelError, match="a model of the type 'vit' cannot be the policy: .*; pass a decoder"
    ):
        counted(model=str(tmp_path), algo="grpo")


def test_a_function_is_told_from_a_folder_with_a_colon(tmp_path: Path) -> None:
    folder = tmp_path / "a:b"
    folder.mkdir()
    assert is_function("module:function")
    assert not is_function(str(folder))
    assert not is_function(None)


def test_counting_makes_no_tensor_and_loads_no_weights(monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise AssertionError("weights were asked for")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", refuse)
    monkeypatch.setattr("harness.packaged_models.download", refuse)
    # 30 GB in float32: on a device with memory this would be seen.
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    assert counted(model="qwen2.5-7b").policy.num_parameters == PUBLISHED["qwen2.5-7b"]
    assert (torch.cuda.memory_allocated() if torch.cuda.is_available() else 0) == before


def test_every_alias_without_weights_in_the_package_has_an_embedded_shape() -> None:
    for name, alias in ALIASES.items():
        config, origin = known_config(name, "policy")
        assert origin == ("its folder's config.json" if alias.is_offline else "comes with this package")
        assert Shape.of(config).vocab > 0


def test_a_model_without_attention_is_refused(tmp_path: Path) -> None:
    MambaConfig(num_hidden_layers=1, hidden_size=8).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="a model of the type 'mamba' has no attention heads; only decoders"):
        counted(model=str(tmp_path), algo="grpo")


def test_an_adapter_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="the adapter does not fit a model of the type 'llama': .*target_modules to"
    ):
        counted("actor_lora.target_modules=[nope]", model="smollm2-135m", algo="grpo")


def test_a_folder_that_cannot_be_a_reward_model_is_not_taken_for_an_unknown_one(tmp_path: Path) -> None:
    T5Config(num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="encoder-decoder"):
        counted(model="smollm2-135m", reward=str(tmp_path))
