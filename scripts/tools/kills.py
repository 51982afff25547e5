"""Kills runs of recipes at random moments, lets them go on, and compares each with the run that was never killed.

    python scripts/tools/kills.py --count 500                    every variant on the CPU and the simulated device
    python scripts/tools/kills.py --count 40 --variant stream    one of them
    python scripts/tools/kills.py --variant best --device cpu --draw 1-7    one chain again

A line for each chain of kills that does not end as the unbroken run, then a table, after Ctrl-C and SIGTERM too. Exit
code 1 where one differs. Linux only: the processes run under an LD_PRELOAD library (tests/resume/kills/at_operation.c),
compiled by `cc` on the spot.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.resume.kills import chains
from tests.resume.kills.variants import VARIANTS


def main() -> int:
    """Run chains until `--count` kills have landed; 1 where one of them differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="kills to land, over all variants")
    parser.add_argument("--variant", choices=VARIANTS, nargs="+", default=[*VARIANTS], help="some variants alone")
    parser.add_argument("--device", choices=("cpu", "simulated"), help="one device alone")
    parser.add_argument("--seed", type=int, default=1, help="draws other moments")
    parser.add_argument("--draw", help="one chain, as a line named it")
    parser.add_argument("--folder", type=Path, help="where the runs are; those that differ stay")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="kills-") as temporary:
        folder = (asked.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        harness = chains.Harness(folder)
        done: list[chains.Chain] = []
        try:
            run(harness, asked, done)
        except KeyboardInterrupt:
            print("stopped before its end", file=sys.stderr)
        finally:
            harness.processes.end()
    print(table(done))
    return int(any(chain.differs for chain in done))


def run(harness: chains.Harness, asked: argparse.Namespace, done: list[chains.Chain]) -> None:
    """Add the chains to `done`, one variant after the other in turn, each that differs with a line."""
    pairs = [(one, device) for one, device in chains.pairs(*asked.variant) if asked.device in (None, device)]
    start, number = time.monotonic(), 0
    while sum(len(chain.kills) for chain in done) < asked.count and not (asked.draw and done):
        variant, device = pairs[number % len(pairs)]
        chain = harness.chain(variant, device, asked.draw or f"{asked.seed}-{number // len(pairs)}")
        done.append(chain)
        number += 1
        if chain.differs:
            print(line(chain), flush=True)
        if sys.stderr.isatty() or number % 20 == 0:
            kills, differ = sum(len(each.kills) for each in done), sum(bool(each.differs) for each in done)
            print(f"{kills} kills, {differ} differ, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def line(chain: chains.Chain) -> str:
    """A chain that differs: how to run it again, its kills, what differs."""
    again = f"--variant {chain.variant.name} --device {chain.device} --draw {chain.draw}"
    return f"{again}: {', then '.join(map(str, chain.kills))}: {chain.differs}"


def table(done: list[chains.Chain]) -> str:
    """The chains by variant and device, as Markdown."""
    rows = [["variant", "device", "kills", "chains", "identical", "stuck", "unusable"]]
    for name, device in dict.fromkeys((chain.variant.name, chain.device) for chain in done):
        some = [chain for chain in done if (chain.variant.name, chain.device) == (name, device)]
        rows.append([name, device, *_counts(some)])
    rows.append(["all", "", *_counts(done)])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "| --- | --- | ---: | ---: | ---: | ---: | ---: |", *lines[1:]])


def _counts(some: list[chains.Chain]) -> list[str]:
    identical = sum(not chain.differs for chain in some)
    counts = (sum(len(chain.kills) for chain in some), len(some), identical)
    return [str(each) for each in (*counts, sum(c.stuck for c in some), sum(c.unusable for c in some))]


if __name__ == "__main__":
    sys.exit(main())
