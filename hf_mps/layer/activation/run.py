"""hf-mps run SCRIPT …: a script as plain Python runs it, with the layer on and its command line understood.

    hf-mps run script.py --flag value            python -m hf_mps run script.py --flag value
    hf-mps run -m package.module --flag value    hf-mps run torchrun … / accelerate launch … script.py --flag value

For environments where PyTorch's autoload is off (TORCH_DEVICE_BACKEND_AUTOLOAD=0) and for launchers; elsewhere a plain
`python script.py` does the same, but for one thing: here the layer is on before the script's first line, so that a name
which left a library that is imported before torch (`from datasets import load_metric`) is found as well.

On Metal there is one device, so one process: this one. There a launcher's script runs without the launcher, with the
settings that accelerate launch passes in the environment, and several processes are refused. For one process on each of
several hosts, and on other devices, the launcher itself takes over, and autoload switches its processes.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from hf_mps.core.errors import UserError, run_command
from hf_mps.core.notices import print_notice
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
    """Return what the command line `argv` asks to run; of a launcher, of which accelerate's sets variables, its script.

    On other devices than Metal, or for several hosts, the launcher takes this process over. Raises UserError where that
    is nothing that runs, for several processes on one Metal device and for what the launcher itself refuses.
    """
    words = list(argv)
    if words[:1] and Path(words[0]).name in ("python", "python3"):
        words.pop(0)
    name, arguments = launcher(words)
    if name:
        from hf_mps.metal.device.choice import choose

        device = choose()
        if device.value != "mps" or (name == "accelerate" and "--cpu" in arguments):
            why = "--cpu" if device.value == "mps" else str(device)
            _become_launcher(name, arguments, f"the device is not Metal: {why}")
        return _torchrun(arguments) if name == "torchrun" else _accelerate(arguments)
    if not words:
        raise UserError(f"run needs a script; {USAGE}")
    if words[0] == "-m":
        if len(words) < 2:
            raise UserError(f"-m needs the name of a module; {USAGE}")
        return Target(words[1], tuple(words[2:]), module=True)
    if words[0].startswith("-"):
        raise UserError(f"run has no option {words[0]}; a script's own options stand behind its name; {USAGE}")
    return Target(words[0], tuple(words[1:]))


def launcher(words: list[str]) -> tuple[str, list[str]]:
    """Return the launcher that a command line begins with, "torchrun", "accelerate" or "", and its own command line.

    It is known by its command, or with -m by its module. Raises UserError for another command of accelerate's.
    """
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
        _become_launcher("torchrun", arguments, f"there are {asked.nnodes} hosts with a Metal device each")
    # LOCAL_RANK and its kin stay unset: with them Accelerate opens a process group, which Trainer then warns about.
    return _found("torchrun", asked)


def _accelerate(arguments: list[str]) -> Target:
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    options = launch.launch_command_parser().parse_args(arguments)
    given = options.num_processes
    try:
        # It lays the config file below the options, as the command itself does before it starts anything.
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
    _become_launcher("accelerate", [*several, *arguments], f"there are {hosts} hosts with a Metal device each")


def _found(launcher: str, asked: Any) -> Target:
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


def _become_launcher(launcher: str, arguments: list[str], why: str) -> None:
    """Replace this process by the launcher itself, with the line that says so; does not return."""
    module = "torch.distributed.run" if launcher == "torchrun" else "accelerate.commands.launch"
    print_notice(f"{launcher} itself starts the script, as {why}")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the target of the command line `argv` in this process and return 0; what it raises, SystemExit too, passes.

    A command line that names no target is one line on stderr and exit code 2.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    targets: list[Target] = []

    code = run_command(lambda: targets.append(prepare(given)))
    return code or _execute(targets[0])


def prepare(words: Sequence[str]) -> Target:
    """Switch the layer on and return what the command line `words` asks to run. Imports torch.

    Raises UserError where it asks for nothing that runs, or for a value of a variable that nobody knows.
    """
    import torch  # noqa: F401  PyTorch's autoload, where it is on, switches the layer on from here

    from hf_mps.layer.activation import activate

    if not activate.is_on():
        activate.switch_on()
    target = resolve(words)
    if not target.module and not Path(target.name).exists():
        raise UserError(f"no file {target.name} in {Path.cwd()}; {USAGE}")
    if Path(target.name).is_dir() and not Path(target.name, "__main__.py").is_file():
        raise UserError(f"{target.name} is a folder without a __main__.py; allowed: a script; {USAGE}")
    return target


def start(target: Target) -> None:
    """Run a target as `__main__` of this process, its own words in sys.argv; what it raises passes."""
    _module(target) if target.module else _script(target)


def _execute(target: Target) -> int:
    try:
        start(target)
    except SystemExit:
        raise
    except BaseException as error:
        # Shown once and by the script's own hook, without the frames that brought us here. It then goes on, silently,
        # so that Python ends as it ends a script: exit code 1, and death by SIGINT after Ctrl-C.
        sys.excepthook(type(error), error.with_traceback(_own(error.__traceback__)), error.__traceback__)
        sys.excepthook = _shown
        raise
    return 0


def _script(target: Target) -> None:
    file = Path(target.name)
    sys.argv[:] = [target.name, *target.arguments]
    if file.is_dir() or file.suffix in (".zip", ".pyz", ".pyc"):
        runpy.run_path(target.name, run_name="__main__")
        return
    _first_path(str(file.resolve().parent))
    path = str(file.absolute())  # as Python has it in __file__ and in tracebacks
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __loader__=SourceFileLoader("__main__", path), __cached__=None)
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main.__dict__.update(__annotations__={})
    # The module that was __main__ before: its functions are still running.
    _former.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    exec(compile(file.read_bytes(), path, "exec", dont_inherit=True), main.__dict__)


def _module(target: Target) -> None:
    _first_path(str(Path.cwd()))
    sys.argv[:] = [target.name, *target.arguments]
    try:
        known = importlib.util.find_spec(target.name) is not None
    except ModuleNotFoundError:
        known = False
    if not known:
        print(f"hf-mps: no module named {target.name}", file=sys.stderr)
        raise SystemExit(2)
    runpy.run_module(target.name, run_name="__main__", alter_sys=True)


_former: list[ModuleType] = []


def _first_path(folder: str) -> None:
    """Put `folder` where Python puts a script's own; with -P or -I it puts nothing there."""
    if not getattr(sys.flags, "safe_path", bool(sys.flags.isolated)):
        sys.path[0] = folder


def _own(traceback: TracebackType | None) -> TracebackType | None:
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    return traceback


def _shown(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """The hook for an error that was shown already."""
