"""Command line of ``python -m harness.assets.make_tiny``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from harness.assets import make_tiny
from harness.assets.make_tiny import language_model, sampling
from harness.assets.make_tiny.figures import evaluate
from harness.assets.make_tiny.tokens import build_tokenizer
from harness.assets.make_tiny.verifier import FULL_STATE, LAST_ROUND, ROUNDS, make_reward
from harness.workloads import rewrite_chain as chain


def stages(options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """All stages by name, in their order."""
    work_dir = options.work_dir
    rounds = [
        replace(training_round, num_steps=num_steps)
        for training_round, num_steps in zip(ROUNDS, options.reward_steps, strict=True)
    ]
    return {
        "clean": lambda: language_model.make_clean(work_dir, options.clean_steps),
        "oracle": lambda: language_model.make_oracle(work_dir, options.oracle_steps),
        "policy": lambda: language_model.make_policy(work_dir, options.policy_steps, options.wrong_step_frac),
        "samples": lambda: sampling.make_samples(work_dir, options.num_samples),
        "sharp_samples": lambda: sampling.make_sharp_samples(work_dir, options.num_sharp_samples),
        **{each.name: partial(make_reward, work_dir, each) for each in rounds},
        "responses": lambda: sampling.make_responses(work_dir, options.num_problems),
        "evaluate": lambda: evaluate(work_dir),
        "ship": lambda: ship(work_dir, options.output_dir),
    }


def ship(work_dir: Path, output_dir: Path) -> None:
    """Stage 12: tokenizer into both folders, then each file is moved to its place in one step."""
    output_dir.mkdir(parents=True, exist_ok=True)
    for source, name in (("policy", "policy"), (LAST_ROUND, "reward")):
        build_tokenizer().save_pretrained(work_dir / source)
        (output_dir / name).mkdir(exist_ok=True)
        for file in sorted(file for file in (work_dir / source).iterdir() if file.name != FULL_STATE):
            _replace(output_dir / name / file.name, file.read_bytes())
    figures = work_dir / "figures.json"
    if figures.exists():
        _replace(output_dir / "figures.json", figures.read_bytes())


def _replace(target: Path, content: bytes) -> None:
    partial_file = target.with_name(f".{target.name}.partial")
    partial_file.write_bytes(content)
    os.replace(partial_file, target)


def parser() -> argparse.ArgumentParser:
    """Options with the lengths that made the shipped weights as defaults."""
    made = argparse.ArgumentParser(
        prog="python -m harness.assets.make_tiny",
        description=make_tiny.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("stage", help="one stage, or all")
    made.add_argument("--work-dir", type=Path, default=Path("/tmp/make_tiny"))
    made.add_argument("--output-dir", type=Path, default=Path(__file__).parents[1] / "tiny")
    made.add_argument("--clean-steps", type=int, default=2400)
    made.add_argument("--oracle-steps", type=int, default=600)
    made.add_argument("--policy-steps", type=int, default=500)
    made.add_argument("--wrong-step-frac", type=float, default=chain.WRONG_STEP_FRAC)
    made.add_argument("--num-samples", type=int, default=8000)
    made.add_argument("--num-sharp-samples", type=int, default=2700)
    lengths = [each.num_steps for each in ROUNDS]
    made.add_argument("--reward-steps", type=int, nargs=len(ROUNDS), default=lengths, metavar="STEPS")
    made.add_argument("--num-problems", type=int, default=2000)
    return made


def main() -> None:
    """Parses the command line and runs one stage or all."""
    options = parser().parse_args()
    torch.set_num_threads(1)
    options.work_dir.mkdir(parents=True, exist_ok=True)
    all_stages = stages(options)
    if options.stage not in ("all", *all_stages):
        parser().error(f"stage is {options.stage!r}; use all or one of {', '.join(all_stages)}")
    for name, run_stage in all_stages.items():
        if options.stage in ("all", name):
            run_stage()


if __name__ == "__main__":
    main()
