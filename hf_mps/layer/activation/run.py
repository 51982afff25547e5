"""hf-mps run SCRIPT …: a script as plain Python runs it, with the layer on and its command line understood.

    hf-mps run script.py --flag value            python -m hf_mps run script.py --flag value
    hf-mps run -m package.module --flag value    hf-mps run torchrun … / accelerate launch … script.py --flag value

For environments where PyTorch's autoload is off (TORCH_DEVICE_BACKEND_AUTOLOAD=0) and for launchers; elsewhere a plain
`python script.py` does the same, but for one thing: here the layer is on before the script's first line, so that a name
which left a library that is imported before torch (`from datasets import load_metric`) is found as well.
"""

from __future__ import annotations

import builtins
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from hf_mps.core.errors import UserError, run_command
from hf_mps.layer.activation.launch import USAGE, Target, resolve


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

    from hf_mps.layer.activation import autoload
    from hf_mps.layer.activation.activate import is_on

    if not is_on():
        autoload.switch_on()
    target = resolve(words)
    if not target.module and not Path(target.name).exists():
        raise UserError(f"no file {target.name} in {Path.cwd()}; {USAGE}")
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
    _become(main)
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


# The module that was __main__ before: its functions are still running.
_former: list[ModuleType] = []


def _become(main: ModuleType) -> None:
    _former.append(sys.modules["__main__"])
    sys.modules["__main__"] = main


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
