"""What ``oppo-kit bench --dry-run`` does: plan, estimate, look around, print."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from harness.dry_run.cards import found_hardware, parse_gpus
from harness.dry_run.estimate import estimate_step
from harness.dry_run.missing import find_missing
from harness.dry_run.plan import Plan, make_plan
from harness.dry_run.report import print_report
from harness.environment import quieten_transformers
from oppo_kit.config import TrainConfig


def run_dry(train: TrainConfig, gpus: str | None, runners: Sequence[str], console: Console) -> Plan:
    """Plan a benchmark and print the plan; whether it fits or not, nothing is raised.

    Args:
        train: all settings.
        gpus: hardware such as ``8xH200``; None: what is here.
        runners: that would be measured. Memory and time are those of ``both``, the largest of ours; TRL's are left out.
        console: for the report.

    Raises:
        OppoError: bad input; see the functions called.
    """
    quieten_transformers()
    here = found_hardware()
    plan = make_plan(train, here if gpus is None else parse_gpus(gpus))
    card = plan.hardware.card
    estimate = None if card is None else estimate_step(train, plan.models, plan.work, plan.layout, card)
    print_report(plan, estimate, find_missing(plan, runners, here), console)
    return plan
