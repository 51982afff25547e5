"""Compiles the simulated Metal device with the system's C++ compiler, once for each torch, and loads it.

Nothing here is about Metal: sources go in (`native/*.cpp`), a loaded extension module named `_metal` comes out.
The cached build is found by torch's version, Python's ABI and a hash of sources, flags and torch's own settings. No
path is part of that name, nor of the build: every environment with the same torch takes the same one.
Nor is the compiler, so an image that was built with one and shipped without still works.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from hf_mps.core import cache
from hf_mps.core.errors import UserError
from hf_mps.core.text import first_line

NAME = "_metal"
MODULE = f"hf_mps.metal.simulator.{NAME}"
NATIVE = Path(__file__).parent / "native"
LIBRARIES = ("torch_python", "torch", "torch_cpu", "c10")
# The headers that PyTorch's own build writes: the rest of them is settled by the commit, these by how it was built.
CONFIGURED = ("ATen/Config.h", "torch/headeronly/macros/cmake_macros.h", "c10/macros/cmake_macros.h")
# A compilation with torch's full headers needs about a gigabyte: more jobs than this helps nobody and may hurt.
MOST_JOBS = 4

_running: ModuleType | None = None


def extension() -> ModuleType:
    """Return the compiled device, loaded; compiled first where the cache holds no build for the installed torch.

    Needs torch imported. Prints progress on stderr only while it compiles (about a minute on two cores). Raises
    UserError, in one line, without a compiler or Python's headers, or where compilation fails (it names the log).
    """
    if MODULE in sys.modules:
        return sys.modules[MODULE]
    name = build_name()
    built = cache.find(f"{name}/{NAME}.so")
    return _load(built if built is not None else _build(name))


def start_as(metal: ModuleType) -> None:
    """Let `metal`, loaded and started, be the device that this process simulates."""
    global _running
    _running = metal


def running(what: str) -> ModuleType:
    """The device that this process simulates. Raises UserError, which begins with `what`, where there is none."""
    if _running is None:
        raise UserError(f"{what}: HF_MPS_SIMULATE=1")
    return _running


def build_name() -> str:
    """Return the folder name of the build that fits this torch, this Python and the present sources."""
    import torch

    digest = hashlib.blake2b(digest_size=8)
    for source in sorted([*NATIVE.glob("*.cpp"), *NATIVE.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for header in CONFIGURED:
        path = _torch_folder() / "include" / header
        digest.update(header.encode() + b"\0" + (path.read_bytes() if path.is_file() else b"") + b"\0")
    libc = os.confstr("CS_GNU_LIBC_VERSION") if sys.platform == "linux" else sys.platform
    for fact in (*_compile_flags(), *_link_flags(), str(torch.version.git_version), str(libc)):
        digest.update(fact.encode() + b"\0")
    return f"{torch.__version__}-{sysconfig.get_config_var('SOABI') or sys.platform}-{digest.hexdigest()}"


def _load(built: Path) -> ModuleType:
    spec = spec_from_file_location(MODULE, built, loader=ExtensionFileLoader(MODULE, str(built)))
    assert spec is not None
    assert spec.loader is not None
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise UserError(
            f"the compiled simulated Metal device does not load ({first_line(error)}); "
            f"remove the folder {built.parent} and it is compiled anew"
        ) from error
    sys.modules[MODULE] = module
    return module


def _build(name: str) -> Path:
    """Compile into the cache, or wait for the process that does so already; return the library's path."""
    compiler, header = _compiler(), Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        raise UserError(
            "the simulated Metal device is compiled on first use and Python's headers are missing "
            f"({header}): apt-get install python3-dev"
        )
    try:
        folder, why_not_usual = cache.writable(name)
    except OSError as error:
        raise UserError(f"no folder can be written to compile the simulated Metal device in ({error})") from error
    built = folder / f"{NAME}.so"
    if why_not_usual:
        _say(f"{why_not_usual}: the compiled device goes to {folder}")
    words = "waiting for another process that compiles the simulated Metal device …"
    with cache.alone(folder / ".lock", lambda: _say(words)):
        if cache.find(f"{name}/{NAME}.so") != built:  # not there, or another user may have put it there
            _compile_with_progress(compiler, built)
    return built


def _compile_with_progress(compiler: Sequence[str], built: Path) -> None:
    import torch

    _say(f"compiling the simulated Metal device for torch {torch.__version__} (once, about a minute) …")
    start = time.monotonic()
    with cache.working(built.parent) as work:
        _compile(compiler, work, log=built.parent / "compile.log").replace(built)
    _say(f"… done in {time.monotonic() - start:.0f} s")


