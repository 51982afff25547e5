"""A compiled Metal library and its kernels, as `torch.mps.compile_shader` and `load_metallib` return them.

Arguments, defaults and errors are those of PyTorch's host (torch/csrc/mps/Module.cpp and, in ATen/native/mps,
OperationUtils.mm). Where a Mac would read memory that was never bound, a line says so.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from hf_mps.core import cache, settings
from hf_mps.core.errors import RunError
from hf_mps.metal.kernels import constants, metallib, signature
from hf_mps.metal.kernels.intrinsics.integers import SIMDGROUP
from hf_mps.metal.kernels.release import Objects, compiler_key
from hf_mps.metal.kernels.runtime import Kernel
from hf_mps.metal.kernels.signature import THREADGROUP, Binding, Signature
from hf_mps.metal.kernels.values import NoRule, Pointers, scalar
from hf_mps.metal.operators.calls import ON_METAL
from hf_mps.metal.operators.launch_class import COMPILED, Call
from hf_mps.metal.source import clang, rewrite
from hf_mps.metal.source.module import Module, read

_CASTS = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
_CASTS |= {name: name for name in ("int32", "int16", "int8", "uint8")}
"""What `arg_casts` may say, and torch's name of that dtype."""
_REPORT = struct.Struct("<128s128s250s2xI")
_REPORTS_BYTES = 4 + 30 * _REPORT.size
"""A count and 30 messages, which c10/metal/error.h has for kernels that report what is wrong."""


class Library:
    """Metal source or a metallib, compiled; each kernel is an attribute of its name.

    `device` is the simulated device's extension: it brings in what is queued before a launch, and counts it.
    """

    def __init__(self, module: Module | Precompiled, device: Any = None) -> None:
        self._module, self._device = module, device
        self._kernels: dict[str, MetalKernel] = {}

    @classmethod
    def compiled(cls, source: str, device: Any = None) -> Library:
        """Return a source's library.

        Raises:
            SyntaxError: the source does not compile; a line for each error, `program_source:LINE:COLUMN: error: …`.
            UserError: there is no clang, or no llvmlite; with the command that installs it.
        """
        metallib.require()
        try:
            return cls(_module(source), device)
        except rewrite.Rejected as rejected:
            raise SyntaxError(f"Failed to compile Metal source\n{rejected}") from None
        except ValueError as unfit:
            raise SyntaxError(f"Failed to compile Metal source\n{rewrite.NAME}: error: {unfit}") from None

    @classmethod
    def loaded(cls, content: bytes | Path, device: Any = None) -> Library:
        """Return a metallib, from its bytes or its file. Raises RuntimeError for what is none."""
        metallib.require()
        try:
            found = metallib.Library.open(content) if isinstance(content, Path) else metallib.Library(content)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"Failed to load Metal library: {error}") from None
        return cls(Precompiled(found), device)

    def with_constants(self, **values: bool | int | float) -> Library:
        """Return the library with function constants stated, by name; ours: torch.mps has no way to state them.

        Raises UserError, when a kernel is asked for, where one of its constants has no value or a wrong one.
        """
        if not isinstance(self._module, Precompiled):
            raise RuntimeError("with_constants is of a library that torch.mps.load_metallib returned")
        return Library(replace(self._module, constants={**self._module.constants, **values}), self._device)

    def __getattr__(self, name: str) -> MetalKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._module.described:
            # PyTorch's own words, and its class of error: hasattr() raises it too.
            raise RuntimeError(f"Failed to create function state object for: {name}")
        if name not in self._kernels:
            self._kernels[name] = MetalKernel(_kernel(self._module, name), name, self._device)
        return self._kernels[name]

    def __dir__(self) -> list[str]:
        return sorted(self._module.described)


