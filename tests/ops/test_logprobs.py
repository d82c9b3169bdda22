"""Log-probs in slices equal log-probs at once, with their gradient."""

from __future__ import annotations

import math

import pytest
import torch

from oppo_kit.ops.logprobs import token_logprobs


def test_hand_computed_logprob_and_entropy_at_a_temperature() -> None:
    hidden = torch.tensor([[math.log(4.0), 0.0]])
    logprobs, entropy = token_logprobs(hidden, torch.tensor([0]), lambda h: h, vocab_size=2, temperature=2.0)
    # logits / 2 = (log 2, 0): probabilities 2/3 and 1/3
    assert float(logprobs[0]) == pytest.approx(math.log(2 / 3), abs=1e-6)
    assert float(entropy[0]) == pytest.approx(
        -(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3), abs=1e-6
    )


@pytest.mark.parametrize("max_logit_elements", [1, 40, 100, 10_000])
def test_slices_change_neither_values_nor_gradients(max_logit_elements: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(10, 4, requires_grad=True)
    hidden = torch.randn(13, 4, requires_grad=True)
    token_ids = torch.randint(10, (13,))

    def gradients(limit: int) -> tuple[torch.Tensor, ...]:
        logprobs, entropy = token_logprobs(
            hidden,
            token_ids,
            lambda h: h @ weight.T,
            vocab_size=10,
            temperature=0.7,
            max_logit_elements=limit,
        )
        assert not entropy.requires_grad
        return (
            *torch.autograd.grad((logprobs * torch.arange(13)).sum(), (hidden, weight)),
            logprobs,
            entropy,
        )

    for one, other in zip(gradients(max_logit_elements), gradients(1 << 20), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_an_entry_that_the_model_forbids_costs_no_entropy() -> None:
    hidden = torch.tensor([[0.0, 0.0, -math.inf]])
    _, entropy = token_logprobs(hidden, torch.tensor([0]), lambda h: h, vocab_size=3, temperature=1.0)
    assert float(entropy[0]) == pytest.approx(math.log(2), abs=1e-6)