def _compile(compiler: Sequence[str], work: Path, log: Path) -> Path:
    """Compile the sources in as many parts as there are cores, and link them.

    A part is one compilation: most of a source's seconds are the headers', which all need (26 sources alone 231 s of a
    core, together 49 s). So names are unique across the sources, those of unnamed namespaces too.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = min(cores, MOST_JOBS)
    sources = sorted(NATIVE.glob("*.cpp"), key=lambda source: source.stat().st_size)
    commands, objects = [], [work / f"part{number}.o" for number in range(parts)]
    for number, target in enumerate(objects):
        part = target.with_suffix(".cpp")
        # In order of names: what compiles as one part compiles as parts of it.
        part.write_text("".join(f'#include "{source}"\n' for source in sorted(sources[number::parts])))
        commands.append([*compiler, *_compile_flags(), *_header_folders(), "-c", str(part), "-o", str(target)])
    log.unlink(missing_ok=True)
    with ThreadPoolExecutor(parts) as pool:
        results = list(pool.map(_call, commands))
    _refuse_failures(results, log)
    library = work / f"{NAME}.so"
    linked = [*map(str, objects), "-o", str(library), f"-L{_torch_folder() / 'lib'}", *_link_flags()]
    _refuse_failures([_call([*compiler, *linked])], log)
    return library


def _call(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # The C locale keeps the word "error:" in the compiler's output, whatever the user's language.
    environment, pipe = {**os.environ, "LC_ALL": "C"}, subprocess.PIPE
    return subprocess.run(
        command, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment, check=False
    )


def _refuse_failures(results: Sequence[subprocess.CompletedProcess[str]], log: Path) -> None:
    """Raise UserError with the first error line of the first failed command, its whole output kept in `log`."""
    failed = [result for result in results if result.returncode != 0]
    if not failed:
        return
    log.write_text("".join(f"$ {shlex.join(result.args)}\n{result.stdout}\n" for result in failed), encoding="utf-8")
    lines = failed[0].stdout.splitlines() or [f"the compiler ended with code {failed[0].returncode}"]
    marks = ("error:", "undefined reference", "Undefined symbols")
    line = next((line for line in lines if any(mark in line for mark in marks)), lines[-1])
    raise UserError(f"the simulated Metal device does not compile: {line.strip()} (the full log: {log})")


def _compile_flags() -> list[str]:
    """What decides on the code that comes out, without a path: two environments with one torch share one build."""
    import torch

    # torch builds extensions as C++20 (torch/utils/cpp_extension.py).
    flags = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-w", f"-DTORCH_EXTENSION_NAME={NAME}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [*flags, abi, "-DTORCH_API_INCLUDE_EXTENSION_H"]


def _header_folders() -> list[str]:
    """Return the options for headers: where they are, and names for them in errors without an environment's folder."""
    include, python = _torch_folder() / "include", Path(sysconfig.get_paths()["include"])
    shown = {include: "torch/include", python: "python/include", NATIVE: "hf_mps/metal/simulator/native"}
    folders = (include, include / "torch" / "csrc" / "api" / "include", python)
    return [
        *(f"-ffile-prefix-map={folder}={name}" for folder, name in shown.items()),
        *(f"-isystem{folder}" for folder in folders),
    ]


def _link_flags() -> list[str]:
    """torch's libraries by name alone: they are in the process already, and the loader finds them there."""
    kind = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    return [*kind, *(f"-l{library}" for library in LIBRARIES)]


def _torch_folder() -> Path:
    import torch

    return Path(torch.__file__).parent


def _compiler() -> list[str]:
    """Return the command of the C++ compiler: $CXX, which may carry arguments as make allows, or c++."""
    chosen = os.environ.get("CXX", "").strip()
    command = shlex.split(chosen) if chosen else ["c++"]
    if shutil.which(command[0]) is None:
        install = "xcode-select --install" if sys.platform == "darwin" else "apt-get install g++"
        named = f"CXX={chosen} is not found" if chosen else "there is no C++ compiler"
        raise UserError(f"the simulated Metal device is compiled on first use and {named}: {install}, or set CXX")
    return command


def _say(message: str) -> None:
    print(f"hf-mps: {message}", file=sys.stderr, flush=True)
