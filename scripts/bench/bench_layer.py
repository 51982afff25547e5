"""A training step with no missing operator, with the layer's fallback on and off: the ratio of their times.

    python scripts/bench/bench_layer.py
    python scripts/bench/bench_layer.py --rounds 300

One small BERT and one AdamW on the device; the kernels are registered and taken back between rounds of a few steps. A
third series, off like the second, shows what the machine's own noise makes of equal things. Compared are the times that
one round in five stays under: other programs only add to a round, so that the quick rounds tell of the work itself.
Exit code 1 where on and off differ by more than 2 %.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys

os.environ.update({"HF_MPS_FALLBACK": "quiet", "HF_HUB_OFFLINE": "1"})
if sys.platform != "darwin":
    os.environ.setdefault("HF_MPS_SIMULATE", "1")

import measured_on
import torch
from steps import timed, training_step


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=120, help="rounds of each series (default 120)")
    parser.add_argument("--steps", type=int, default=2, help="training steps of a round (default 2)")
    given = parser.parse_args()
    from hf_mps.metal import fallback
    from hf_mps.metal.fallback import registration

    print(measured_on.line())
    torch.set_num_threads(1)
    step = training_step()
    for _ in range(3):
        step()
    gc.collect()
    gc.disable()  # or the objects that the switching makes bring a collection into one side's steps
    times: dict[str, list[float]] = {"on": [], "off": [], "off again": []}
    for number in range(given.rounds):
        # The order turns, or a steady drift would count for one of them.
        series = list(times)[number % 3 :] + list(times)[: number % 3]
        for name in series:
            # Both switches for each, and a step untimed: the churn in heap and caches is not the layer's cost.
            for switch in (
                (registration.stop, registration.start) if name == "on" else (registration.start, registration.stop)
            ):
                switch()
            step()
            times[name].append(timed(step, given.steps))
    quick = {name: statistics.quantiles(values, n=5)[0] for name, values in times.items()}
    for name, values in times.items():
        print(f"{name:<10}{quick[name]:9.3f} ms a step (median {statistics.median(values):.3f})")
    ratio = quick["on"] / quick["off"]
    print(f"on / off         {ratio:.4f}")
    print(f"off again / off  {quick['off again'] / quick['off']:.4f}")
    missing = fallback.report().operators
    for entry in missing:
        print(f"not a step without missing operators: {entry.operator}")
    return 1 if missing or abs(ratio - 1) > 0.02 else 0


if __name__ == "__main__":
    sys.exit(main())
