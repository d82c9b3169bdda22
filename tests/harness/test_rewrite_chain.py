"""The rewrite-chain task on hand-computed cases, and the promises of the shipped ``tiny`` assets."""

import random
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.workloads import rewrite_chain as chain

TINY_DIR = Path(chain.__file__).parents[1] / "assets" / "tiny"
PROBLEM = "54+3-2+1"
RIGHT = "=57-2+1=55+1=56<eos>"
HELD_OUT_PROBLEMS = ["7+1", "41-2+1", "54-2-2+1", "63-3-3+2+1", "32+3+3-2-1+2-3"]

seeds = st.integers(min_value=0, max_value=2**32)
term_counts = st.integers(min_value=1, max_value=13)


def problem_from(seed: int, count: int) -> str:
    return chain.generate_problem(random.Random(seed), num_terms=count)


# --- problems and splits


@given(seeds, term_counts)
def test_a_problem_has_the_terms_asked_for_and_stays_within_0_to_99(seed: int, count: int) -> None:
    problem = problem_from(seed, count)
    assert chain.num_terms(problem) == count
    expression: str | None = problem
    while expression is not None:
        assert 0 <= value_of(expression) <= 99
        expression = chain.rewrite(expression)
    assert len(problem) <= 28


@given(seeds)
def test_equal_generators_give_equal_problems(seed: int) -> None:
    assert chain.generate_problem(random.Random(seed)) == chain.generate_problem(random.Random(seed))


def test_the_median_problem_has_four_terms() -> None:
    generator = random.Random(0)
    counts = sorted(chain.num_terms(chain.generate_problem(generator)) for _ in range(2001))
    assert counts[1000] == 4
    assert counts[0] == 1
    assert counts[-1] == 13


@pytest.mark.parametrize("count", [0, 14])
def test_a_number_of_terms_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"num_terms is {count}; a problem has 1 to 13 terms"):
        chain.generate_problem(random.Random(0), num_terms=count)


def test_the_splits_share_no_problem_text() -> None:
    train = set(islice(chain.iterate_problems(0, "train"), 3000))
    held_out = set(islice(chain.iterate_problems(0, "held_out"), 3000))
    assert not train & held_out
    assert {chain.split_of(problem) for problem in train} == {"train"}
    assert {chain.split_of(problem) for problem in held_out} == {"held_out"}


def test_the_split_of_a_text_is_pinned_across_machines() -> None:
    problems = ["54+3-2+1", "1+1", "7-3", "99-1-1", "0+2+2"]
    assert list(map(chain.split_of, problems)) == ["train", "train", "train", "train", "held_out"]


def test_a_stream_depends_on_its_seed_and_nothing_else() -> None:
    first = list(islice(chain.iterate_problems(1, "train"), 20))
    assert first == list(islice(chain.iterate_problems(1, "train"), 20))
    assert first != list(islice(chain.iterate_problems(2, "train"), 20))


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split is 'test'; use 'train' or 'held_out'"):
        next(chain.iterate_problems(0, "test"))  # type: ignore[arg-type]


def test_the_held_out_set_is_fixed_distinct_and_stratified() -> None:
    problems = chain.held_out_problems(1000)
    assert problems == chain.held_out_problems(1000)
    assert len(set(problems)) == 1000
    assert {chain.split_of(problem) for problem in problems} == {"held_out"}
    # P(1 term) = P(lognormal < 1.5) = Phi(-1.783) = 0.0373; P(4) = Phi(0.2142) - Phi(-0.2428) = 0.1807.
    counts = [chain.num_terms(problem) for problem in problems]
    assert counts.count(1) == 37
    assert counts.count(4) == 181


def test_two_held_out_sets_have_the_same_mix_of_lengths() -> None:
    first, second = chain.held_out_problems(500, seed=1), chain.held_out_problems(500, seed=2)
    assert first != second
    assert sorted(map(chain.num_terms, first)) == sorted(map(chain.num_terms, second))


