"""The clang that reads Metal source: found on the system or in the package ziglang, asked for errors as Metal's are."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from hf_mps.core.errors import UserError

OLDEST = 22
"""The release tried. 19 has neither `__bf16` on spir64 nor alias templates of vectors."""
INSTALL = 'pip install "hf_mps[metal-source]"'

# C++ for OpenCL gives Metal's address spaces, and spir64 spells them in the IR; what clang warns of is not the
# author's business, as his compiler is Apple's.
_MODE = ["-x", "clcpp", "-cl-std=clc++2021", "-target", "spir64", "-cl-no-stdinc"]
_MODE += ["-fdeclspec", "-Xclang", "-cl-ext=-cl_khr_fp64,-__opencl_c_fp64"]  # Metal has no double
_MODE += ["-Wno-everything", "-fno-strict-aliasing", "-ffp-contract=on", "-ferror-limit=100", "-fno-caret-diagnostics"]
_MODE += ["-fno-color-diagnostics", "-fdiagnostics-absolute-paths"]
_WORDS = {
    "kernel": '__attribute__((annotate("kernel")))', "device": "__global", "constant": "const __global",
    "threadgroup": "__local", "thread": "", "ray_data": "", "object_data": "", "read_write": "_metal_read_write",
    **{word: f"_metal_{word}" for word in ("atomic_int", "atomic_uint", "atomic_long", "atomic_ulong", "atomic_float")},
    # Words of OpenCL's that are plain names in Metal.
    "local": "_metal_local", "global": "_metal_global", "generic": "_metal_generic", "pipe": "_metal_pipe",
}  # fmt: skip
_DEFINED = {"__METAL_VERSION__": "320", "__METAL__": "1", "__METAL_MACOS__": "1", "__HAVE_BFLOAT__": "1"}
_ERROR = re.compile(
    r"^(?P<file>[^\n:]*):(?P<line>\d+):(?P<column>\d+): (?P<kind>(?:fatal )?error|note): (?P<text>.*)$", re.M
)


class Problem(NamedTuple):
    """An error or a note of clang's: the file's name in the text, line and column from 1, and what it says."""

    file: str
    line: int
    column: int
    kind: str
    text: str


@cache
def command() -> tuple[str, ...]:
    """Return the command of a clang of release OLDEST or later: the one in ziglang, or the system's.

    Raises:
        UserError: there is none; the line has the command that installs one.
    """
    names = ["clang", *(f"clang-{release}" for release in range(OLDEST, OLDEST + 8))]
    found: list[tuple[str, ...]] = [(path,) for name in names if (path := shutil.which(name))]
    package = find_spec("ziglang")
    if package is not None and package.origin is not None:
        found.insert(0, (str(Path(package.origin).parent / ("zig.exe" if sys.platform == "win32" else "zig")), "clang"))
    for each in found:
        if release(each) >= OLDEST:
            return each
    raise UserError(f"Metal source needs clang {OLDEST} or later, and there is none here; next: {INSTALL}")


def release(clang: tuple[str, ...]) -> int:
    """Return the major version of a clang; 0 where it does not run."""
    try:
        told = subprocess.run([*clang, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    number = re.search(r"clang version (\d+)", told)
    return int(number[1]) if number and "Apple" not in told else 0


def header() -> Path:
    """Return the file of Metal's standard library."""
    return Path(__file__).parent / "include" / "metal_stdlib"


@cache
def fingerprint() -> str:
    """Return what decides the compiled module beside its source: clang, its options, Metal's library, this room."""
    parts = [str(release(command())), *_MODE, repr(_WORDS), header().read_text(encoding="utf-8")]
    parts += [file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def preprocessed(text: str) -> tuple[str, list[Problem]]:
    """Expand macros, with lines that tell where each line is from; Metal's own words stay."""
    return _run(text, "-E", *_defines(_DEFINED))


def compiled(text: str) -> tuple[str, list[Problem]]:
    """Compile preprocessed text to LLVM assembly, unoptimised, with the debug information that describes parameters."""
    return _run(text, "-O1", "-Xclang", "-disable-llvm-passes", "-g", "-S", "-emit-llvm", "-o", "-", *_defines(_WORDS))


def _defines(words: dict[str, str]) -> list[str]:
    return [f"-D{word}={text}" for word, text in words.items()]


def _run(text: str, *options: str) -> tuple[str, list[Problem]]:
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        [*command(), *_MODE, *options, "-"], input=text, capture_output=True, encoding="utf-8", env=environment
    )  # fmt: skip
    found = [match.groups() for match in _ERROR.finditer(done.stderr)]
    problems = [Problem(Path(file).name, int(line), int(at), kind, what) for file, line, at, kind, what in found]
    if done.returncode and not problems:
        raise RuntimeError(f"clang ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout, problems
