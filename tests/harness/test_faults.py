"""Faults that are put in on purpose do what they say, to our runners only, and the result says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from results_factory import make_ladder

from harness.faults import FAULTS, break_algorithm
from harness.formatting import one_sentence_of
from harness.readme_table import NO_RESULTS, render_table
from harness.statistics import fill_derived
from oppo_kit.errors import UnknownNameError
from oppo_kit.registry import create_algorithm
from oppo_kit.testing import random_batch


def broken(fault: str) -> tuple[Any, Any, Any]:
    """A batch of GRPO's, and what is prepared of it with and without the fault."""
    algorithm = create_algorithm("grpo", {})
    batch = random_batch(algorithm)
    right = algorithm.prepare(batch)
    break_algorithm(algorithm, fault)
    return batch, right, algorithm.prepare(batch)


def test_log_probs_are_those_of_the_token_before() -> None:
    batch, right, wrong = broken("shifted_logprobs")
    anchor, shifted = right.tensors["anchor_logprobs"], wrong.tensors["anchor_logprobs"]
    for row, length in enumerate(batch.response_lengths.tolist()):
        assert torch.equal(shifted[row, 1:length], anchor[row, : max(length - 1, 0)])
        assert not shifted[row, length:].any()
    assert torch.equal(right.tensors["advantages"], wrong.tensors["advantages"])


def test_advantages_have_the_other_sign() -> None:
    _, right, wrong = broken("flipped_advantages")
    assert torch.equal(right.tensors["advantages"], -wrong.tensors["advantages"])
    assert right.tensors["advantages"].any()
    assert torch.equal(right.tensors["anchor_logprobs"], wrong.tensors["anchor_logprobs"])


def test_an_unknown_fault_names_those_there_are() -> None:
    with pytest.raises(UnknownNameError, match="fault 'shifted'.*shifted_logprobs"):
        break_algorithm(SimpleNamespace(prepare=None), "shifted")  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_result_with_a_fault_says_so_and_is_in_no_table(fault: str | None, tmp_path: Any) -> None:
    result = fill_derived(make_ladder())
    result = result.model_copy(update={"workload": result.workload.model_copy(update={"fault": fault})})
    assert ("put in on purpose" in one_sentence_of(result)) == (fault is not None)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "result.json").write_text(result.model_dump_json())
    assert (render_table(tmp_path) == NO_RESULTS) == (fault is not None)
