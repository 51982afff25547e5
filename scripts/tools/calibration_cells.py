"""The cells of `calibrate.py`: what PyTorch's lists expect of an operator in a dtype, and what happens on the device.

One cell is one run of test_mps.py's `TestConsistency.test_output_match`: every sample, on the device and on the CPU,
compared within that test's tolerances. Source: test/test_mps.py of pytorch at v2.13.0.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import json
import re
import sys
import unittest
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.testing._internal.common_dtype import get_all_dtypes

from hf_mps.metal import simulator
from scripts.conformance.opinfo import operators


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOST_ELEMENTS = 200_000
TEST = ("TestConsistency", "test_output_match", "mps")
# What test_mps.py of torch 2.13 allows beside the decorators (`TestConsistency._compute_tolerances`).
HALF_LOOSE = _names(
    "add sub div addcdiv __rdiv__ __rmul__ nn.functional.huber_loss true_divide kron gradient var std std_mean ldexp "
    "linalg.vector_norm lerp addr var_mean var_mean_unbiased acosh asinh asin masked.std nn.functional.avg_pool2d "
    "nn.functional.normalize nn.functional.triplet_margin_loss nn.functional.triplet_margin_with_distance_loss "
    "nn.functional.batch_norm nn.functional.group_norm nn.functional.instance_norm round xlogy addcmul "
    "nn.functional.cross_entropy nn.functional.binary_cross_entropy nn.functional.nll_loss nn.functional.max_pool2d "
    "nn.functional.gelu nn.functional.glu _native_batch_norm_legit _batch_norm_with_update native_batch_norm softmax "
    "_softmax_backward_data log_softmax masked.softmax masked.log_softmax masked.softmin nn.functional.kl_div "
    "nn.functional.softmin cross linalg.cross prod masked.prod nextafter native_layer_norm nn.functional.layer_norm "
    "nn.functional.interpolate nn.functional.upsample_bilinear nn.functional.upsample_nearest norm masked.normalize "
    "arange linspace"
)
HALF_LOOSER = _names(
    "nn.functional.conv_transpose1d nn.functional.conv_transpose2d nn.functional.conv_transpose3d __rmatmul__ addbmm "
    "addmm addmv baddbmm corrcoef cov linalg.multi_dot matmul mv nn.functional.linear"
)
SINGLE_LOOSE = _names("nn.functional.conv2d nn.functional.conv_transpose2d matmul __rmatmul__ linalg.multi_dot addbmm")
COMPARED = frozenset(("svd_lowrank", "pca_lowrank"))
"""What draws random numbers on the way to its result, and is compared by value there too."""
NO_CPU_KERNEL = re.compile(r"^\"\w+\" not implemented for '\w+'$")
"""The CPU's own error. Such a call fails in the test on any Mac, as the CPU has no result to compare with."""
FOURIER = _names("fft.rfftn fft.hfftn fft.hfft2 fft.fft fft.fftn fft.rfft")


@dataclass(frozen=True)
class Cell:
    """An operator in a dtype: what the lists expect (passes, fails, undefined, skipped) and what happened here."""

    operator: str
    dtype: str
    expected: str
    found: str  # passes, raises, as the cpu (it has no such kernel), differs, cpu raises or no samples
    detail: str = ""

    @property
    def counted(self) -> bool:
        return self.expected in ("passes", "fails") and self.found != "no samples"

    @property
    def agrees(self) -> bool:
        return (self.found == "passes") == (self.expected == "passes")


# ---- what the lists say ----


