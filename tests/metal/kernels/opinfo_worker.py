"""Runs PyTorch's operator samples on a release's Metal kernels; prints one JSON object. Started by test_opinfo.py.

    HF_MPS_SIMULATE=1 HF_MPS_KERNELS=2.13.0 python -m tests.metal.kernels.opinfo_worker [SAMPLES]

Without a number five samples of each operator run in each dtype: most of the time is compilation.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from typing import Any

import torch

from hf_mps.metal.kernels import running
from tests import share
from tests.metal.simulator.conformance import compare, runner, samples, worker

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROOM = 8.0
"""Times torch.testing's tolerances."""


def main(count: int) -> None:
    """Check the operators of this run's share of op_db in float32, and in the halves as well where a rule ran."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    worker.VARIANT_SAMPLES, compare.TIMES = 0, ROOM
    metal = running()
    assert metal is not None, "HF_MPS_KERNELS is not set"
    ran: Counter[str] = Counter()
    result: dict[str, Any] = {"operators": 0, "samples": 0, "differences": []}
    for number in share.of(runner.names()):
        metal.ledger.clear()
        reports = [_checked(number, torch.float32, count)]
        if not metal.ledger.operators:
            continue
        reports += [_checked(number, dtype, count) for dtype in DTYPES[1:]]
        ran += metal.ledger.operators
        result["operators"] += 1
        for report in reports:
            result["samples"] += sum(report["counts"].values())
            result["differences"] += [{"operator": report["name"], **one} for one in report["differences"]]
    print(json.dumps({**result, "ran": sorted(ran), "launches": sum(ran.values())}))


def _checked(number: int, dtype: torch.dtype, count: int) -> dict[str, Any]:
    samples.DTYPES, samples.SAMPLES = (dtype,), count
    return worker.check(number)


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[1:]]
    main(given[0] if given else samples.SAMPLES)
