"""The command ``oppo-kit``: bench, train, report, check, doctor. Parses and prints; the work is done elsewhere.

Nothing heavy is imported before a command needs it, so that ``--help`` and ``doctor`` load no algorithm.
"""

from __future__ import annotations

import logging
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from typer.core import TyperCommand

from oppo_kit.errors import ConfigError, OppoError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Online RL of language models with an overlapped pipeline.",
)

ConfigFile = Annotated[
    Path | None, typer.Argument(help="YAML with the settings; options and --set go on top")
]
Algo = Annotated[str | None, typer.Option(help="algorithm: ppo, grpo, rloo, online_dpo or an installed one")]
Model = Annotated[str | None, typer.Option(help="policy: alias, hub id or folder")]
Task = Annotated[
    str | None, typer.Option(help="tiny, reviews, free_form, math or code; default: the model's")
]
Dataset = Annotated[str | None, typer.Option(help="hub id, JSONL or parquet file with prompts of your own")]
Backend = Annotated[str | None, typer.Option(help="what samples: hf, or vllm (only with our runners)")]
PromptColumn = Annotated[str | None, typer.Option(help="column of the prompt: text or messages")]
Reward = Annotated[str | None, typer.Option(help="reward model (alias, hub id, folder) or module:function")]
ActorLora = Annotated[bool, typer.Option("--actor-lora", help="train LoRA adapters instead of all weights")]
BatchSize = Annotated[int | None, typer.Option(help="B, prompts trained per step")]
Steps = Annotated[int | None, typer.Option(help="training steps")]
Seed = Annotated[int | None, typer.Option(help="of everything random")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="any setting, for example overlap.delta=8; repeatable")
]
Out = Annotated[Path | None, typer.Option(help="folder for the results; default: a new one below runs/")]
# Of ``bench`` alone.
Runners = Annotated[
    str | None,
    typer.Option(
        help="comma-separated, or ladder: trl, sequential, sample, chunk, chunk_auto, overcommit, both; also "
        "trl_continuous (grpo, rloo) and trl_overlap (grpo, rloo, online_dpo); default trl,sequential,both"
    ),
]
PlacementName = Annotated[
    str, typer.Option(help="shared: every stage may use all cores; split: actor and scorers have one each")
]
Pairs = Annotated[
    int, typer.Option(min=1, help="repetitions, each with its own seed; 3 or more to be quoted")
]
Evaluations = Annotated[int, typer.Option(min=1, help="evaluations during a run, besides the first")]
EvalProblems = Annotated[int, typer.Option(min=1, help="size of the fixed held-out set")]
Warmup = Annotated[int, typer.Option(min=0, help="first steps that no ratio counts")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="thread count for all; default: the fastest of each")
]
CalibrationSteps = Annotated[
    int, typer.Option(min=2, help="steps per thread count that is tried, the first one not counted")
]
Fault = Annotated[
    str | None,
    typer.Option(
        help="put one into our runners, to see whether check finds it: flipped_advantages, shifted_logprobs"
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="a smoke run in under 90 s; never quote its figures")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="only say what it would hold, cost and lack; load nothing")
]
Gpus = Annotated[
    str | None, typer.Option(help="with --dry-run: hardware such as 8xH200; default: what is here")
]

# A smoke run: every stage, every file; with the three default runners in under 90 seconds on two cores.
_QUICK_STEPS = 3
_QUICK_SETTINGS = ["batch_size=8", "sampling.response_length=48", "overlap.delta=4"]


