"""The line that a benchmark prints first: which device its figures are of, and whether that is a simulated one.

python scripts/bench/measured_on.py [cpu]    prints it for a process with these variables
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping


def line(device: str = "mps") -> str:
    """Return the line for the device of this process. Imports torch; the simulated device is to be loaded by then."""
    from hf_mps.metal.device import facts, machine, simulated

    computes = machine.real().chip
    if device == "cpu":
        return f"measured on: cpu, {computes}"
    told = facts.facts(device).lines()[0].replace("device", "measured on", 1)
    return f"{told}, computed by {computes}: no Mac's speed or memory" if simulated(device) else told


def line_of(variables: Mapping[str, str], device: str = "mps") -> str:
    """Return the line for processes that this one starts with `variables` beside its own."""
    done = subprocess.run(
        [sys.executable, __file__, device],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.strip()


if __name__ == "__main__":
    print(line(*sys.argv[1:]))
