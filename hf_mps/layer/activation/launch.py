"""What a command line asks to run: a script or module, alone or behind torchrun or accelerate launch.

On Metal there is one device, so one process: this one. There a launcher's script runs without the launcher, with the
settings that accelerate launch passes in the environment, and several processes are refused. For one process on each of
several hosts, and on other devices, the launcher itself takes over, and autoload switches its processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_mps.core.errors import UserError
from hf_mps.core.text import first_line

USAGE = "usage: hf-mps run [-m MODULE | SCRIPT | torchrun … | accelerate launch …] [ARGUMENT]..."
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_ACCELERATE = ("accelerate", "accelerate.commands.launch", "accelerate-launch")


@dataclass(frozen=True)
class Target:
    """What to run: a file, or with `module` an importable name, and its arguments."""

    name: str
    arguments: tuple[str, ...]
    module: bool = False


def resolve(argv: Sequence[str]) -> Target:
    """Return what the command line `argv` asks to run; on other devices than Metal a launcher takes this process over.

    Raises UserError as `plain` and `launched` do.
    """
    return launched(argv) if is_launcher(argv) else plain(argv)


def plain(argv: Sequence[str]) -> Target:
    """Return what a command line without a launcher asks to run. Raises UserError where that is nothing that runs."""
    words = list(argv)
    if words[:1] and Path(words[0]).name in ("python", "python3"):
        words.pop(0)
    if not words:
        raise UserError(f"run needs a script; {USAGE}")
    if words[0] == "-m":
        if len(words) < 2:
            raise UserError(f"-m needs the name of a module; {USAGE}")
        return Target(words[1], tuple(words[2:]), module=True)
    if words[0].startswith("-"):
        raise UserError(f"run has no option {words[0]}; a script's own options stand behind its name; {USAGE}")
    return Target(words[0], tuple(words[1:]))


def is_launcher(argv: Sequence[str]) -> bool:
    """Whether a command line begins with a launcher, by its command or with -m by its module."""
    return _launcher(list(argv))[0] != ""


def launched(argv: Sequence[str]) -> Target:
    """Return the script behind a launcher and set accelerate's variables; off Metal, or for hosts, become the launcher.

    Raises UserError for several processes on one Metal device and for what the launcher itself refuses.
    """
    from hf_mps.metal.device.choice import choose

    name, arguments = _launcher(list(argv))
    parse = _torchrun if name == "torchrun" else _accelerate
    device = choose()
    if device.value != "mps" or (name == "accelerate" and "--cpu" in arguments):
        why = "--cpu" if device.value == "mps" else str(device)
        _become(name, arguments, f"the device is not Metal: {why}")
    return parse(arguments)


def _launcher(words: list[str]) -> tuple[str, list[str]]:
    """The launcher, "torchrun", "accelerate" or "", and its own command line."""
    if words and Path(words[0]).name in ("python", "python3"):
        words = words[1:]
    if words[:1] == ["-m"]:
        words = words[1:]
        named = words[:1]
    else:
        named = [Path(word).name for word in words[:1] if not Path(word).is_file() or "bin" in Path(word).parts]
    if named and named[0] in _TORCHRUN:
        return "torchrun", words[1:]
    if named and named[0] in _ACCELERATE:
        if named[0] != "accelerate":
            return "accelerate", words[1:]
        if words[1:2] != ["launch"]:
            raise UserError(
                f"run knows `accelerate launch`, not `{' '.join(words[:2])}`; next: accelerate launch SCRIPT"
            )
        return "accelerate", words[2:]
    return "", words


def _torchrun(arguments: list[str]) -> Target:
    from torch.distributed.run import get_args_parser

    asked = get_args_parser().parse_args(arguments)
    words = str(asked.nproc_per_node)
    processes = int(words) if words.isdigit() else 1  # "gpu" and "auto" are one here
    nodes = str(asked.nnodes).rpartition(":")[2]
    _one_process("torchrun", f"--nproc_per_node={processes}", processes)
    if nodes.isdigit() and int(nodes) > 1:
        _become("torchrun", arguments, f"there are {asked.nnodes} hosts with a Metal device each")
    # LOCAL_RANK and its kin stay unset: with them Accelerate opens a process group, which Trainer then warns about.
    return _found("torchrun", asked)


def _accelerate(arguments: list[str]) -> Target:
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    options = launch.launch_command_parser().parse_args(arguments)
    given = options.num_processes
    try:
        options, *_ = launch._validate_launch_command(options)
        _on_hosts(options, arguments)
        words = f"--num_processes={given}" if given else f"num_processes: {options.num_processes}"
        _one_process("accelerate launch", words, options.num_processes or 1)
        _, environment = prepare_simple_launcher_cmd_env(options)
    except (ValueError, AssertionError) as error:
        raise UserError(f"accelerate launch: {first_line(error)}") from error
    environment.pop("OMP_NUM_THREADS", None)  # one thread by default: operators that run on the CPU want them all
    os.environ.update(environment)
    return _found("accelerate launch", options)


def _on_hosts(options: Any, arguments: list[str]) -> None:
    """Become accelerate launch where it starts one process on each of several hosts; UserError for more on one."""
    hosts, processes = options.num_machines or 1, options.num_processes or 1
    if hosts < 2:
        return
    if processes != hosts:
        raise UserError(
            f"accelerate launch: {processes} processes on {hosts} machines: there is one Metal device on each, and "
            f"every process would train the whole model on it; next: --num_processes {hosts}"
        )
    # Without it, or a file that says MULTI_GPU, accelerate starts one process that trains alone (launch_command).
    several = [] if options.multi_gpu or options.use_fsdp else ["--multi_gpu"]
    _become("accelerate", [*several, *arguments], f"there are {hosts} hosts with a Metal device each")


def _found(launcher: str, asked: Any) -> Target:
    from hf_mps.core.notices import print_notice

    if asked.no_python:
        raise UserError(f"{launcher} --no_python starts a program that is no Python script; run it without hf-mps run")
    print_notice(
        f"{launcher}: one process on the one Metal device, this one: {asked.training_script} runs without the launcher"
    )
    return Target(asked.training_script, tuple(asked.training_script_args), module=bool(asked.module))


def _one_process(launcher: str, words: str, processes: int) -> None:
    if processes > 1:
        raise UserError(
            f"{launcher} {words}: there is one Metal device, and every process would train the whole model on it; "
            f"next: 1 process, and --gradient_accumulation_steps {processes} behind the script for the same batch"
        )


def _become(launcher: str, arguments: list[str], why: str) -> None:
    """Replace this process by the launcher itself, with the line that says so; does not return."""
    from hf_mps.core.notices import print_notice

    module = "torch.distributed.run" if launcher == "torchrun" else "accelerate.commands.launch"
    print_notice(f"{launcher} itself starts the script, as {why}")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
