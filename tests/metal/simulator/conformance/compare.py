"""One call on the CPU and on the device, and in what they differ.

A call has one of these outcomes. "same": bit for bit; "close": within the tolerances of torch.testing; "both raise";
"refused": the device has no such dtype (float64, complex128), or its kernel takes no such call, in Metal's words;
"missing": Metal's error for an operator without a kernel, and the table says so too; "random": it draws random numbers,
and the device's generator is another than the CPU's, so only shapes and dtypes are compared; "compressed": it needs one
of the compressed sparse layouts, which Metal does not have. Everything else is a difference, with a sentence.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_mps.metal.operators.table import table
from scripts.conformance.opinfo import seed

MISSING = re.compile(
    r"The operator '(aten::[\w.]+)' is not currently implemented for the MPS device\. "
    r"If you want this op to be considered for addition please comment on "
    r"https://github\.com/pytorch/pytorch/issues/141287"
)
NO_SUCH_DTYPE = re.compile(
    r"MPS framework doesn't support float64|Trying to convert \w+ to the MPS backend but it does not have support"
)
# test_refused_calls.py, test_linear_and_lstm.py and test_calibration.py hold when these come.
NO_SUCH_CALL = re.compile(
    r"^Adaptive pool MPS: |^ConvTranspose 3D with |^Convolution is supported only for Floating"
    r"|^MPS device does not support (linear|addr) for non-float "
)
NO_COMPRESSED = re.compile(r"Could not run 'new_compressed_tensor' from the 'mps:0' device")
# Metal's own kernels sum in another order and compute some functions otherwise: tests/metal/kernels has more room.
TIMES = 1.0
AGREED = ("same", "close", "both raise", "refused", "random")


@dataclass(frozen=True)
class Outcome:
    """How one call went; `detail` is the difference, or the missing operator's name."""

    kind: str
    detail: str = ""
    strides_differ: bool = False

    @property
    def agrees(self) -> bool:
        return self.kind in AGREED


@dataclass
class Ran:
    """What a call gave: its tensors in order, or the exception."""

    tensors: list[Any]
    error: Exception | None = None


class Draws(TorchDispatchMode):
    """Notes whether anything that is called in it draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.random = False

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.random = self.random or torch.Tag.nondeterministic_seeded in operator.tags
        return operator(*args, **(kwargs or {}))


def run(call: Callable[[], Any]) -> Ran:
    """Call it with fixed random numbers; warnings are of no interest here."""
    seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return Ran([_plain(leaf) for leaf in tree_leaves(call())])
        except Exception as error:
            return Ran([], error)


def outcome(on_cpu: Callable[[], Any], on_device: Callable[[], Any], *, values: bool = True) -> Outcome:
    """Run both calls and compare. `values=False` compares shapes and dtypes alone (memory that nobody wrote)."""
    device = run(on_device)
    if device.error is not None:
        return _raised(device.error, run(on_cpu))
    cpu = run(on_cpu)
    if cpu.error is not None:
        return Outcome("differs", f"only the CPU raises {_short(cpu.error)}")
    found = difference(cpu.tensors, device.tensors, values=values)
    if found.kind == "differs" and _draws(on_cpu):
        found = difference(cpu.tensors, device.tensors, values=False)
        return Outcome("random", strides_differ=found.strides_differ) if found.agrees else found
    return found


def _draws(call: Callable[[], Any]) -> bool:
    with Draws() as noted:
        run(call)
    return noted.random


def _raised(error: Exception, cpu: Ran) -> Outcome:
    missing = MISSING.match(str(error))
    if missing:
        name = missing[1]
        if not isinstance(error, NotImplementedError) or table().kind(name) != "missing":
            return Outcome("differs", f"{name} is reported as missing, and the table says {table().kind(name)}")
        return Outcome("missing", name)
    if NO_SUCH_DTYPE.search(str(error)):
        return Outcome("refused") if isinstance(error, TypeError) else Outcome("differs", _short(error))
    if cpu.error is None and NO_SUCH_CALL.search(str(error)):
        return Outcome("refused")
    if cpu.error is None and NO_COMPRESSED.search(str(error)):
        return Outcome("compressed", _short(error))
    if cpu.error is not None:
        return Outcome("both raise", f"{_short(cpu.error)} | {_short(error)}")
    return Outcome("differs", f"only the device raises {_short(error)}")


def difference(cpu: list[Any], device: list[Any], *, values: bool = True) -> Outcome:
    """How the results of two calls differ: number, dtype, shape, then values. Strides are noted and do not count."""
    if len(cpu) != len(device):
        return Outcome("differs", f"{len(cpu)} results on the CPU, {len(device)} on the device")
    exact, strides = True, False
    for index, (a, b) in enumerate(zip(cpu, device, strict=True)):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or (values and not _same_plain(a, b)):
                return Outcome("differs", f"result {index}: {a!r} on the CPU, {b!r} on the device")
            continue
        if a.dtype != b.dtype or a.shape != b.shape:
            return Outcome("differs", f"result {index}: {_form(a)} on the CPU, {_form(b)} on the device")
        if a.layout == torch.strided and a.stride() != b.stride() and a.numel() > 1:
            strides = True
        if values:
            b = b.to("cpu")
            if not _identical(a, b):
                exact = False
                try:
                    _assert_close(a, b)
                except AssertionError as error:
                    return Outcome("differs", f"result {index}: {_line(str(error))}", strides)
    return Outcome("same" if exact else "close", strides_differ=strides)


def _assert_close(a: torch.Tensor, b: torch.Tensor) -> None:
    """torch.testing's tolerances, and beside them two units in the last place of the largest element.

    A sum whose terms cancel is only as exact as its largest term: the order of a convolution's terms may differ.
    """
    atol = rtol = None
    finite = a[torch.isfinite(a)] if a.dtype.is_floating_point and a.layout == torch.strided else a.new_empty(0)
    if finite.numel():
        rtol, atol = torch.testing._comparison.default_tolerances(a, b)
        rtol, atol = TIMES * rtol, TIMES * max(atol, 2 * torch.finfo(a.dtype).eps * finite.abs().max().item())
    torch.testing.assert_close(b, a, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)


def _plain(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _same_plain(a: Any, b: Any) -> bool:
    if isinstance(a, torch.device):
        return True  # that it is another device is the point
    return bool(a == b) or (a != a and b != b)


def _identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != torch.strided or a.is_quantized:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if a.dtype.is_floating_point:
        nowhere = torch.isnan(a)
        if not torch.equal(nowhere, torch.isnan(b)):
            return False
        a, b = a.masked_fill(nowhere, 0), b.masked_fill(nowhere, 0)
    return torch.equal(a, b)


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {_line(str(error))}"


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