def load_list(path: Path | None, macos: float) -> Any:
    """PyTorch's module of lists from `path`, the installed one by default, as a Mac with this macOS reads it."""
    path = path or Path(torch.testing.__file__).parent / "_internal" / "common_mps.py"
    spec = importlib.util.spec_from_file_location("torch.testing._internal._calibrated_lists", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.__dict__["MACOS_VERSION"] = macos
    return module


def undefined(path: str) -> dict[str, Any]:
    """The list of results that are undefined, by operator: dtypes, or None for all. It is local to a function there."""
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign | ast.Assign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and target.id == "UNDEFINED_XFAILLIST" and node.value is not None:
                code = compile(ast.Expression(node.value), path, "eval")
                return dict(eval(code, {"torch": torch}))
    return {}


def with_bicubic(listed: Sequence[Any]) -> list[Any]:
    """OpInfo's operators, and the one that test_mps.py adds to them."""
    bicubic = copy.copy(next(operator for operator in listed if operator.name == "_upsample_bilinear2d_aa"))
    bicubic.name, bicubic.op = "_upsample_bicubic2d_aa", torch.ops.aten._upsample_bicubic2d_aa
    return [*listed, bicubic]


class Lists:
    """What each cell is expected to do."""

    def __init__(self, path: Path | None, macos: float) -> None:
        module = load_list(path, macos)
        # Copies, as the modifier adds its decorators to what it is given.
        self.operators = list(module.mps_ops_modifier([copy.copy(operator) for operator in with_bicubic(operators())]))
        self.dtypes = [dtype for dtype in get_all_dtypes() if dtype not in (torch.float64, torch.complex128)]
        self._undefined = undefined(module.__file__)

    def cells(self, operator: Any) -> Iterator[tuple[Any, str, Any]]:
        """Each dtype of an operator, what is expected of it, and the decorated test with its tolerances."""
        for dtype in self.dtypes:
            if dtype not in operator.supported_dtypes("mps"):
                continue

            def test(case: Any) -> None: ...

            for decorator in operator.get_decorators(*TEST, dtype, {}):
                test = decorator(test)
            yield dtype, self._expected(operator, dtype, test), test

    def _expected(self, operator: Any, dtype: Any, test: Any) -> str:
        try:
            test(SimpleNamespace(device_type="mps"))  # some decorators skip when called: jiterator is CUDA's alone
        except unittest.SkipTest:
            return "skipped"
        if not getattr(test, "__unittest_expecting_failure__", False):
            return "passes"
        key = operator.name + operator.variant_test_name
        dtypes = self._undefined.get(key, ())
        return "undefined" if dtypes is None or dtype in dtypes else "fails"


# ---- what happens here ----


def check(operator: Any, dtype: Any, expected: str, test: Any) -> Cell:
    """Run one cell as test_mps.py does; stop at the first sample that fails."""
    label = str(dtype).removeprefix("torch.")
    case = _case(test, dtype)
    found, detail = "no samples", ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for sample in _samples(operator, dtype):
                found, detail = _compare(case, operator, dtype, sample)
                if found != "passes":
                    break
        except Exception as error:
            found, detail = "raises", f"samples: {_short(error)}"
    return Cell(name_of(operator), label, expected, found, detail)


def _samples(operator: Any, dtype: Any) -> Iterator[Any]:
    conjugated = dtype.is_complex and operator.test_conjugated_samples
    gradients = dtype.is_floating_point or dtype.is_complex
    made = operator.sample_inputs(
        "mps:0", dtype, requires_grad=gradients, include_conjugated_inputs=conjugated, set_seed=True
    )
    for sample in made:
        leaves = torch.utils._pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
        if sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)) <= MOST_ELEMENTS:
            yield sample


def _compare(case: Any, operator: Any, dtype: Any, sample: Any) -> tuple[str, str]:
    try:
        on_device = operator(sample.input, *sample.args, **sample.kwargs)
        torch.mps.synchronize()
    except Exception as error:
        return "as the cpu" if NO_CPU_KERNEL.search(str(error)) else "raises", _short(error)
    try:
        on_cpu = _on_cpu(operator, dtype, sample, on_device)
    except Exception as error:
        return "cpu raises", _short(error)
    atol, rtol = _tolerances(operator, dtype)
    try:
        if operator.name == "kthvalue":  # equal values have no order
            on_cpu, on_device = on_cpu[0], on_device[0]
        case.assertEqual(on_cpu, on_device, atol=atol, rtol=rtol)  # noqa: PT009
    except AssertionError as error:
        if not _draws(operator, sample):
            return "differs", _line(str(error))
    return "passes", ""


