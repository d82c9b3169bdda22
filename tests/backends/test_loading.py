"""Loading real models and tokenizers from folders, and what is refused with which words."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import peft
import pytest
import tiny_models
import torch
from transformers import BartConfig, GenerationConfig, PreTrainedModel

from oppo_kit.backends.loading import (
    ModelSettings,
    check_same_vocabulary,
    check_vocab_sizes,
    load_causal_lm,
    load_sequence_classifier,
    load_settings,
    load_tokenizer,
    stop_token_ids,
)
from oppo_kit.errors import ModelError

IDS = torch.tensor([[1, 5, 6, 7]])


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("kind", sorted(tiny_models.KINDS))
def test_a_saved_language_model_comes_back_the_same(tmp_path: Path, kind: str) -> None:
    saved = tiny_models.tiny_causal_lm(kind, folder=tmp_path)
    loaded = load_causal_lm(tmp_path, torch.float32)
    assert torch.equal(loaded(input_ids=IDS).logits, saved(input_ids=IDS).logits)


def test_a_saved_classifier_comes_back_the_same_and_without_a_warning(tmp_path: Path) -> None:
    saved = tiny_models.tiny_classifier(folder=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_sequence_classifier(tmp_path, torch.float32)
    assert torch.equal(loaded(input_ids=IDS).logits, saved(input_ids=IDS).logits)


def test_the_dtype_is_the_one_asked_for(tmp_path: Path) -> None:
    tiny_models.tiny_causal_lm(folder=tmp_path)
    assert {p.dtype for p in load_causal_lm(tmp_path, torch.bfloat16).parameters()} == {torch.bfloat16}


def test_dropout_is_off_even_in_training_mode(tmp_path: Path) -> None:
    rates: dict[str, Any] = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    saved = tiny_models.tiny_causal_lm("gpt2", folder=tmp_path, **rates)
    loaded = load_causal_lm(tmp_path, torch.float32)
    assert not loaded.training
    assert torch.equal(loaded.train()(input_ids=IDS).logits, saved(input_ids=IDS).logits)


# --- score heads


def test_a_fresh_score_head_is_named_in_a_warning_and_is_always_the_same(tmp_path: Path) -> None:
    tiny_models.tiny_causal_lm(folder=tmp_path)
    generator_state = torch.get_rng_state()
    with pytest.warns(UserWarning, match=r"no trained score head: score.weight starts at random"):
        first = load_sequence_classifier(tmp_path, torch.float32)
    assert torch.equal(torch.get_rng_state(), generator_state)
    torch.manual_seed(5)
    with pytest.warns(UserWarning, match=r"score.weight"):
        second = load_sequence_classifier(tmp_path, torch.float32)
    assert torch.equal(first.score.weight, second.score.weight)
    assert first.score.weight.abs().sum() > 0


def test_a_fresh_score_head_of_a_critic_is_zero_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_models.tiny_causal_lm(folder=tmp_path)
    with caplog.at_level(logging.INFO, "oppo_kit"), warnings.catch_warnings():
        warnings.simplefilter("error")
        critic = load_sequence_classifier(tmp_path, torch.float32, fresh_head="zero")
    assert critic(input_ids=IDS).logits.tolist() == [[0.0]]
    assert "which has no score head: score.weight starts at 0" in caplog.text


def test_a_trained_head_is_not_zeroed(tmp_path: Path) -> None:
    saved = tiny_models.tiny_classifier(folder=tmp_path)
    loaded = load_sequence_classifier(tmp_path, torch.float32, fresh_head="zero")
    assert torch.equal(loaded.score.weight, saved.score.weight)


def test_a_classifier_with_two_labels_is_no_reward_model(tmp_path: Path) -> None:
    tiny_models.tiny_classifier(folder=tmp_path, num_labels=2)
    with pytest.raises(
        ModelError,
        match=r"score.weight is \[2, 32\], not \[1, 32\]; a reward model or critic has exactly one",
    ):
        load_sequence_classifier(tmp_path, torch.float32)


def test_a_classifier_is_no_policy(tmp_path: Path) -> None:
    tiny_models.tiny_classifier(folder=tmp_path)
    with pytest.raises(
        ModelError, match=r"no weights for lm_head.weight, which would start at random; a policy needs"
    ):
        load_causal_lm(tmp_path, torch.float32)


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    tiny_models.tiny_causal_lm(folder=tmp_path)
    tiny_models.tiny_config(vocab_size=70).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"is \[62, 32\], not \[70, 32\].*config.json is another model's"):
        load_causal_lm(tmp_path, torch.float32)


def test_a_classifier_that_lacks_layers_is_refused(tmp_path: Path) -> None:
    tiny_models.tiny_classifier(folder=tmp_path)
    config = tiny_models.tiny_config(num_labels=1)
    config.num_hidden_layers = 3
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no weights for model.layers.2.*the checkpoint is incomplete"):
        load_sequence_classifier(tmp_path, torch.float32)


# --- not there, or of the wrong kind


def test_an_unreachable_model_says_what_works_offline() -> None:
    expected = (
        r"model 'some-org/nope' is no folder here and could not be had.*works offline: smollm2-135m, tiny"
    )
    for load in (load_causal_lm, load_sequence_classifier):
        with pytest.raises(ModelError, match=expected):
            load("some-org/nope", torch.float32, offline_names=["smollm2-135m", "tiny"])
    with pytest.raises(ModelError, match=expected):
        load_settings("some-org/nope", offline_names=["smollm2-135m", "tiny"])


def test_an_unreachable_tokenizer_says_what_works_offline() -> None:
    with pytest.raises(ModelError, match=r"tokenizer 'some-org/nope' is no folder.*works offline: tiny"):
        load_tokenizer("some-org/nope", offline_names=["tiny"])


def test_a_folder_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"no model can be loaded from the folder .*pass a folder written by save_pretrained"
    ):
        load_causal_lm(tmp_path, torch.float32)
    with pytest.raises(ModelError, match="no tokenizer can be loaded from the folder"):
        load_tokenizer(tmp_path)


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    tiny_models.tiny_config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no model can be loaded from the folder"):
        load_causal_lm(tmp_path, torch.float32)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    BartConfig(d_model=16, encoder_layers=1, decoder_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"is an encoder-decoder \(bart\); only decoders"):
        load_causal_lm(tmp_path, torch.float32)


# --- LoRA adapters


def save_adapter(model: PreTrainedModel, folder: Path, task_type: str = "CAUSAL_LM") -> Any:
    """The model with an adapter that changes it, saved as PEFT does: without the model."""
    config = peft.LoraConfig(task_type=task_type, r=4, target_modules=["q_proj", "v_proj"])
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    adapted.save_pretrained(folder)
    assert not (folder / "config.json").exists()
    return adapted.eval()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_models.tiny_causal_lm(folder=tmp_path / "base")
    tiny_models.tiny_tokenizer(tmp_path / "base")
    return tmp_path / "base"


def test_a_folder_of_a_lora_adapter_is_its_base_with_the_adapter_merged(base: Path, tmp_path: Path) -> None:
    plain = load_causal_lm(base, torch.float32)
    before = plain(input_ids=IDS).logits
    adapted = save_adapter(plain, tmp_path / "adapter")
    loaded = load_causal_lm(tmp_path / "adapter", torch.float32)
    assert type(loaded) is type(tiny_models.tiny_causal_lm())
    assert not loaded.training
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    torch.testing.assert_close(
        loaded(input_ids=IDS).logits, adapted(input_ids=IDS).logits, atol=1e-4, rtol=1e-4
    )
    assert float((loaded(input_ids=IDS).logits - before).abs().max()) > 0.1


def test_settings_and_tokenizer_of_an_adapter_are_its_bases_unless_it_has_its_own(
    base: Path, tmp_path: Path
) -> None:
    GenerationConfig(eos_token_id=7).save_pretrained(base)
    save_adapter(load_causal_lm(base, torch.float32), tmp_path / "adapter")
    settings = load_settings(tmp_path / "adapter")
    assert settings.context_tokens == 256
    assert settings.generation_config is not None
    assert settings.generation_config.eos_token_id == 7
    assert load_tokenizer(tmp_path / "adapter").chat_template is None
    tiny_models.tiny_tokenizer(tmp_path / "adapter", chat_template=tiny_models.CHAT_TEMPLATE)
    assert load_tokenizer(tmp_path / "adapter").chat_template == tiny_models.CHAT_TEMPLATE


def test_an_adapter_trained_on_a_merged_one_stands_on_both(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_adapter(load_causal_lm(base, torch.float32), tmp_path / "first")
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        second = save_adapter(load_causal_lm("first", torch.float32), tmp_path / "second")
    loaded = load_causal_lm(tmp_path / "second", torch.float32)
    torch.testing.assert_close(
        loaded(input_ids=IDS).logits, second(input_ids=IDS).logits, atol=1e-4, rtol=1e-4
    )


def test_a_critic_grows_from_a_policy_with_its_adapter(base: Path, tmp_path: Path) -> None:
    save_adapter(load_causal_lm(base, torch.float32), tmp_path / "adapter")
    policy = load_causal_lm(tmp_path / "adapter", torch.float32)
    critic = load_sequence_classifier(tmp_path / "adapter", torch.float32, fresh_head="zero")
    for one, other in zip(critic.model.parameters(), policy.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not critic.score.weight.any()


@pytest.mark.filterwarnings("error:.*no trained score head")
def test_a_reward_model_may_be_an_adapter_which_brings_the_score_head(base: Path, tmp_path: Path) -> None:
    model = load_sequence_classifier(base, torch.float32, fresh_head="zero")
    torch.nn.init.normal_(model.score.weight)
    adapted = save_adapter(model, tmp_path / "adapter", "SEQ_CLS")
    loaded = load_sequence_classifier(tmp_path / "adapter", torch.float32, fresh_head="zero")
    torch.testing.assert_close(
        loaded(input_ids=IDS).logits, adapted(input_ids=IDS).logits, atol=1e-4, rtol=1e-4
    )
    with pytest.raises(
        ModelError, match="does not fit .*: it is of a sequence classifier, not of a language"
    ):
        load_causal_lm(tmp_path / "adapter", torch.float32)


def test_an_adapter_without_its_base_says_what_is_missing(base: Path, tmp_path: Path) -> None:
    save_adapter(load_causal_lm(base, torch.float32), tmp_path / "adapter")
    tiny_models.tiny_causal_lm(folder=tmp_path / "wide", head_dim=16)
    file = tmp_path / "adapter" / "adapter_config.json"
    values = json.loads(file.read_text())

    def refused(words: str, base_name: str | None) -> None:
        file.write_text(json.dumps({**values, "base_model_name_or_path": base_name}))
        with pytest.raises(ModelError, match=words):
            load_causal_lm(tmp_path / "adapter", torch.float32)

    refused("is a LoRA adapter whose adapter_config.json names no model as its base; set base_model", None)
    refused("adapter_config.json names itself as its base", str(tmp_path / "adapter"))
    refused(
        "does not fit .*: Error.* in loading state_dict.*; correct base_model_name", str(tmp_path / "wide")
    )
    shutil.rmtree(base)
    words = "is a LoRA adapter, and its base is missing: model '.*base' is no folder here"
    refused(words, str(base))
    with pytest.raises(ModelError, match=words):
        load_settings(tmp_path / "adapter")
    file.write_text("{")
    with pytest.raises(ModelError, match=r"adapter_config.json cannot be read: .*; save the adapter again"):
        load_settings(tmp_path / "adapter")


# --- tokenizers, stop tokens, contexts


def test_without_a_pad_token_eos_pads(tmp_path: Path) -> None:
    tiny_models.tiny_tokenizer(tmp_path, has_pad=False)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2


def test_a_pad_token_that_is_there_stays(tmp_path: Path) -> None:
    tiny_models.tiny_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path).pad_token_id == 0


def test_stop_tokens_are_all_eos_of_tokenizer_and_model() -> None:
    tokenizer = tiny_models.tiny_tokenizer(is_pad_eos=True)
    settings = ModelSettings(tiny_models.tiny_config(eos_token_id=[9, 5]), GenerationConfig(eos_token_id=7))
    assert stop_token_ids(tokenizer, settings) == (2, 5, 7, 9)
    assert stop_token_ids(tokenizer, tiny_models.tiny_causal_lm()) == (2,)


def test_without_any_stop_token_the_setting_is_named() -> None:
    tokenizer = tiny_models.tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match=r"no response would ever stop; set sampling.stop_token_ids"):
        stop_token_ids(tokenizer, ModelSettings(tiny_models.tiny_config(eos_token_id=None), None))


def test_settings_come_without_weights_or_generation_configuration(tmp_path: Path) -> None:
    tiny_models.tiny_config("gpt2").save_pretrained(tmp_path)
    settings = load_settings(tmp_path)
    assert settings.context_tokens == 256
    assert settings.generation_config is None


# --- vocabularies


def test_equal_vocabularies_pass_and_more_reward_tokens_are_harmless() -> None:
    policy, reward = tiny_models.tiny_tokenizer(), tiny_models.tiny_tokenizer()
    check_same_vocabulary(policy, reward)
    reward.add_tokens(["<extra>"])
    check_same_vocabulary(policy, reward)


def test_more_policy_tokens_are_refused() -> None:
    policy, reward = tiny_models.tiny_tokenizer(), tiny_models.tiny_tokenizer()
    policy.add_tokens(["<extra>"])
    with pytest.raises(
        ModelError, match=r"differ in 1 tokens \(sizes 63 and 62; '<extra>' is 62 and absent\)"
    ):
        check_same_vocabulary(policy, reward)


def test_a_permuted_vocabulary_of_the_same_size_is_refused() -> None:
    policy, reward = tiny_models.tiny_tokenizer(), tiny_models.tiny_tokenizer(is_permuted=True)
    with pytest.raises(
        ModelError, match=r"differ in 58 tokens \(sizes 62 and 62; 'a' is 4 and 61, 'b' is 5 and 60"
    ):
        check_same_vocabulary(policy, reward)


def sizes(vocab_size: int) -> ModelSettings:
    return ModelSettings(tiny_models.tiny_config(vocab_size=vocab_size), None)


def test_embeddings_for_more_than_the_policy_samples_are_harmless() -> None:
    check_vocab_sizes(sizes(64), sizes(64), sizes(70), tiny_models.tiny_tokenizer())
    check_vocab_sizes(sizes(62), None, torch.nn.Linear(2, 2), tiny_models.tiny_tokenizer())


def test_embeddings_for_less_are_refused() -> None:
    tokenizer = tiny_models.tiny_tokenizer()
    with pytest.raises(
        ModelError,
        match=r"the reward model's vocab_size is 62, the policy's 64: .*resize_token_embeddings\(64\)",
    ):
        check_vocab_sizes(sizes(64), sizes(62), sizes(64), tokenizer)
    with pytest.raises(ModelError, match="the critic's vocab_size is 63, the policy's 64"):
        check_vocab_sizes(sizes(64), None, sizes(63), tokenizer)
    with pytest.raises(
        ModelError, match=r"vocab_size is 61, but its tokenizer needs 62: .*resize_token_embeddings\(62\)"
    ):
        check_vocab_sizes(sizes(61), None, None, tokenizer)
