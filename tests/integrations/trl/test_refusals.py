"""What cannot work is refused by name before anything starts, with what to do instead."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from peft import PromptTuningConfig, get_peft_model
from tiny_models import CHAT_TEMPLATE, tiny_causal_lm, tiny_tokenizer
from trl_trainers import NAMES, WORDS, chat_data, make_arguments, make_reward_model, make_trainer, text_data

from oppo_kit import OverlapConfig
from oppo_kit.errors import ConfigError, DataError, StateError
from oppo_kit.integrations.trl.refusals import refuse_model, refuse_prompt, refuse_settings
from oppo_kit.integrations.trl.rollouts import TrainedElsewhere, TrainerRollouts

each = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            {"use_vllm": True},
            "use_vllm=True cannot be used with overlap: responses are made by oppo_kit's own",
        ),
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching=True cannot"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs={'num_beams': 2} cannot be used"),
        ({"repetition_penalty": 1.2}, r"repetition_penalty=1.2 cannot .* \(repetition_penalty=1.0\)"),
        ({"cache_implementation": "static"}, "cache_implementation='static' cannot"),
        ({"ignore_data_skip": True}, "ignore_data_skip=True goes on with the first prompts again"),
    ],
)
@each
def test_settings_of_another_way_to_generate_are_refused(name, setting, words, tmp_path) -> None:
    with pytest.raises(ConfigError, match=words):
        make_trainer(name, tmp_path, **setting)


@pytest.mark.parametrize("argument", ["rollout_func", "tools", "environment_factory"])
def test_arguments_of_another_way_to_generate_are_refused(argument, tmp_path) -> None:
    with pytest.raises(ConfigError, match=f"{argument} cannot be used with overlap"):
        make_trainer("grpo", tmp_path, trainer_arguments={argument: [print]})


@each
def test_overlap_must_be_its_configuration(name, tmp_path) -> None:
    with pytest.raises(
        ConfigError, match=r"overlap is a str; pass oppo_kit.OverlapConfig\(...\), for example"
    ):
        make_trainer(name, tmp_path, overlap="delta=2")  # type: ignore[arg-type]


@each
def test_delta_says_its_legal_values(name, tmp_path) -> None:
    words = (
        r"delta=9 exceeds B × max_age = 4 × 2, .* = 8 / 2 prompts: .*; delta may be 0 to 8, usually up to 2"
    )
    with pytest.raises(ConfigError, match=words):
        make_trainer(name, tmp_path, overlap={"delta": 9})


def test_several_processes_and_sharding_are_refused(tmp_path) -> None:
    arguments = make_arguments("grpo", tmp_path)
    fields = {
        key: getattr(arguments, key, None)
        for key in ("generation_batch_size", "num_generations", "ignore_data_skip")
    }
    for change, words in (
        ({"world_size": 2}, "2 processes train, and overlap works in one"),
        ({"deepspeed": "zero.json"}, "deepspeed is set; overlap works on one device"),
        ({"fsdp": ["full_shard"]}, "fsdp is set; overlap works on one device"),
    ):
        with pytest.raises(ConfigError, match=words):
            refuse_settings(SimpleNamespace(**(fields | {"world_size": 1} | change)), OverlapConfig())


def test_models_whose_weights_cannot_be_copied_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="the policy is quantized, and the generator keeps a copy"):
        refuse_model(SimpleNamespace(is_loaded_in_4bit=True))
    with pytest.raises(ConfigError, match=r"spread over the devices \['0', '1'\], and overlap works on one"):
        refuse_model(SimpleNamespace(hf_device_map={"a": 0, "b": 1}))
    with pytest.raises(ConfigError, match="quantization_config is quantized"):
        make_trainer("grpo", tmp_path, trainer_arguments={"quantization_config": object()})
    model = get_peft_model(
        tiny_causal_lm("qwen2"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(
        ConfigError, match=r"the adapter 'default' \(PromptTuningConfig\) adds virtual tokens"
    ):
        refuse_model(model)


@each
def test_images_are_refused(name, tmp_path) -> None:
    with pytest.raises(
        ConfigError, match="the training data has a column 'image'; overlap is for text alone"
    ):
        make_trainer(name, tmp_path, data=text_data(image=[None] * len(WORDS)))
    with pytest.raises(ConfigError, match="processing_class is a SimpleNamespace; overlap is for text alone"):
        make_trainer(name, tmp_path, tokenizer=SimpleNamespace())
    with pytest.raises(
        ConfigError, match="has a message with parts instead of text; overlap is for text alone"
    ):
        refuse_prompt([{"role": "user", "content": [{"type": "image"}]}], tiny_tokenizer())


@each
def test_too_few_prompts_say_how_many_are_needed(name, tmp_path) -> None:
    words = (
        r"has 3 prompts, and one generation batch takes B = .* = 8 / 2 = 4 different ones; .* of at most 6"
    )
    with pytest.raises(DataError, match=words):
        make_trainer(name, tmp_path, data=text_data(WORDS[:3]))


@each
def test_conversations_need_chat_templates(name, tmp_path) -> None:
    bare, templated = tiny_tokenizer(), tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    with pytest.raises(ConfigError, match="are conversations, and processing_class has no chat template"):
        make_trainer(name, tmp_path, data=chat_data(), tokenizer=bare)
    model = {"reward": make_reward_model(), "tokenizer": templated, "data": chat_data()}
    with pytest.raises(
        ConfigError, match="the reward model's tokenizer has no chat template; set the chat_template"
    ):
        make_trainer(name, tmp_path, reward_tokenizer=bare, **model)
    templated.response_template = {"any": "thing"}
    with pytest.raises(
        ConfigError, match="processing_class has a response_template, by which responses are taken"
    ):
        make_trainer(name, tmp_path, reward_tokenizer=templated, **model)


@pytest.mark.parametrize(
    "overlap", [{"score_at": "chunk"}, {"score_at": "auto"}, {"score_at": "sample"}, {"placement": "thread"}]
)
@each
def test_scoring_beside_decoding_needs_a_reward_model(name, overlap, tmp_path) -> None:
    with pytest.raises(ConfigError, match="has no reward model to work on: the trainer itself calls Python"):
        make_trainer(name, tmp_path, overlap=overlap)


@each
def test_there_is_no_critic_to_stream_to(name, tmp_path) -> None:
    with pytest.raises(ConfigError, match="stream_critic is set, and this trainer has no critic"):
        make_trainer(name, tmp_path, overlap={"score_at": "chunk", "stream_critic": True})


def test_the_engine_is_never_asked_to_train() -> None:
    algorithm = TrainedElsewhere(2, frozenset())
    with pytest.raises(StateError, match="the trainer trains this batch; call commit"):
        algorithm.prepare(None)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="the trainer has its own loss; call commit"):
        algorithm.loss(None, None)  # type: ignore[arg-type]


def test_a_batch_must_be_committed_before_the_next() -> None:
    rollouts = object.__new__(TrainerRollouts)
    rollouts.batch = SimpleNamespace()
    with pytest.raises(StateError, match=r"the last batch was not committed; call commit\(update\) first"):
        rollouts.collect(0)
    rollouts.batch = None
    assert rollouts.commit(0) is None


@pytest.mark.parametrize("prompt", [None, 7, ["a", "b"]])
def test_what_is_no_prompt_is_refused_with_what_one_is(prompt) -> None:
    with pytest.raises(
        DataError, match=r"the prompt .* is a \w+; a prompt is text, or a list of messages with"
    ):
        refuse_prompt(prompt, tiny_tokenizer())