class MetalKernel:
    """A kernel to call: `kernel(*arguments, threads=…, group_size=…, arg_casts=…)`."""

    thread_execution_width: ClassVar[int] = SIMDGROUP
    """Threads of a simdgroup."""

    def __init__(self, kernel: Kernel, name: str, device: Any = None) -> None:
        self._kernel, self._name, self._device = kernel, name, device
        self._bindings = [each for each in kernel.signature.bindings if each.space != THREADGROUP]
        self._host_sized = [each.name for each in kernel.signature.bindings if each.space == THREADGROUP]

    @property
    def max_threads_per_threadgroup(self) -> int:
        """The largest threadgroup: 1,024, or what the source states."""
        return self._kernel.signature.largest_group

    @property
    def static_thread_group_memory_length(self) -> int:
        """Bytes of threadgroup memory that the kernel declares."""
        return self._kernel.threadgroup_bytes

    def __call__(
        self,
        *args: Any,
        threads: int | Sequence[int] | None = None,
        group_size: int | Sequence[int] | None = None,
        arg_casts: str | dict[int, str] | None = None,
        error_buf_idx: int | None = None,
    ) -> None:
        """Run the kernel over a grid of `threads`, in groups of `group_size`.

        The argument i is bound at buffer(i): a tensor, a number or a list of numbers (int64 or float unless `arg_casts`
        says fp16, bf16, int32, int16, int8 or uint8), or a list of tensors as an argument buffer. `threads` is the
        number of elements of the first tensor unless it is given; up to three dimensions.

        Raises:
            AcceleratorError: the kernel reported an error through the buffer at `error_buf_idx`.
            RuntimeError: an argument is missing or has the wrong size, or a grid or group that Metal does not launch.
            OutOfBounds: a thread touched memory that is not bound (HF_MPS_SHADERS=unchecked does not look).
        """
        from hf_mps.metal.operators.calls import operands, tensors_of, text_of

        if self._host_sized:
            raise RuntimeError(
                f"{self._name}: torch.mps.compile_shader cannot state the size of {self._host_sized[0]!r}, threadgroup "
                "memory that is a parameter; declare it in the kernel, with its size"
            )
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        grid = _three(threads) if threads is not None else (tensors[0].numel(),) if tensors else ()
        if not 0 < len(grid) < 4:
            raise RuntimeError("Number of threads is undefined or has wrong dimension")
        group = self._group(grid, group_size)
        if error_buf_idx is not None:
            reports = torch.zeros(_REPORTS_BYTES, dtype=torch.uint8, device="mps")
            args = (*args[:error_buf_idx], reports, *args[error_buf_idx + 1 :])
        bound = {each.name: self._value(each, args, arg_casts) for each in self._bindings}
        device = self._device
        if device is not None:
            device.begin_launch(tensors_of(args))
        try:
            self._kernel.launch(bound, threads=grid, group=group)
        except NoRule as reason:
            raise RuntimeError(f"{self._name}: {reason}") from None
        if device is not None:
            operator, recording = f"{COMPILED}{self._name}", device.recording()
            device.launched(operator, text_of(Call(operator, tuple(operands(tensors)))) if recording else "")
        if error_buf_idx is not None:
            _raise_reported(reports)

    def _group(self, grid: tuple[int, ...], given: int | Sequence[int] | None) -> tuple[int, ...]:
        most = self.max_threads_per_threadgroup
        if given is None:
            return (min(most, grid[0]), *[1] * (len(grid) - 1))
        group = _three(given)
        if len(group) != len(grid):
            raise RuntimeError(f"threads has {len(grid)} dimensions and group_size {len(group)}")
        count = math.prod(group)
        if not 0 < count <= most:
            raise RuntimeError(f"{self._name}: a threadgroup of {count:,} threads; Metal launches 1 to {most:,}")
        return group

    def _value(self, binding: Binding, args: tuple[Any, ...], casts: str | dict[int, str] | None) -> Any:
        place = binding.location
        if not binding.present:
            return None
        if place >= len(args):
            raise RuntimeError(f"{self._name}: nothing is bound at buffer({place}), which is {binding.name!r}; "
                               f"{len(args)} arguments were given")  # fmt: skip
        cast = casts.get(place, "") if isinstance(casts, dict) else casts or ""
        value = _bound(args[place], cast)
        if isinstance(value, bytes) and binding.whole is not None:
            if len(value) < binding.whole:
                raise RuntimeError(f"{self._name}: {binding.name!r} at buffer({place}) takes {binding.whole} bytes "
                                   f"({binding.type}), and the argument has {len(value)}")  # fmt: skip
            value = value[: binding.whole]  # Metal binds what it is given, and the kernel reads its beginning.
        return value