def test_beyond_the_texts_of_one_term_some_problems_come_twice() -> None:
    problems = chain.held_out_problems(4096)
    counts = Counter(problems)
    assert len(problems) == 4096
    assert len(counts) == 4059
    assert set(counts.values()) == {1, 2}
    assert {chain.num_terms(problem) for problem, count in counts.items() if count == 2} == {1}
    assert all(chain.split_of(problem) == "held_out" for problem in counts)


def test_more_held_out_problems_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="9000 held-out problems need 336 of 1 terms"):
        chain.held_out_problems(9000)


# --- solvers


def test_rewriting_folds_the_first_term_and_copies_the_rest() -> None:
    assert chain.rewrite("54+3-2+1") == "57-2+1"
    assert chain.rewrite("9+1") == "10"
    assert chain.rewrite("1-3+2") == "-2+2"
    assert chain.rewrite("10") is None
    assert chain.rewrite("+1") is None


def test_the_clean_solver_writes_every_step() -> None:
    assert chain.clean_response(PROBLEM) == RIGHT
    assert chain.answer(PROBLEM) == 56


def test_what_is_no_problem_is_refused() -> None:
    for text in ("", "54", "54+", "<bos>54+3", "54 + 3", "=54+3"):
        with pytest.raises(ValueError, match="is no problem; write one like"):
            chain.clean_response(text)


@given(seeds, term_counts)
def test_the_clean_response_is_correct_and_fits_the_response_limit(seed: int, count: int) -> None:
    problem = problem_from(seed, count)
    response = chain.clean_response(problem)
    assert chain.is_correct(problem, response)
    assert chain.check_steps(problem, response) == [True] * count
    assert len(response.removesuffix("<eos>")) + 1 <= 256


@given(seeds, term_counts)
def test_a_noisy_response_is_well_formed_and_misses_by_1_2_or_10(seed: int, count: int) -> None:
    problem = problem_from(seed, count)
    response = chain.noisy_response(problem, random.Random(seed), wrong_step_frac=0.5)
    report = chain.check_chain(problem, response)
    assert report.is_ended
    assert report.is_well_formed
    assert len(report.standing_steps) == count
    standing = problem
    for step in report.steps:
        right = chain.rewrite(standing)
        assert right is not None
        if not step.is_valid:
            assert abs(value_of(step.expression) - value_of(right)) in (1, 2, 10)
        if not step.is_withdrawn:
            standing = step.expression


def value_of(expression: str) -> int:
    match = re.match(r"\d+", expression)
    assert match is not None
    return int(match.group())


@given(seeds, term_counts)
def test_a_solver_that_notices_every_error_is_correct(seed: int, count: int) -> None:
    problem = problem_from(seed, count)
    response = chain.noisy_response(problem, random.Random(seed), noticed_frac=1.0)
    assert chain.is_correct(problem, response)
    assert response.count("x") == sum(not is_valid for is_valid in chain.check_steps(problem, response))


def test_about_one_step_in_six_is_wrong_and_a_third_of_those_is_noticed() -> None:
    generator = random.Random(0)
    steps = [
        step
        for problem in islice(chain.iterate_problems(0, "train"), 3000)
        for step in chain.check_chain(problem, chain.noisy_response(problem, generator)).steps
    ]
    wrong = [step for step in steps if not step.is_valid]
    # 0.18 and 0.35; about 15,000 steps and 2,600 wrong ones leave standard errors of 0.003 and 0.009.
    assert len(wrong) / len(steps) == pytest.approx(0.18, abs=0.012)
    assert sum(step.is_withdrawn for step in wrong) / len(wrong) == pytest.approx(0.35, abs=0.03)


# --- checkers


@pytest.mark.parametrize(
    "response",
    [
        RIGHT,
        RIGHT + "<pad><pad>",
        "=58-2+1x=57-2+1=55+1=56<eos>",  # a wrong step, withdrawn
        "=57-2+1x=57-2+1=55+1=56<eos>",  # a right step, withdrawn and redone
        "=0x=99x=57-2+1=55+1=56<eos>",  # two tries withdrawn, whatever they held
    ],
)
def test_a_finished_chain_of_right_steps_is_correct(response: str) -> None:
    assert chain.is_correct(PROBLEM, response)
    assert chain.has_right_answer(PROBLEM, response)


