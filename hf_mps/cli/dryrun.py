"""`hf-mps audit`, `plan` and `parity`: one step of a recipe, a model or a script."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hf_mps.cli.options import Json, Overrides, Target, Task, Torch, deferred
from hf_mps.core import status
from hf_mps.core.errors import UserError


@deferred
def audit(
    words: Annotated[
        list[str],
        Argument(
            metavar="TARGET [KEY=VALUE]... | -- python SCRIPT [ARGUMENT]...",
            help="A recipe's name or YAML file with keys to change; with --task a hub model's name or a folder.",
        ),
    ],
    task: Task = None,
    release: Torch = None,
    torch_table: Path | None = Option(None, help="The native_functions.yaml of another PyTorch release."),
    every: bool = Option(False, "--all", help="List every operator, not only those with a finding."),
    json: Json = False,
    github: bool = Option(False, "--github", help="Print GitHub annotations."),
    badge: bool = Option(False, "--badge", help="Print a badge line for a README."),
) -> None:
    """Find the operators of a training step that have no Metal kernel; it needs neither a Mac nor the model's weights.

    It covers forward pass, loss, backward pass, clipping and optimizer, and tells for each call whether it launches a
    Metal kernel or an MPSGraph, which is compiled for each shape. Exit code 0 where all run on Metal, 1 where some run
    on the CPU or are refused.

    Example: `hf-mps audit glue/mrpc`
    """
    from hf_mps.tools.dryrun import metal_device, render
    from hf_mps.tools.dryrun.resolve import is_command, resolve_target

    form, script = render.form(json=json, github=github, badge=badge), is_command(words)
    if script and task is not None:
        raise UserError("--task is for a model, not for a script; leave it out")
    with nullcontext() if script else status.shown("tracing a training step …"):
        target = None if script else resolve_target(words[0], words[1:], task)
        metal_device()  # before anything else imports torch
        from hf_mps.tools.dryrun import audit
        from hf_mps.tools.dryrun.audit.record import report

        if target is not None:
            result = audit.audit(target, torch_table, release)
        else:
            result = audit.audit_script(words, torch_table, release)
    render.show(report(result, every=every), form)


@deferred
def plan(
    target: Target,
    overrides: Overrides = None,
    memory: str | None = Option(None, metavar="MAC", help="Another Mac: 16gb, or m2-pro-16gb. Default: this one."),
    task: Task = None,
    length: int | None = Option(None, min=1, help="Tokens of a row. Default: the recipe's longest."),
    ranks: int | None = Option(None, min=2, help="Under FSDP: what each of N processes holds."),
    release: Torch = None,
    json: Json = False,
) -> None:
    """Tell whether a training fits into a Mac's memory, and what would make it fit.

    It traces one step, and also counts what that launches: Metal kernels, and MPSGraphs, which are compiled for each
    shape. Exit code 0 where it fits, 1 where macOS would swap or PyTorch would refuse.

    Example: `hf-mps plan sft/qlora --memory 16gb`
    """
    from hf_mps.tools.dryrun import metal_device, render
    from hf_mps.tools.dryrun.memory.machine import named
    from hf_mps.tools.dryrun.resolve import resolve_target

    machine = named(memory) if memory is not None else None
    if ranks is not None and release is not None:
        raise UserError("--torch, which is for a Mac, cannot be combined with --ranks; give one of them")
    with status.shown("tracing a training step …"):
        resolved = resolve_target(target, overrides or [], task)
        if ranks is not None:
            from hf_mps.tools.dryrun.memory import sharded

            result = sharded.plan(resolved, ranks, machine, length=length)
        else:
            metal_device()  # before anything else imports torch
            from hf_mps.tools.dryrun.memory.plan import plan

            result = plan(resolved, machine, length=length, release=release)
    from hf_mps.tools.dryrun.memory.fit import report

    render.show(report(result), render.form(json=json))


@deferred
def parity(
    target: Target,
    overrides: Overrides = None,
    task: Task = None,
    steps: int = Option(3, min=1, help="Optimizer steps on each device."),
    rows: int | None = Option(None, min=1, help="Rows of a batch. Default: the recipe's."),
    json: Json = False,
) -> None:
    """Train the same steps on the CPU and on Metal, and tell whether they agree, or which module disagrees first.

    Exit code 0 where they agree within the tolerance of the precision and the difference of two runs on the device, 1
    where they do not.

    Example: `hf-mps parity quickstart`
    """
    from hf_mps.tools.dryrun import metal_device, render
    from hf_mps.tools.dryrun.resolve import resolve_target

    with status.shown("training the same steps on the CPU and on the device …"):
        resolved = resolve_target(target, overrides or [], task)
        metal_device()  # before anything else imports torch
        from hf_mps.tools.dryrun.parity import parity
        from hf_mps.tools.dryrun.parity.compare import report

        result, facts = parity(resolved, steps, rows)
    render.show(report(target, result, facts), render.form(json=json))
