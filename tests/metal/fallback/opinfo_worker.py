"""Runs PyTorch's operator samples on the device with fallbacks on; prints one JSON object. Started by test_opinfo.py.

A process of its own: one thread throughout, also in autograd's, or a loaded machine takes five times as long.
"""

from __future__ import annotations

import json
import warnings

import torch

from hf_mps.metal.fallback import registration
from hf_mps.metal.fallback.accounting import ledger
from tests import share
from tests.metal.simulator.conformance import runner, samples, worker

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.complex64)


def main() -> None:
    """Find the operators, of this run's share, that need a fallback, then check them in all dtypes and both ways."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    samples.DTYPES = (torch.float32,)
    touched, seen = [], set()
    for number in share.of(runner.names()):
        before = ledger.snapshot()
        worker.check(number)
        names = {entry.operator for entry in ledger.report(before).operators}
        if names:
            touched.append(number)
            seen |= names
    samples.DTYPES = DTYPES
    result = {"operators": len(touched), "seen": sorted(seen), "as it comes": differences(touched)}
    for way in ("copied", "shared"):
        registration.stop()
        registration.start(share=way == "shared", small=-1)
        ledger.reset()
        result[way] = differences(touched)
        result[f"{way} calls"] = [sum(entry.shared for entry in ledger.report().operators), ledger.report().calls]
    print(json.dumps(result))


def differences(numbers: list[int]) -> list[str]:
    """What is not as on the CPU, in words."""
    found = []
    for number in numbers:
        report = worker.check(number)
        found += [f"{report['name']} {one['dtype']} {one['form']}: {one['detail']}" for one in report["differences"]]
        found += [f"{report['name']}: {name} is missing" for name in report["missing"]]
    return found


if __name__ == "__main__":
    main()