def _on_cpu(operator: Any, dtype: Any, sample: Any, on_device: Any) -> Any:
    """The CPU's result; in float32 where the CPU has no such kernel, as the test does."""
    integers = operator.name == "histc" and not dtype.is_floating_point and not dtype.is_complex
    plain = _moved(sample, None)
    try:
        found = operator(plain.input, *plain.args, **plain.kwargs)
    except NotImplementedError:
        if not isinstance(on_device, torch.Tensor):
            raise
        plain = _moved(sample, torch.float32)
        found = operator(plain.input, *plain.args, **plain.kwargs)
        # Other integers are compared as floats with integers, which fails: the lists have them.
        if integers or dtype in (torch.float16, torch.bfloat16, torch.bool):
            found = found.to(on_device.dtype)
    return found


def _moved(sample: Any, dtype: Any) -> Any:

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.device | str) and str(value).startswith("mps"):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor):
            return value
        moved = value.detach()
        moved = moved.conj().cpu().conj() if value.is_conj() else moved.cpu()
        moved = moved.to(dtype) if dtype is not None and value.dtype == first else moved
        return moved.requires_grad_(value.requires_grad)

    first = getattr(sample.input, "dtype", None)
    return sample.transform(leaf)


def _draws(operator: Any, sample: Any) -> bool:
    """Whether the operator's results are random: the two devices draw other numbers, and that is no difference."""
    from torch.utils._python_dispatch import TorchDispatchMode

    tags: set[Any] = set()
    if operator.name in COMPARED:
        return False

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tags.update(function.tags)
            return function(*args, **(kwargs or {}))

    with Noted():
        operator(sample.input, *sample.args, **sample.kwargs)
    return torch.Tag.nondeterministic_seeded in tags


def _tolerances(operator: Any, dtype: Any) -> tuple[float | None, float | None]:
    name = operator.name
    half, brain = dtype == torch.float16, dtype == torch.bfloat16
    if name in SINGLE_LOOSE and dtype in (torch.float32, torch.complex64):
        return 1e-4, 3e-5
    if name in HALF_LOOSE and (half or brain):
        return (2e-2, 1e-2) if half else (5e-2, 5e-2)
    if name == "nn.functional.gaussian_nll_loss" and brain:
        return 5e-2, 5e-2
    if name in HALF_LOOSER and (half or brain):
        return (5e-2, 5e-2) if half else (5e-2, 1e-1)
    if name == "index_reduce" and operator.variant_test_name in ("mean", "prod") and (half or brain):
        return 0.01, 0.01
    if name == "linspace" and not dtype.is_floating_point and not dtype.is_complex:
        return 1.0, 0.0
    if name == "nn.functional.interpolate" and dtype == torch.uint8:
        return 1.0, 0.0
    fixed = {"masked.mean": (7e-4, 2e-3), "native_layer_norm": (1e-4, 1.3e-5)}
    return (3e-5, 3e-5) if name in FOURIER else fixed.get(name, (None, None))


def _case(test: Any, dtype: Any) -> Any:
    from torch.testing._internal.common_utils import TestCase

    case = TestCase()
    case.precision = getattr(test, "precision_overrides", {}).get(dtype, case.precision)
    if dtype in getattr(test, "tolerance_overrides", {}):
        case.precision, case.rel_tol = test.tolerance_overrides[dtype]
    return case


def name_of(operator: Any) -> str:
    """The operator's name with its variant: nn.functional.interpolate.bicubic."""
    return str(operator.full_name)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {_line(str(error))}"


def _line(text: str) -> str:
    return " ".join(text.split())[:240]


# ---- a process ----


def work(lists: Lists, wanted: Sequence[int]) -> None:
    """Check the operators of these numbers; one line of JSON before each and one after."""
    for number in wanted:
        operator = lists.operators[number]
        print(json.dumps({"begins": number, "name": name_of(operator)}), flush=True)
        cells = [asdict(check(operator, *cell)) for cell in lists.cells(operator)]
        print(json.dumps({"ends": number, "cells": cells}), flush=True)


def main(profile: str, path: str, *numbers: str) -> None:
    """Check the operators of these numbers on the device of this profile, by the lists of this file."""
    torch.set_num_threads(1)
    macos = simulator.load(profile).macos
    work(Lists(Path(path) if path else None, float(f"{macos[0]}.{macos[1]}")), [int(number) for number in numbers])


if __name__ == "__main__":
    main(*sys.argv[1:])
