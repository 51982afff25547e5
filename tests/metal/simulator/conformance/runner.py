"""Spreads the operators over worker processes, one a core, and sums up what they report."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests import CHECKOUT

AGREED = ("same", "close", "both raise", "refused", "random")
# Calls that no kernel of the device has to serve.
APART = ("missing", "compressed")


@dataclass
class Summary:
    """What all operators gave: `counts` by outcome, and the single differences."""

    counts: Counter[str] = field(default_factory=Counter)
    operators: int = 0
    missing: set[str] = field(default_factory=set)
    compressed: set[str] = field(default_factory=set)
    differences: list[dict[str, Any]] = field(default_factory=list)
    strides: int = 0

    @property
    def native(self) -> int:
        return sum(count for kind, count in self.counts.items() if kind not in APART)

    @property
    def agreed(self) -> int:
        return sum(self.counts[kind] for kind in AGREED)

    def add(self, report: dict[str, Any]) -> None:
        self.operators += 1
        self.counts.update(report["counts"])
        self.missing.update(report["missing"])
        if report["compressed"]:
            self.compressed.add(report["name"])
        self.strides += report["strides"]
        self.differences += [{"operator": report["name"], **item} for item in report["differences"]]


class Worker:
    """A process that checks operators; it is started again after a crash."""

    def __init__(self, profile: str) -> None:
        self._environment = {
            **os.environ,
            "HF_MPS_SIMULATE": profile,
            "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "OMP_NUM_THREADS": "1",
        }
        self._environment.pop("PYTORCH_ENABLE_MPS_FALLBACK", None)
        self._environment["HF_MPS_FALLBACK"] = "error"  # the device alone, without the layer's kernels
        self._process: subprocess.Popen[str] | None = None
        self.operators = 0

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.metal.simulator.conformance.worker"],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        first = self._process.stdout.readline()
        if not first:
            raise RuntimeError(
                "the conformance worker does not start; run python -m tests.metal.simulator.conformance.worker to see "
                "why"
            )
        self.operators = json.loads(first)["operators"]

    def check(self, number: int) -> dict[str, Any]:
        """The report of one operator; a crash is a difference."""
        if self._process is None:
            self.start()
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if answer:
            return json.loads(answer)
        code = self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._process = None
        crash = {"dtype": "", "form": "any", "call": 0, "detail": f"the process ends with code {code}"}
        return {
            "name": f"op_db[{number}]",
            "counts": {"differs": 1},
            "missing": [],
            "compressed": 0,
            "strides": 0,
            "differences": [crash],
        }

    def stop(self) -> None:
        if self._process is not None and self._process.stdin is not None and self._process.stdout is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()


def run_all(*, workers: int = 2, profile: str = "1", only: list[int] | None = None, every: int = 1) -> Summary:
    """Check all operators of op_db (or the numbers `only`, or one in `every`) on `workers` processes at a time."""
    crew = [Worker(profile) for _ in range(workers)]
    crew[0].start()
    numbers = only if only is not None else list(range(0, crew[0].operators, every))
    queue, lock, summary = iter(numbers), threading.Lock(), Summary()
    failures: list[BaseException] = []

    def work(worker: Worker) -> None:
        try:
            for number in _taken(queue, lock):
                report = worker.check(number)
                with lock:
                    summary.add(report)
        except BaseException as error:
            failures.append(error)
        finally:
            worker.stop()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in crew]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return summary


def _taken(queue: Any, lock: threading.Lock) -> Any:
    while True:
        with lock:
            number = next(queue, None)
        if number is None:
            return
        yield number


def names() -> list[str]:
    """The operators' names in op_db's order, without a device."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [op.name + (f".{op.variant_test_name}" if op.variant_test_name else "") for op in itertools.chain(op_db)]