@pytest.mark.parametrize(
    "response",
    [
        "",
        "<eos>",
        "=57-2+1=55+1=56",  # not ended
        "=57-2+1=55+1=56<eos>6",  # something after the end
        "=57-2+1=55+1=56<eos><eos>",
        "=57-2+1=55+1=57<eos>",  # wrong answer
        "=57-2+1=55+1=056<eos>",
        "=57-2+1=55+1=+56<eos>",
        "=57-2+1=55+1=56x<eos>",  # the answer is withdrawn
        "=57-2+1=55+1<eos>",  # stops early
        "=56<eos>",  # skips the steps
        "=57-2+1=55+1=56=56<eos>",  # a step too many
        "=57-2+1=55+1=55xx=56<eos>",  # one x withdraws one step
        "57-2+1=55+1=56<eos>",  # no first =
        "x=57-2+1=55+1=56<eos>",
        "==55+1=56<eos>x",
    ],
)
def test_anything_else_is_not_correct(response: str) -> None:
    assert not chain.is_correct(PROBLEM, response)
    assert not chain.has_right_answer(PROBLEM, response)


@pytest.mark.parametrize(
    "response",
    [
        "=58-2+1=55+1=56<eos>",  # 58 - 2 = 55 cancels the first error
        "=57-2+1=54+1=56<eos>",
        "=57-2=55+1=56<eos>",  # a term lost and found again
        "=58-2+1=57-2+1x=55+1=56<eos>",  # the right step is withdrawn, the wrong one stands
        "=057-2+1=55+1=56<eos>",
    ],
)
def test_a_right_answer_after_a_wrong_step_is_not_correct(response: str) -> None:
    assert chain.has_right_answer(PROBLEM, response)
    assert not chain.is_correct(PROBLEM, response)


@given(seeds, term_counts)
def test_a_response_is_correct_exactly_if_its_answer_is_right_and_no_standing_step_wrong(
    seed: int, count: int
) -> None:
    problem = problem_from(seed, count)
    response = chain.noisy_response(problem, random.Random(seed), wrong_step_frac=0.3)
    wrong_steps = [
        s for s in chain.check_chain(problem, response).steps if not (s.is_valid or s.is_withdrawn)
    ]
    assert chain.is_correct(problem, response) == (not wrong_steps)
    assert chain.has_right_answer(problem, response) >= chain.is_correct(problem, response)


def test_steps_are_judged_against_what_stands_before_them() -> None:
    # 58 is wrong and stands; 56 = 58 - 2 rewrites it; 57 = 56 + 1 is valid, though no answer.
    assert chain.check_steps(PROBLEM, "=58-2+1=56+1=57<eos>") == [False, True, True]
    # 58 is withdrawn, so 57 is judged against the problem.
    assert chain.check_steps(PROBLEM, "=58-2+1x=57-2+1=55+1=56<eos>") == [False, True, True, True]
    # A term lost in the copy makes the step invalid.
    assert chain.check_steps(PROBLEM, "=57-2=55<eos>") == [False, True]


def test_a_chain_is_right_as_far_as_it_goes_if_its_standing_steps_are() -> None:
    assert chain.check_chain(PROBLEM, "=57-2+1").is_chain_right
    assert not chain.check_chain(PROBLEM, "=58-2+1=55+1=56<eos>").is_chain_right
    assert not chain.check_chain(PROBLEM, "5" + RIGHT).is_chain_right


@given(st.text(alphabet=chain.CHARACTERS, max_size=40), st.booleans())
def test_the_checkers_judge_any_text_without_failing(body: str, is_ended: bool) -> None:
    response = body + ("<eos>" if is_ended else "")
    report = chain.check_chain(PROBLEM, response)
    assert report.is_ended == is_ended
    assert len(report.steps) <= body.count("=")
    assert chain.is_correct(PROBLEM, response) <= is_ended


