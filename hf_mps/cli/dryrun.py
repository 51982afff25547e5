"""`hf-mps audit`, `plan` and `parity`: one step of a recipe, a model or a script."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hf_mps.cli.options import Debug, Json, Overrides, Target, Task, Torch, deferred
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
    torch_table: Annotated[Path | None, Option(help="The native_functions.yaml of another PyTorch release.")] = None,
    every: Annotated[bool, Option("--all", help="List every operator, not only those with a finding.")] = False,
    json: Json = False,
    github: Annotated[bool, Option("--github", help="Print GitHub annotations.")] = False,
    badge: Annotated[bool, Option("--badge", help="Print a badge line for a README.")] = False,
    debug: Debug = False,
) -> None:
    """Find the operators of a training step that have no Metal kernel; it needs neither a Mac nor the model's weights.

    It covers forward pass, loss, backward pass, clipping and optimizer, and tells for each call whether it launches a
    Metal kernel or an MPSGraph, which is compiled for each shape. Exit code 0 where all run on Metal, 1 where some run
    on the CPU or are refused.

    Example: `hf-mps audit glue/mrpc`
    """
    from hf_mps.tools.dryrun import render
    from hf_mps.tools.dryrun.audit import audit as audit_target
    from hf_mps.tools.dryrun.audit import audit_script, is_command
    from hf_mps.tools.dryrun.resolve import resolve_target

    form = render.form(json=json, github=github, badge=badge)
    if is_command(words):
        if task is not None:
            raise UserError("--task is for a model, not for a script; leave it out")
        result = audit_script(words, torch_table, release)
    else:
        with status.shown("tracing a training step …"):
            result = audit_target(resolve_target(words[0], words[1:], task), torch_table, release)
    from hf_mps.tools.dryrun.audit.record import report

    render.show(report(result, every=every), form)


@deferred
def plan(
    target: Target,
    overrides: Overrides = None,
    memory: Annotated[
        str | None, Option(metavar="MAC", help="Another Mac: 16gb, or m2-pro-16gb. Default: this one.")
    ] = None,
    task: Task = None,
    length: Annotated[int | None, Option(min=1, help="Tokens of a row. Default: the recipe's longest.")] = None,
    ranks: Annotated[int | None, Option(min=2, help="Under FSDP: what each of N processes holds.")] = None,
    release: Torch = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Tell whether a training fits into a Mac's memory, and what would make it fit.

    It traces one step, and also counts what that launches: Metal kernels, and MPSGraphs, which are compiled for each
    shape. Exit code 0 where it fits, 1 where macOS would swap or PyTorch would refuse.

    Example: `hf-mps plan sft/qlora --memory 16gb`
    """
    from hf_mps.tools.dryrun import render
    from hf_mps.tools.dryrun.memory import plan as plan_memory
    from hf_mps.tools.dryrun.memory.machine import named
    from hf_mps.tools.dryrun.resolve import resolve_target

    machine = named(memory) if memory is not None else None
    if ranks is not None and release is not None:
        raise UserError("--torch, which is for a Mac, cannot be combined with --ranks; give one of them")
    with status.shown("tracing a training step …"):
        if ranks is not None:
            from hf_mps.tools.dryrun.memory import sharded

            result = sharded.plan(resolve_target(target, overrides or [], task), ranks, machine, length=length)
        else:
            result = plan_memory(resolve_target(target, overrides or [], task), machine, length=length, release=release)
    from hf_mps.tools.dryrun.memory.fit import report

    render.show(report(result), render.form(json=json))


@deferred
def parity(
    target: Target,
    overrides: Overrides = None,
    task: Task = None,
    steps: Annotated[int, Option(min=1, help="Optimizer steps on each device.")] = 3,
    rows: Annotated[int | None, Option(min=1, help="Rows of a batch. Default: the recipe's.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train the same steps on the CPU and on Metal, and tell whether they agree, or which module disagrees first.

    Exit code 0 where they agree within the tolerance of the precision and the difference of two runs on the device, 1
    where they do not.

    Example: `hf-mps parity quickstart`
    """
    from hf_mps.tools.dryrun import render
    from hf_mps.tools.dryrun.parity import parity as compare
    from hf_mps.tools.dryrun.resolve import resolve_target

    with status.shown("training the same steps on the CPU and on the device …"):
        result, facts = compare(resolve_target(target, overrides or [], task), steps, rows)
    from hf_mps.tools.dryrun.parity.compare import report

    render.show(report(target, result, facts), render.form(json=json))