def _bound(given: Any, cast: str) -> Any:
    """An argument as what the runtime binds: a tensor, bytes, or the addresses of tensors."""
    if isinstance(given, torch.Tensor):
        if given.device.type == "mps":
            return given
        if given.device.type == "cpu" and given.dim() == 0:
            # PyTorch makes float of double, which Metal does not have (mtl_setBuffer in OperationUtils.h).
            number = given.to(ON_METAL.get(given.dtype, given.dtype)).reshape(1)
            return bytes(number.view(torch.uint8).numpy())
        raise RuntimeError("Passed CPU tensor to MPS op")
    if isinstance(given, list | tuple):
        if not given:
            raise RuntimeError("Empty list/tuple can not be an argument to metal kernel")
        if isinstance(given[0], torch.Tensor):
            return Pointers([_bound(each, cast) for each in given], 8 * len(given))
        return b"".join(_number(each, cast) for each in given)
    return _number(given, cast)


def _number(given: Any, cast: str) -> bytes:
    if not isinstance(given, int | float):
        raise RuntimeError(f"Unsupported argument type: {type(given).__name__}")
    if cast and cast not in _CASTS:
        raise RuntimeError(f"Unsupported cast instruction {cast}; allowed: {', '.join(_CASTS)}")
    return scalar(given, getattr(torch, _CASTS[cast] if cast else "float32" if isinstance(given, float) else "int64"))


def _three(given: int | Sequence[int]) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(given)


def _raise_reported(reports: Any) -> None:
    """Raise the first message that a kernel wrote. A Mac raises it at the next synchronisation."""
    data = reports.cpu().numpy().tobytes()
    if struct.unpack_from("<I", data)[0]:
        file, function, message, line = _REPORT.unpack_from(data, 4)
        file, function, message = (part.split(b"\0")[0].decode(errors="replace") for part in (file, function, message))
        raise torch.AcceleratorError(f"{message} ({file}:{line}, {function})")


@functools.cache
def _module(source: str) -> Module:
    """The module of a source; a source is compiled once a process."""
    return read(rewrite.compiled(source))


@dataclass(frozen=True)
class Precompiled:
    """A metallib as a Module is: its kernels' assembly, one asked for at a time, with function constants stated."""

    described: metallib.Library
    constants: Mapping[str, bool | int | float] = field(default_factory=dict)

    def signature(self, kernel: str) -> Signature:
        """Return what a kernel binds."""
        return signature.read(self.only(kernel), kernel)

    def only(self, kernel: str) -> str:
        """Return a kernel's assembly. Raises UserError for a function constant without a value."""
        return constants.stated(str(metallib.parse(self.described, kernel)), kernel, self.constants)


def _kernel(module: Module | Precompiled, name: str) -> Kernel:
    """A kernel of a module, compiled for this CPU or read from the user's cache, where it is kept."""
    import llvmlite.binding as llvm

    text, checked = module.only(name), settings.shaders_checked()
    file, source = (rewrite.NAME, clang.fingerprint()) if isinstance(module, Module) else ("the metallib", "metallib")
    # Where there is no home folder, nothing is kept.
    folder = cache.home("shaders") or Path(os.devnull)
    objects = Objects(folder / (compiler_key(source) + ("-checked" if checked else "")))
    kept_as = hashlib.sha256(f"{name}\n{text}".encode()).hexdigest()[:32]

    def described() -> tuple[Signature, bytes]:
        return module.signature(name), llvm.parse_assembly(text).as_bitcode()

    try:
        return objects.kernel(kept_as, described, file, checked=checked)
    except (RunError, NoRule) as unknown:
        raise RuntimeError(f"Failed to create function state object for: {name}: {unknown}") from None