@app.command()
def bench(
    config: ConfigFile = None,
    algo: Algo = None,
    model: Model = None,
    task: Task = None,
    dataset: Dataset = None,
    prompt_column: PromptColumn = None,
    reward: Reward = None,
    backend: Backend = None,
    actor_lora: ActorLora = False,
    batch_size: BatchSize = None,
    steps: Steps = None,
    seed: Seed = None,
    sets: Sets = None,
    runners: Runners = None,
    placement: PlacementName = "shared",
    pairs: Pairs = 3,
    evaluations: Evaluations = 2,
    eval_problems: EvalProblems = 512,
    warmup: Warmup = 2,
    threads: Threads = None,
    calibration_steps: CalibrationSteps = 3,
    fault: Fault = None,
    quick: Quick = False,
    dry_run: DryRun = False,
    gpus: Gpus = None,
    out: Out = None,
) -> None:
    """Measure TRL, sequential and overlapped training on the same work; write table, plots and result.json."""
    from harness.bench import BenchPlan, check_runners, parse_placement, run_bench, runner_names
    from harness.formatting import one_sentence_of
    from harness.runners.trl import can_run
    from harness.settings import load_train_config
    from harness.terminal import summary_table

    options = _options(
        algo, model, task, dataset, prompt_column, reward, backend, actor_lora, batch_size, steps, seed
    )
    overrides = list(sets or [])
    if quick:
        overrides = [*_QUICK_SETTINGS, f"num_steps={steps or _QUICK_STEPS}", *overrides]
    train = load_train_config(config, options=options, overrides=overrides)
    names = runner_names(runners, placement, train.algo, train.backend)
    if gpus is not None and not dry_run:
        raise ConfigError(
            f"--gpus {gpus} describes the hardware of a --dry-run, and a run takes what is here"
        )
    folder = _new_folder(out, f"{train.algo}-{train.model}", "result.json")
    plan = BenchPlan(
        name=folder.name,
        train=train,
        runners=names,
        placement=parse_placement(placement),
        num_pairs=1 if quick else pairs,
        eval_every=max(1, train.num_steps // (1 if quick else evaluations)),
        num_eval_problems=32 if quick else eval_problems,
        num_warmup_steps=1 if quick else warmup,
        is_quick=quick,
        folder=folder,
        num_threads=1 if quick else threads,
        num_calibration_steps=calibration_steps,
        fault=fault,
    )
    console = Console()
    if dry_run:
        from harness.dry_run.command import run_dry

        check_runners(plan)
        run_dry(train, gpus, names, console)
        return
    if "trl" not in plan.runners and not can_run("trl", train.algo):
        console.print(f"TRL has no trainer of {train.algo}, so runner trl is left out", markup=False)
    result = run_bench(plan, console)
    console.print(summary_table(result, console.width))
    console.print(one_sentence_of(result), markup=False)
    console.print(f"report: {folder / 'report.md'}   results: {folder / 'result.json'}", markup=False)


@app.command()
def train(
    config: ConfigFile = None,
    algo: Algo = None,
    model: Model = None,
    task: Task = None,
    dataset: Dataset = None,
    prompt_column: PromptColumn = None,
    reward: Reward = None,
    backend: Backend = None,
    actor_lora: ActorLora = False,
    batch_size: BatchSize = None,
    steps: Steps = None,
    seed: Seed = None,
    sets: Sets = None,
    report_to: Annotated[
        list[str] | None, typer.Option(help="tracker: tensorboard, wandb, trackio; repeatable")
    ] = None,
    save_every: Annotated[int, typer.Option(min=0, help="steps between checkpoints; 0: only at the end")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the checkpoint in --out")] = False,
    out: Out = None,
) -> None:
    """Train a model and save it in Hugging Face format."""
    from harness.settings import load_train_config
    from harness.training import CONFIG_NAME, run_training
    from oppo_kit.checkpoint import CHECKPOINT_NAME

    options = _options(
        algo, model, task, dataset, prompt_column, reward, backend, actor_lora, batch_size, steps, seed
    )
    if resume and out is not None and config is None and (out / CONFIG_NAME).exists():
        config = out / CONFIG_NAME
    settings = load_train_config(config, options=options, overrides=sets or [])
    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the run to go on with")
    folder = (
        out
        if resume and out
        else _new_folder(out, f"train-{settings.algo}-{settings.model}", CHECKPOINT_NAME)
    )
    console = Console()
    model_folder = run_training(
        settings, folder, console, report_to=report_to or [], save_every=save_every, is_resumed=resume
    )
    console.print(f"model: {model_folder}", markup=False)


@app.command()
def report(runs: Annotated[list[Path], typer.Argument(help="folders of finished benchmarks")]) -> None:
    """Render the reports of finished benchmarks again."""
    from harness.report import report_runs

    for file in report_runs(runs):
        print(file)


class _CheckCommand(TyperCommand):
    """Ends with 3 after a wrong option or argument: 2, as elsewhere, is a verdict of ``check``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Typer keeps a click of its own or uses the installed one; either way, this is click's UsageError.
        usage_error: type[Exception] = typer.BadParameter.__bases__[0]
        try:
            return super().parse_args(ctx, args)
        except usage_error as error:
            refusal: Any = error
            refusal.exit_code = 3
            raise


@app.command(cls=_CheckCommand)
def check(
    run: Annotated[Path, typer.Argument(help="folder of a finished benchmark, or its result.json")],
    against: Annotated[Path, typer.Option(help="the reference: another, or the same with another runner")],
    runner: Annotated[str | None, typer.Option(help="which runner of RUN, if it has several")] = None,
    reference_runner: Annotated[
        str | None, typer.Option(help="which runner of the reference, if it has several")
    ] = None,
    margin: Annotated[
        str, typer.Option(help="how much may differ, as a share of what the reference gained: 10% or 0.1")
    ] = "10%",
    by: Annotated[
        str,
        typer.Option(
            help="held-out value: score, by the training reward, or accuracy, by the task's checker"
        ),
    ] = "score",
    markdown: Annotated[Path | None, typer.Option(help="file for a pull request's comment")] = None,
    figure: Annotated[Path | None, typer.Option(help="PNG file for both learning curves")] = None,
) -> None:
    """Did RUN learn as the reference did? Exit code 0: yes; 1: no; 2: cannot tell; 3: not comparable, or bad input."""
    from harness.check.command import run_check

    code = run_check(
        run,
        against,
        runner=runner,
        reference_runner=reference_runner,
        margin=margin,
        by=by,
        markdown=markdown,
        figure=figure,
        console=Console(),
    )
    raise typer.Exit(code)


@app.command()
def doctor() -> None:
    """What this machine has, what is missing, and what to install."""
    from harness.doctor import print_findings

    print_findings(Console())


def main() -> None:
    """Entry point: an error of ours is one line on standard error and exit code 2."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(message)s",
        handlers=[RichHandler(console=Console(stderr=True), show_path=False)],
    )
    for noisy in ("httpx", "datasets", "transformers", "accelerate"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        app()
    except OppoError as error:
        print(f"error: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", []):
            print(f"  {note}", file=sys.stderr)
        sys.exit(2)


def _options(
    algo: str | None,
    model: str | None,
    task: str | None,
    dataset: str | None,
    prompt_column: str | None,
    reward: str | None,
    backend: str | None,
    actor_lora: bool,
    batch_size: int | None,
    steps: int | None,
    seed: int | None,
) -> dict[str, Any]:
    """The shared options by configuration key; None where an option was not given."""
    return {
        "algo": algo,
        "model": model,
        "task": task,
        "dataset": dataset,
        "prompt_column": prompt_column,
        "reward": reward,
        "backend": backend,
        "actor_lora": {} if actor_lora else None,
        "batch_size": batch_size,
        "num_steps": steps,
        "seed": seed,
    }


def _new_folder(out: Path | None, stem: str, marker: str) -> Path:
    """``--out``, which must not hold a result yet, or a fresh folder below ``runs/``."""
    if out is None:
        name = "".join(character if character.isalnum() or character in "-._" else "-" for character in stem)
        return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; pass a folder")
    if (out / marker).exists():
        raise ConfigError(f"{out} holds {marker} already; pass another --out, or (train) --resume")
    return out


if __name__ == "__main__":
    main()
