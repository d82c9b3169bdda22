"""PPO on tiny real models under the whole engine."""

from __future__ import annotations

from tiny_models import VOCAB_SIZE, tiny_causal_lm, tiny_classifier, tiny_tokenizer

from oppo_kit import OverlapConfig, PromptDataset, SamplingConfig, TrainConfig, build_engine

TOKENIZER = tiny_tokenizer()
WORDS = ("ab", "cat 12", "the 3 dogs", "x", "hello world", "1+2=", "zebra")


# A response ends with probability of about 0.1 a token, so that some are carried.
LONG_TAILED = {"response_length": 40, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 10))}


def reward_by_length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


def make_engine(
    *,
    reward=None,
    num_steps: int = 3,
    lora: bool = False,
    critic=None,
    sampling=None,
    algorithm=None,
    reward_tokenizer=None,
    reward_input: str = "auto",
    policy=None,
    backend: str = "hf",
    **overlap,
):
    config = TrainConfig(
        batch_size=4,
        num_steps=num_steps,
        algo_config={"num_ppo_epochs": 1, "num_mini_batches": 2},
        sampling=SamplingConfig(**{"temperature": 1.0, "response_length": 12, **(sampling or {})}),
        overlap=OverlapConfig(**{"decode_tokens": 4, "placement": "inline", **overlap}),
        learner={"learning_rate": 1e-3},
        actor_lora={"r": 4} if lora else None,
        reward_input=reward_input,
        backend=backend,
    )
    prompts = PromptDataset(
        [{"prompt": word} for word in WORDS], TOKENIZER, prompt_column="prompt", max_new_tokens=12, seed=0
    )
    return build_engine(
        config,
        policy=policy or tiny_causal_lm(),
        tokenizer=TOKENIZER,
        prompts=prompts,
        reward=tiny_classifier() if reward is None else reward,
        critic=critic or tiny_classifier(seed=5),
        algorithm=algorithm,
        reward_tokenizer=reward_tokenizer,
    )


def trajectory(engine) -> list:
    with engine:
        steps = []
        while engine.num_steps_done < engine.num_steps:
            batch = engine.collect()
            steps.append([(group.draw_id, group.rollouts[0].token_ids) for group in batch.groups])
            engine.step(batch)
        return steps
