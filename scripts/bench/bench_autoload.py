"""What the layer adds to `import torch`, in one run that alternates over fresh processes.

    python scripts/bench/bench_autoload.py            # nothing to do: no HF_MPS_* variable
    python scripts/bench/bench_autoload.py --rounds 20 --simulate m1-8gb

Prints, in milliseconds: `import torch` with the layer, with HF_MPS=0 and with PyTorch's autoload off, their medians and
ratios; and, since whole imports vary by more than the layer costs, the layer's own share, timed inside the process
around PyTorch's call of the entry point. With --simulate the simulated device's loading is timed apart from the layer.
Modules are compiled to bytecode first, as pip does when it installs, into a folder that is removed at the end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

import measured_on

WHOLE = "import time; start = time.perf_counter(); import torch; print((time.perf_counter() - start) * 1000)"

# As PyTorch does it at the end of `import torch`: load the entry point's module, call its function. The simulated
# device is loaded first, so that `start` finds it there.
SHARE = """
import os, time
import torch
profile = os.environ.get("HF_MPS_SIMULATE")
began = time.perf_counter()
if profile:
    from hf_mps.metal import simulator
    simulator.load(profile)
loaded = time.perf_counter()
from hf_mps.autoload import start
start()
print((time.perf_counter() - loaded) * 1000, (loaded - began) * 1000)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What the layer adds to `import torch`.")
    parser.add_argument("--rounds", type=int, default=10, help="fresh processes for each of the four (default 10)")
    parser.add_argument(
        "--simulate", metavar="PROFILE", help="with a simulated Metal device, as HF_MPS_SIMULATE says it"
    )
    arguments = parser.parse_args()
    layer = {"HF_MPS_SIMULATE": arguments.simulate} if arguments.simulate else {}
    if layer:
        print(measured_on.line_of(layer))
    with tempfile.TemporaryDirectory() as bytecode:
        os.environ["PYTHONPYCACHEPREFIX"] = bytecode
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        report(measure(arguments.rounds, layer), simulated=bool(layer))


def measure(rounds: int, layer: dict[str, str]) -> dict[str, list[float]]:
    """Return the milliseconds of each kind of process, `rounds` of each, in alternation."""
    measured: dict[str, list[float]] = {"layer": [], "HF_MPS=0": [], "autoload off": [], "share": [], "simulator": []}
    for code in (WHOLE, SHARE):  # writes the bytecode, compiles the device
        timed(code, layer)
    for _ in range(rounds):
        measured["layer"] += timed(WHOLE, layer)
        measured["HF_MPS=0"] += timed(WHOLE, {"HF_MPS": "0"})
        measured["autoload off"] += timed(WHOLE, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
        share, simulator = timed(SHARE, {**layer, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
        measured["share"].append(share)
        measured["simulator"].append(simulator)
    return measured


def timed(code: str, variables: dict[str, str]) -> list[float]:
    """Run `code` in a fresh process without the caller's HF_MPS_* variables; return the milliseconds that it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_MPS")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, **variables}, capture_output=True, text=True, check=True
    )
    return [float(word) for word in done.stdout.split()]


def report(measured: dict[str, list[float]], *, simulated: bool) -> None:
    """Print medians, ranges and ratios."""
    base = statistics.median(measured["HF_MPS=0"])
    for name in ("layer", "HF_MPS=0", "autoload off"):
        times = measured[name]
        median = statistics.median(times)
        print(f"import torch, {name:<13}{median:8.1f} ms  ({min(times):.1f} to {max(times):.1f})  {median / base:.4f}")
    share = measured["share"]
    print(f"the layer's own share     {statistics.median(share):8.2f} ms  ({min(share):.2f} to {max(share):.2f})")
    if simulated:
        print(f"loading the simulator     {statistics.median(measured['simulator']):8.1f} ms")


if __name__ == "__main__":
    main()
