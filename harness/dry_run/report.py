"""A plan in the terminal: models, work, memory, time, what is missing, and the verdict in one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.dry_run.cards import USABLE_FRAC
from harness.dry_run.estimate import Estimate
from harness.dry_run.memory import DeviceMemory
from harness.dry_run.missing import Finding
from harness.dry_run.models import CountedModel
from harness.dry_run.plan import Plan, changes_that_fit, in_one_process
from harness.formatting import ABSENT, format_number, format_size


def print_report(
    plan: Plan, estimate: Estimate | None, findings: Sequence[Finding], console: Console
) -> None:
    """Everything, the verdict last."""
    console.print(
        f"dry run: {plan.train.algo}, {plan.train.model} on {plan.hardware.title}; nothing is loaded or measured",
        markup=False,
    )
    console.print(_models(plan))
    console.print(_settings(plan))
    for device in plan.devices:
        console.print(_memory(device))
    if estimate is None:
        console.print(_no_estimate(plan), markup=False)
    else:
        console.print(_time(estimate, has_scorers=bool(plan.models.scorers)))
        _print_lines("expected bottleneck", [estimate.bottleneck], console)
        _print_lines("assumed", estimate.assumptions, console)
    if findings:
        console.print(_missing(findings))
    console.print(verdict(plan, findings), markup=False, highlight=False)


def verdict(plan: Plan, findings: Sequence[Finding]) -> str:
    """Whether it fits, what to change if not, and whether it can start here."""
    if plan.fits:
        tightest = max(plan.devices, key=lambda device: device.total_bytes)
        sentence = (
            f"fits: at most {format_size(tightest.total_bytes)} of {format_size(tightest.usable_bytes)} "
            "on a device"
        )
        if plan.layout.num_training > 1:
            alone = in_one_process(plan)
            sentence += (
                f", sharded; this version trains in one process, and GPU 0 alone would hold "
                f"{format_size(alone.total_bytes)}"
            )
    else:
        sentence = "; ".join(
            f"does not fit: {device.title} would hold {format_size(device.excess_bytes)} too much"
            for device in plan.devices
            if device.excess_bytes
        )
        changes = changes_that_fit(plan)
        sentence += (
            f"; no setting tried here makes it fit: take more devices, or ones with more memory, or less of what is "
            f"largest, the {_largest(plan)}"
            if changes is None
            else f"; it fits with {' '.join(f'--set {change}' for change in changes)}"
        )
    things = (
        f"{len(findings)} thing{'s' if len(findings) > 1 else ''} missing"
        if findings
        else "nothing is missing"
    )
    return f"{sentence}. To start here: {things}."


def _largest(plan: Plan) -> str:
    fullest = max(plan.devices, key=lambda device: device.excess_bytes)
    return max(fullest.parts, key=lambda part: part.num_bytes).name


def _models(plan: Plan) -> Table:
    models = plan.models
    table = _table("models", "role", "model", "parameters", "architecture")
    roles = {
        "policy": models.policy,
        "critic": models.critic,
        "reference": models.reference,
        "reward": models.reward,
    }
    for role, model in roles.items():
        if model is not None:
            _add_row(table, role, model.name, _count(model), model.architecture)
    if models.reward is None and models.reward_name is not None:
        _add_row(table, "reward", models.reward_name, "", "Python, on the CPU")
    return table


def _count(model: CountedModel) -> str:
    number = model.num_parameters
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _settings(plan: Plan) -> Table:
    train, work = plan.train, plan.work
    table = _table("run", "what", "planned")
    _add_row(table, "placement", plan.layout.sentence)
    if plan.layout.num_training > 1:
        _add_row(table, "", "a plan: this version trains in one process, see below")
    _add_row(table, "data", train.dataset or f"task {train.task}")
    _add_row(
        table, "batch", f"B = {work.batch_size}, Δ = {work.delta}, responses per prompt: {work.group_size}"
    )
    bounded = "at most" if train.max_prompt_tokens else "without max_prompt_tokens taken to be"
    _add_row(table, "prompt", f"{bounded} {work.prompt_tokens} tokens")
    _add_row(table, "response", f"at most {work.response_tokens} tokens")
    _add_row(table, "generator", f"backend {train.backend}, {train.dtype}")
    adapter = "all weights" if train.actor_lora is None else f"a LoRA adapter of rank {train.actor_lora.r}"
    passes = f"passes per batch: {work.num_epochs}, mini-batches: {work.num_mini_batches}"
    _add_row(table, "training", f"{adapter}, {train.dtype}, {passes}")
    return table


def _memory(device: DeviceMemory) -> Table:
    title = f"memory of {device.title}" + (", each" if device.title.startswith("GPUs") else "")
    table = _table(title, "held at the peak", "size", "from")
    table.columns[1].justify = "right"
    for part in device.parts:
        _add_row(table, part.name, format_size(part.num_bytes), part.formula)
    usable = f"{format_size(device.usable_bytes)} usable, {USABLE_FRAC:.0%} of the memory"
    state = f"too much by {format_size(device.excess_bytes)}" if device.excess_bytes else "fits"
    table.add_section()
    _add_row(table, "together", format_size(device.total_bytes), f"{usable}: {state}")
    return table


def _time(estimate: Estimate, *, has_scorers: bool) -> Table:
    table = _table("one step, estimated", "stage", "sequential", "both")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {"generate": "generate_s", "score": "score_s", "train": "train_s", "step": "step_s"}
    for label, name in rows.items():
        if label == "step":
            table.add_section()
        steps = (estimate.sequential, estimate.both)
        is_counted = has_scorers or label != "score"
        _add_row(
            table, label, *(f"{_rough(getattr(step, name))} s" if is_counted else ABSENT for step in steps)
        )
    _add_row(table, "sequential/both", "", _rough(estimate.ratio))
    return table


def _rough(value: float) -> str:
    """Two digits: an estimate has no more."""
    return format_number(float(f"{value:.1e}"), digits=2)


def _missing(findings: Sequence[Finding]) -> Table:
    table = _table("missing to start here", "what", "what to do")
    for found in findings:
        _add_row(table, found.what, found.remedy)
    return table


def _no_estimate(plan: Plan) -> str:
    return (
        f"no time is estimated for {plan.hardware.title}, whose speed is not known here; measure it with: "
        "oppo-kit bench --quick"
    )


def _print_lines(title: str, lines: Iterable[str], console: Console) -> None:
    lines = list(lines)
    if not lines:
        return
    console.print(f"{title}:", markup=False, highlight=False)
    for line in lines:
        console.print(f"- {line}", markup=False, highlight=False)


def _add_row(table: Table, *cells: str) -> None:
    """Names and commands as they are: brackets are no markup."""
    table.add_row(*(escape(cell) for cell in cells))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    return table