# --- shipped assets


@pytest.fixture(scope="module")
def tiny() -> tuple:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    policy_dir, reward_dir = TINY_DIR / "policy", TINY_DIR / "reward"
    tokenizer = transformers.AutoTokenizer.from_pretrained(policy_dir)
    policy = transformers.AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32)
    classifier = transformers.AutoModelForSequenceClassification
    reward = classifier.from_pretrained(reward_dir, dtype=torch.float32)
    return torch, tokenizer, policy.eval(), reward.eval()


def score(tiny: tuple, prompt: str, response: str) -> float:
    torch, tokenizer, _, reward = tiny
    with torch.no_grad():
        return reward(**tokenizer(prompt + response, return_tensors="pt")).logits[0, 0].item()


def test_the_special_tokens_are_distinct_and_both_models_agree_on_them(tiny: tuple) -> None:
    _, tokenizer, policy, reward = tiny
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3
    assert len(tokenizer) == 18
    for model in (policy, reward):
        assert model.config.vocab_size == 18
        assert model.config.pad_token_id == tokenizer.pad_token_id
        assert model.config.bos_token_id == tokenizer.bos_token_id
        assert model.config.eos_token_id == tokenizer.eos_token_id
        assert model.config.max_position_embeddings == 512
    assert reward.config.num_labels == 1


def test_encoding_adds_bos_once_and_decoding_gives_the_text_back(tiny: tuple) -> None:
    _, tokenizer, _, _ = tiny
    token_ids = tokenizer(PROBLEM)["input_ids"]
    assert token_ids.count(tokenizer.bos_token_id) == 1
    assert token_ids[0] == tokenizer.bos_token_id
    assert len(token_ids) == 1 + len(PROBLEM)
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == PROBLEM
    response_ids = tokenizer(RIGHT, add_special_tokens=False)["input_ids"]
    assert response_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(response_ids) == RIGHT


def test_both_tokenizers_are_the_same_file() -> None:
    name = "tokenizer.json"
    assert (TINY_DIR / "policy" / name).read_bytes() == (TINY_DIR / "reward" / name).read_bytes()


def test_the_assets_stay_below_8_mb_and_have_a_model_card() -> None:
    assert sum(file.stat().st_size for file in TINY_DIR.rglob("*") if file.is_file()) <= 8_000_000
    assert (TINY_DIR / "README.md").is_file()
    assert (TINY_DIR / "figures.json").is_file()


def test_greedy_decoding_solves_an_easy_problem(tiny: tuple) -> None:
    torch, tokenizer, policy, _ = tiny
    prompt = tokenizer("41-2+1", return_tensors="pt")
    with torch.no_grad():
        output = policy.generate(**prompt, max_new_tokens=40, do_sample=False)
    response = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert chain.is_correct("41-2+1", response)


@pytest.mark.parametrize("prompt", HELD_OUT_PROBLEMS)
def test_the_reward_model_ranks_a_right_response_above_wrong_ones(tiny: tuple, prompt: str) -> None:
    right = chain.clean_response(prompt)
    body = right.removesuffix("<eos>")
    wrong_answer = f"{body.rpartition('=')[0]}={chain.answer(prompt) + 1}<eos>"
    assert chain.split_of(prompt) == "held_out"
    for wrong in (wrong_answer, "<eos>", body[:-1], body + "=<eos>", body):
        assert score(tiny, prompt, wrong) < score(tiny, prompt, right)


def test_padding_on_either_side_leaves_the_score_unchanged(tiny: tuple) -> None:
    torch, tokenizer, _, reward = tiny
    texts = [PROBLEM + RIGHT, "8+1=9<eos>"]
    alone = [score(tiny, text, "") for text in texts]
    for side in ("left", "right"):
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side=side)
        with torch.no_grad():
            together = reward(**batch).logits[:, 0].tolist()
        # float32 rounding of another summation order.
        assert together == pytest.approx(alone, abs=1e-3)
