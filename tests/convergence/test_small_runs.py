"""This very tree, trained for a few steps on the embedded model, against a reference that is kept in results/.

Run by ``make test-convergence``: about five minutes on two cores. The runs are the reference's own command with other
runners, so the reference says what is trained. Another machine rounds otherwise, and rounding becomes other samples
after an update or two: so the first step is compared to the tolerance of streaming, and what was learned within a
margin.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.schema import Result, Run, load_result

pytestmark = [pytest.mark.convergence, pytest.mark.timeout(1800)]
REFERENCE = Path(__file__).resolve().parents[2] / "results" / "convergence" / "reference"
# Of the reference's gain in held-out score. Wide, so that three seeds can tell also where a machine's rounding makes
# other samples of them.
MARGIN = 0.75
# Streaming changes no token, and scores by at most this; see "Semantics" in the engine's module.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def reference() -> Result:
    return load_result(REFERENCE)


@pytest.fixture(scope="module")
def trained(reference: Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a benchmark: the reference's command with streaming alone, and with overcommit beside it."""
    folder = tmp_path_factory.mktemp("convergence") / "now"
    arguments = shlex.split(reference.command)[1:]
    assert "sequential" in arguments
    arguments[arguments.index("sequential")] = "sample,both"
    command = [
        sys.executable,
        "-c",
        "from oppo_kit.installation import main; main()",
        *arguments,
        "--out",
        folder,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


def test_with_streaming_alone_the_first_step_is_that_of_the_reference(
    trained: Path, reference: Result
) -> None:
    ours, theirs = by_seed(load_result(trained), "sample"), by_seed(reference, "sequential")
    assert ours.keys() == theirs.keys()
    assert len(ours) == 3
    for seed in ours:
        first, expected = ours[seed].steps[0], theirs[seed].steps[0]
        assert first.trained_lengths == expected.trained_lengths
        assert first.tokens_decoded == expected.tokens_decoded
        assert first.reward_mean == pytest.approx(expected.reward_mean, abs=TOLERANCE)
        assert first.kl == pytest.approx(expected.kl, abs=TOLERANCE)
        for name in ("reward_std", "entropy"):
            assert first.metrics[name] == pytest.approx(expected.metrics[name], abs=TOLERANCE), name
        assert first.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=TOLERANCE)


@pytest.mark.parametrize("runner", ["sample", "both"])
def test_the_model_learns_what_the_reference_learned(
    runner: str, trained: Path, assert_equivalent: Callable[..., None]
) -> None:
    assert_equivalent(trained, REFERENCE, runner=runner, margin=MARGIN)


def by_seed(result: Result, runner: str) -> dict[int, Run]:
    return {run.seed: run for run in result.runners[runner].runs}
