"""What Inductor writes for Metal, operator by operator: compiled, run on the simulated device, compared with the CPU.

    HF_MPS_SIMULATE=1 python scripts/conformance/inductor.py [--operator NAME] [--samples 2] [--json FILE]

The cases are PyTorch's own (`op_db`), in float32. A line for each operator whose compiled result differs from the CPU's
and from its own eager result, whose source does not compile, or that ends otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operator", action="append", help="its cases alone; may be given several times")
    parser.add_argument("--samples", type=int, default=2, help="cases of each operator (2)")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no operator after this time")
    parser.add_argument("--json", type=Path, help="write every case here")
    given = parser.parse_args()
    if not torch.backends.mps.is_available():
        print("no device mps here; next: HF_MPS_SIMULATE=1 python scripts/conformance/inductor.py")
        return 2
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.simplefilter("ignore")
    torch._logging.set_logs(all=50)  # type: ignore[attr-defined]
    torch._dynamo.config.cache_size_limit = 10_000
    torch._inductor.config.fallback_random = True
    sources = _sources()
    begun, rows = time.monotonic(), []
    for operator in op_db:
        if given.operator and operator.name not in given.operator:
            continue
        if torch.float32 not in operator.dtypes or time.monotonic() - begun > given.seconds:
            continue
        for number, sample in enumerate(_cases(operator, given.samples)):
            row = {"operator": operator.formatted_name, "case": number, **_tried(operator, sample, sources)}
            rows.append(row)
            if row["verdict"] not in ("agrees", "no kernel of Inductor's"):
                print(f"{row['operator']:40} {row['verdict']:16} {row.get('why', '')[:120]}", flush=True)
    print(", ".join(f"{count:,} {verdict}" for verdict, count in Counter(row["verdict"] for row in rows).most_common()))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    return 0


def _sources() -> list[str]:
    """Every Metal source that is compiled from now on."""
    sources: list[str] = []
    compile_source = torch._C._mps_compileShader  # type: ignore[attr-defined]

    def noted(source: str) -> Any:
        sources.append(source)
        return compile_source(source)

    torch._C._mps_compileShader = noted  # type: ignore[attr-defined]
    return sources


def _cases(operator: Any, most: int) -> list[Any]:
    try:
        samples = operator.sample_inputs("cpu", torch.float32, requires_grad=False)
        return [sample for sample, _ in zip(samples, range(most), strict=False)]
    except Exception:
        return []


def _tried(operator: Any, sample: Any, sources: list[str]) -> dict[str, str]:
    def run(where: str, function: Any) -> Any:
        moved = tree_map_only(torch.Tensor, lambda x: x.to(where), (sample.input, sample.args, sample.kwargs))
        torch.manual_seed(0)
        return tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), function(moved[0], *moved[1], **moved[2]))

    try:
        expected = run("cpu", operator.op)
        eager = run("mps", operator.op)
    except Exception as error:
        return {"verdict": "not on mps", "why": _line(error)}
    torch._dynamo.reset()
    before = len(sources)
    try:
        found = run("mps", torch.compile(lambda *a, **k: operator.op(*a, **k), dynamic=False))
    except Exception as error:
        text = str(error)
        at = text.find("program_source:")
        return {
            "verdict": "does not compile" if at >= 0 else "ends",
            "why": text[at:].splitlines()[0] if at >= 0 else _line(error),
        }
    if len(sources) == before:
        return {"verdict": "no kernel of Inductor's"}
    try:
        torch.testing.assert_close(found, expected, equal_nan=True, **TOLERANCE)
    except AssertionError as differs:
        try:
            torch.testing.assert_close(found, eager, equal_nan=True, **TOLERANCE)
        except AssertionError:
            return {"verdict": "differs", "why": " ".join(str(differs).split())}
    return {"verdict": "agrees"}


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return " ".join(lines[:2]) if lines else type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
