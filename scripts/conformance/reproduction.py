"""A call as a program that a reader can paste."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scripts.conformance import calls
from scripts.conformance.calls import Call

MOST_ELEMENTS = 128
"""Above it values are left out, and the case is run again by its name."""


def program(call: Call, release: str, case: str) -> str:
    """Shell lines that print what the release's kernels give, and what the CPU does."""
    if sum(each.numel() for each in call.tensors) > MOST_ELEMENTS:
        return f"python scripts/conformance/report.py {release} --case {case}"
    names: list[str] = []
    lines = ["import torch", "from torch import tensor, device", "", "def call(where):"]
    arguments = ", ".join(_text(value, names, lines) for value in call.arguments)
    options = ", ".join(f"**{{{name!r}: {_text(value, names, lines)}}}" for name, value in call.options.items())
    given = ", ".join(filter(None, [arguments, options]))
    packet, _, overload = call.operator.partition(".")
    lines.append(f"    result = torch.ops.aten.{packet}.{overload or 'default'}({given})")
    changed = [names[place] for place in _written(call)]
    lines += [f"    return result, {', '.join(changed)}" if changed else "    return result", ""]
    lines += ['print("Metal", call("mps"))', 'print("CPU  ", call("cpu"))']
    body = "\n".join(lines)
    return f"HF_MPS_SIMULATE=1 HF_MPS_KERNELS={release} python - <<'END'\n{body}\nEND"


def _written(call: Call) -> list[int]:
    """The places, among the call's tensors, of those that are written."""
    held = call.tensors
    found = []
    for _, name in calls.written(call.operator):
        value = calls.argument(call, name)
        for each in value if isinstance(value, list | tuple) else [value]:
            found += [at for at, tensor in enumerate(held) if tensor is each]
    return found


def _text(value: Any, names: list[str], lines: list[str]) -> str:
    if isinstance(value, Tensor):
        name = f"t{len(names)}"
        names.append(name)
        lines.append(f"    {name} = {_tensor(value)}")
        return name
    if isinstance(value, list | tuple):
        inside = ", ".join(_text(each, names, lines) for each in value)
        return f"[{inside}]"
    if isinstance(value, torch.device):
        return "device(where)"
    if isinstance(value, torch.Generator):
        return "torch.Generator(where).manual_seed(7)"
    if (isinstance(value, float) and value != value) or value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    return repr(value)


def _tensor(tensor: Tensor) -> str:
    """The values, and then the strides where they are not a dense tensor's."""
    numbers = repr(tensor.tolist()).replace("nan", 'float("nan")').replace("inf", 'float("inf")')
    text = f"tensor({numbers}, dtype={tensor.dtype}, device=where)"
    if 0 in tensor.shape:
        text = f"torch.zeros({list(tensor.shape)}, dtype={tensor.dtype}, device=where)"
    if tensor.is_contiguous() and tensor.storage_offset() == 0:
        return text
    size, stride, offset = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
    count = offset + 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True) if length)
    whole = f"torch.zeros({count + 3}, dtype={tensor.dtype}, device=where).as_strided({size}, {stride}, {offset})"
    return f"{whole}.copy_({text})" if 0 not in stride else f"{text}[:1].expand({size})"
