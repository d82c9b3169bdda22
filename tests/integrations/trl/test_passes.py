"""Passes without padding: every row once, in few tokens, with the log-probs and the gradients of one padded pass."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_causal_lm
from trl_trainers import (
    NAMES,
    answers_of,
    logged,
    make_trainer,
    overlap_class,
    playback,
    stock_class,
    watched,
)

from oppo_kit.integrations.trl import passes
from oppo_kit.integrations.trl.passes import cut_passes, response_lengths, run_passes


def cost_of(cuts: list[passes.Pass], prompt_tokens: int) -> int:
    return sum(len(cut.rows) * (prompt_tokens + cut.length) + passes._PASS_TOKENS for cut in cuts)


@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=7),
    prompt_tokens=st.integers(1, 50),
    max_tokens=st.integers(1, 2000),
)
def test_every_row_is_passed_once_and_no_cheaper_cut_exists(lengths, prompt_tokens, max_tokens) -> None:
    cuts = cut_passes(lengths, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
    assert sorted(row for cut in cuts for row in cut.rows) == list(range(len(lengths)))
    for cut in cuts:
        assert cut.length == max(1, *(lengths[row] for row in cut.rows))
        assert len(cut.rows) == 1 or len(cut.rows) * (prompt_tokens + cut.length) <= max_tokens
    order = sorted(max(length, 1) for length in lengths)
    others = []
    for count in range(len(order)):
        for inner in combinations(range(1, len(order)), count):
            bounds = [0, *inner, len(order)]
            blocks = [order[a:b] for a, b in pairwise(bounds)]
            tokens = [len(block) * (prompt_tokens + block[-1]) for block in blocks]
            if all(size <= max_tokens or len(block) == 1 for size, block in zip(tokens, blocks, strict=True)):
                others.append(sum(tokens) + passes._PASS_TOKENS * len(blocks))
    assert cost_of(cuts, prompt_tokens) == min(others)


def test_a_length_ends_with_the_last_token_whatever_stands_before() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1]])
    assert response_lengths(mask) == [2, 0, 4]


def test_log_probs_and_gradients_are_those_of_one_padded_pass(monkeypatch) -> None:
    monkeypatch.setattr(passes, "_PASS_TOKENS", 1)
    model = tiny_causal_lm("qwen2")
    lengths = [3, 40, 7, 40, 1, 22]
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 60, (len(lengths), 45), generator=generator)
    mask = torch.zeros(len(lengths), 40, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    seen: list[list[int]] = []

    def one_pass(rows: torch.Tensor, length: int) -> tuple[torch.Tensor, None]:
        seen.append([length] * len(rows))
        attention = torch.cat([torch.ones(len(rows), 5, dtype=torch.long), mask[rows, :length]], 1)
        logits = model(ids[rows, : 5 + length], attention_mask=attention).logits[:, 4:-1]
        targets = ids[rows, 5 : 5 + length, None]
        return logits.log_softmax(-1).gather(-1, targets)[..., 0], None

    def gradients(logprobs: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        (logprobs * mask).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    whole, _ = one_pass(torch.arange(len(lengths)), 40)
    expected = gradients(whole)
    seen.clear()
    found, nothing = run_passes(one_pass, mask, prompt_tokens=5, max_tokens=1000)
    assert nothing is None
    assert sorted(length for cut in seen for length in cut) == sorted(lengths), "nothing is padded"
    torch.testing.assert_close(found * mask, (whole * mask).detach(), atol=1e-5, rtol=1e-5)
    for one, other in zip(gradients(found), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"beta": 0.1, "num_iterations": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 2},
        {"mask_truncated_completions": True, "gradient_checkpointing": True},
    ],
    ids=["plain", "reference and several passes", "truncated rows without a mask"],
)
@pytest.mark.parametrize("name", NAMES)
def test_trimmed_updates_are_stocks_on_the_same_tokens_to_rounding(
    name, changes, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(passes, "_PASS_TOKENS", 1)
    folder = tmp_path / "policy"
    tiny_causal_lm("qwen2", folder=folder, tie_word_embeddings=False)
    widths: dict[str, list[int]] = {"ours": [], "stock": []}

    def counted(trainer_class: Any, kind: str) -> Any:
        class Counted(trainer_class):
            def _get_per_token_logps_and_entropies(
                self, model: Any, input_ids: Any, *args: Any, **kw: Any
            ) -> Any:
                # The model's own passes, not the call that is cut into them.
                handle = model.register_forward_pre_hook(
                    lambda _module, _args, kwargs: widths[kind].append(kwargs["input_ids"].numel()),
                    with_kwargs=True,
                )
                try:
                    return super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kw)
                finally:
                    handle.remove()

        return Counted

    settings: dict[str, Any] = {"max_steps": 3, "learning_rate": 1e-4, "model": str(folder), **changes}
    ours = make_trainer(
        name, tmp_path, trainer_class=counted(watched(overlap_class(name)), "ours"), overlap={}, **settings
    )
    ours.train()
    stock_trainer = playback(stock_class(name), answers_of(ours))
    stock = make_trainer(name, tmp_path, trainer_class=counted(stock_trainer, "stock"), **settings)
    stock.train()
    for key in ("loss", "grad_norm", "entropy", "kl"):
        assert logged(ours, key) == pytest.approx(logged(stock, key), rel=1e-3, abs=1e-6), key
    assert any(logged(ours, "grad_norm"))
    for one, other in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=0)
    assert sum(widths["ours"]) < sum(widths["stock"])
