"""Compare the simulated Metal device with the CPU on PyTorch's own operator samples, and print the differences.

    python scripts/bench/simulator_conformance.py                 every operator, about four minutes on two cores
    python scripts/bench/simulator_conformance.py add nn.functional.conv2d
    python scripts/bench/simulator_conformance.py --every 10      one operator in ten

Forward, backward, in-place and out= calls in float32, float16, bfloat16 and int64. Needs the extra package expecttest.
Exit code 1 where a difference is found that tests/metal/simulator/opinfo_exceptions.yaml does not list.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import measured_on

from tests.metal.simulator.conformance import exceptions, runner


def main() -> int:
    """Run, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("operators", nargs="*", help="names as in OpInfo (default: all)")
    parser.add_argument("--every", type=int, default=1, help="check one operator in so many")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time (default 2)")
    parser.add_argument("--profile", default="1", help="device profile (default the simulator's)")
    given = parser.parse_args()
    only = [number for number, name in enumerate(runner.names()) if name in given.operators] or None
    if given.operators and only is None:
        parser.error(f"no operator of OpInfo is called {' or '.join(given.operators)}")
    print(measured_on.line_of({"HF_MPS_SIMULATE": given.profile}), flush=True)
    start = time.monotonic()
    summary = runner.run_all(workers=given.workers, profile=given.profile, only=only, every=given.every)
    listed = exceptions.read()
    unexplained, _ = exceptions.match(summary.differences, listed)
    for item in summary.differences:
        mark = "  new" if item in unexplained else "known"
        print(f"{mark}  {item['operator']:40s} {item['dtype']:9s} {item['form']:13s} {item['detail']}")
    print(report(summary, time.monotonic() - start))
    return 1 if unexplained else 0


def report(summary: runner.Summary, seconds: float) -> str:
    """The figures of a run, in lines."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in summary.counts.most_common())
    share = 100 * summary.agreed / max(summary.native, 1)
    return (
        f"{summary.operators} operators, {sum(summary.counts.values())} calls in {seconds:.0f} s: {kinds}\n"
        f"native: {summary.agreed} of {summary.native} agree ({share:.3f} %); other strides in {summary.strides}\n"
        f"reported as missing by name: {len(summary.missing)} operators"
    )


if __name__ == "__main__":
    sys.exit(main())
