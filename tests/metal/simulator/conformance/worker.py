"""Checks the operators that it is told on standard input, a number a line; answers with a line of JSON each.

A process of its own, so that a crash costs one operator and can be reported. Started by runner.py.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_mps.metal.device import faults
from hf_mps.metal.simulator import strictness
from scripts.conformance.opinfo import operators
from tests.metal.simulator.conformance import samples
from tests.metal.simulator.conformance.compare import Outcome, outcome

op_db = operators()
# What these return is memory that nobody has written yet: their values mean nothing on any device.
UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
UNWRITTEN |= {"resize_as_", "nn.functional._empty"}
# The variants (in place, out=) are the operator's own code again: fewer samples are enough.
VARIANT_SAMPLES = 2


def check(number: int) -> dict[str, Any]:
    """All samples of the operator op_db[number]: counts of each outcome, and every difference in words."""
    operator = op_db[number]
    name = operator.name + (f".{operator.variant_test_name}" if operator.variant_test_name else "")
    counts: Counter[str] = Counter()
    report: dict[str, Any] = {"name": name, "differences": [], "missing": [], "compressed": 0, "strides": 0}
    for dtype in samples.DTYPES:
        if dtype not in operator.supported_dtypes("cpu"):
            continue
        label = str(dtype).removeprefix("torch.")
        for index, (form, found) in enumerate(_outcomes(operator, dtype)):
            counts[found.kind] += 1
            report["strides"] += found.strides_differ
            if found.kind == "missing":
                report["missing"].append(found.detail)
            elif found.kind == "compressed":
                report["compressed"] += 1
            elif not found.agrees:
                report["differences"].append({"dtype": label, "form": form, "call": index, "detail": found.detail})
    report["missing"] = sorted(set(report["missing"]))
    return {**report, "counts": dict(counts)}


def _outcomes(operator: Any, dtype: torch.dtype) -> Iterator[tuple[str, Outcome]]:
    for index, sample in enumerate(samples.take(operator, dtype)):
        values = operator.name not in UNWRITTEN
        yield "forward", outcome(_bound(operator.op, sample, "cpu"), _bound(operator.op, sample, "mps"), values=values)
        if dtype.is_floating_point and operator.supports_autograd:
            yield "backward", _backward(operator, sample)
        if index < VARIANT_SAMPLES:
            if operator.inplace_variant is not None and not sample.broadcasts_input:
                yield "in place", _in_place(operator.inplace_variant, sample)
            if operator.supports_out:
                yield "out", _out(operator.op, sample, resized=False, values=values)
                yield "out, resized", _out(operator.op, sample, resized=True, values=values)


def _bound(function: Callable[..., Any], sample: Any, device: str) -> Callable[[], Any]:
    """A call with arguments of its own, made anew each time, that track no gradients."""

    def call() -> Any:
        given = _arguments(sample, device)
        with torch.no_grad():
            return function(given[0], *given[1], **given[2])

    return call


def _arguments(sample: Any, device: str) -> Any:
    return samples.copied((sample.input, sample.args, sample.kwargs), device)


def _backward(operator: Any, sample: Any) -> Outcome:
    def gradients(device: str) -> Callable[[], Any]:
        def call() -> Any:
            given = _arguments(sample, device)
            result = operator.op(given[0], *given[1], **given[2])
            result = sample.output_process_fn_grad(result)
            leaves = torch.utils._pytree.tree_leaves
            outputs = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            inputs = [leaf for leaf in leaves(given) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if not outputs or not inputs:
                return []
            source = torch.Generator().manual_seed(3)
            cotangents = [
                torch.randn(output.shape, generator=source, dtype=torch.float32).to(output.dtype).to(device)
                for output in outputs
            ]
            return torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)

        return call

    return outcome(gradients("cpu"), gradients("mps"))


def _in_place(function: Callable[..., Any], sample: Any) -> Outcome:
    def call_on(device: str) -> Callable[[], Any]:
        def call() -> Any:
            given = _arguments(sample, device)
            with torch.no_grad():
                returned = function(given[0], *given[1], **given[2])
            return [returned, given[0], returned is given[0]]

        return call

    return outcome(call_on("cpu"), call_on("mps"))


def _out(function: Callable[..., Any], sample: Any, *, resized: bool, values: bool) -> Outcome:
    """The out= form, into tensors of the right shape full of sevens, or into empty ones that must be resized."""

    def call_on(device: str) -> Callable[[], Any]:
        def call() -> Any:
            given = _arguments(sample, device)
            with torch.no_grad():
                plain = function(given[0], *given[1], **given[2])
                targets = _targets(plain, resized)
                returned = function(given[0], *given[1], **given[2], out=targets)
            return [returned, targets]

        return call

    return outcome(call_on("cpu"), call_on("mps"), values=values)


def _targets(result: Any, resized: bool) -> Any:
    def target(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty(0) if resized else torch.full_like(tensor, 7).contiguous()

    if isinstance(result, torch.Tensor):
        return target(result)
    return tuple(target(tensor) for tensor in result)


def main() -> None:
    """Answer until standard input ends."""
    torch.set_num_threads(1)
    print(json.dumps({"operators": len(op_db)}), flush=True)
    # test_aborts.py has the aborts, test_calibration.py what Metal does otherwise with dtypes.
    with strictness.off(*faults.ABORTS, "dtype-results"):
        for line in sys.stdin:
            print(json.dumps(check(int(line))), flush=True)


if __name__ == "__main__":
    main()
