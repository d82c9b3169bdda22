"""Loading real models and tokenizers from folders, and what is refused with which words."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import tiny_models
import torch
from transformers import BartConfig, GenerationConfig

from oppo_kit.backends.loading import (
    ModelSettings,
    check_same_vocabulary,
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
    assert "has no score head: score.weight starts at 0" in caplog.text


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
