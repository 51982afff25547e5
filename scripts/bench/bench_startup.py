"""How long until something happens: help, lists, imports, the quickstart's first line, header and step, other verbs.

    python scripts/bench/bench_startup.py
    python scripts/bench/bench_startup.py --rounds 10 --imports 25
    python scripts/bench/bench_startup.py --skip-quickstart

Fresh processes take turns; medians are printed in seconds, by the clock and of the processor (user and system): where
other programs share the machine, only the processor's mean something. A bare Python stands beside them. The quickstart
runs until its second step's line on the device of this process, simulated off a Mac (compiled before the clock starts);
its three moments are read from what it prints. The verbs behind it run whole, on that device, with a model that the
quickstart trained for two steps: a plan, predict for 16 rows, the doctor, two exports (that to ONNX is left out where
onnx or ONNX Runtime is not installed) and a parity of one step. --imports lists what the quickstart spends its imports
on, by package.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import measured_on

FLOOR = "python, import Trainer"
"""The floor of every run: with the layer off, as the layer has libraries imported in less time."""
COMMANDS = {
    "python, nothing": ["-c", "pass"],
    "import hf_mps": ["-c", "import hf_mps"],
    "hf-mps --help": ["-m", "hf_mps", "--help"],
    "hf-mps recipes list": ["-m", "hf_mps", "recipes", "list"],
    "python, import torch": ["-c", "import torch"],
    FLOOR: ["-c", "from transformers import Trainer"],
}
QUICKSTART = ["-m", "hf_mps.finetune", "quickstart", "--fresh", "training.logging_steps=1", "training.max_steps=2"]
QUICKSTART += ["training.eval_strategy=no", "training.save_strategy=no"]
VERBS = {
    "quickstart --plan": ["-m", "hf_mps.finetune", "quickstart", "--fresh", "--plan"],
    "predict, 16 rows": ["-m", "hf_mps", "predict", "run", "rows.csv", "--out", "{new}.csv"],
    "doctor": ["-m", "hf_mps", "doctor"],
    "export merged": ["-m", "hf_mps", "export", "merged", "run", "{new}"],
    "export onnx": ["-m", "hf_mps", "export", "onnx", "run", "{new}"],
    "parity, a step": ["-m", "hf_mps", "parity", "quickstart", "--steps", "1"],
}
# They end with 1 where the doctor finds something to mend, or the two devices differ.
JUDGES = ("doctor", "parity, a step")
MOMENTS = {"first line": "loading", "header": "hf_mps finetune", "first step": "step 1/"}
IMPORTED = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes for each; default 5")
    parser.add_argument("--imports", type=int, default=0, metavar="N", help="the N packages that cost most")
    parser.add_argument("--skip-quickstart", action="store_true", help="the short commands alone")
    given = parser.parse_args()
    device = {} if sys.platform == "darwin" else {"HF_MPS_SIMULATE": os.environ.get("HF_MPS_SIMULATE", "1")}
    print(measured_on.line_of(device))  # compiles the simulated device where that is still to be done
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(given.rounds):
        for name, words in COMMANDS.items():
            found.setdefault(name, []).append(ended(words, {"HF_MPS": "0"} if name == FLOOR else None))
        if not given.skip_quickstart:
            for moment, figures in quickstart(device).items():
                found.setdefault(f"quickstart, {moment}", []).append(figures)
    if not given.skip_quickstart:
        for name, figures in verbs(device, given.rounds):
            found.setdefault(name, []).append(figures)
    print(f"{'medians of ' + str(given.rounds):<26}{'clock':>9}{'processor':>12}")
    for name, figures in found.items():
        clock, processor = (statistics.median(each) for each in zip(*figures, strict=True))
        print(f"{name:<26}{clock:>7.2f} s{processor:>10.2f} s")
    if given.imports:
        print("\n".join(dear(device, given.imports)))


def ended(
    words: list[str], device: dict[str, str] | None = None, folder: str | None = None, codes: tuple[int, ...] = (0,)
) -> tuple[float, float]:
    """Seconds by the clock and of the processor that `python *words` took, with no variable of ours but `device`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_MPS")}
    environment |= {**device, "HF_HUB_OFFLINE": "1"} if device is not None else {}
    before, start = _children(), time.perf_counter()
    ran = subprocess.run([sys.executable, *words], env=environment, cwd=folder, capture_output=True, check=False)
    if ran.returncode not in codes:
        sys.exit(f"python {' '.join(words)} ended with {ran.returncode}: {ran.stderr.decode()[-500:]}")
    return time.perf_counter() - start, _children() - before


def verbs(device: dict[str, str], rounds: int) -> Iterator[tuple[str, tuple[float, float]]]:
    """What each verb took, as many times as there are rounds; the verbs take turns."""
    with tempfile.TemporaryDirectory() as folder:
        ended([*QUICKSTART, "output_dir=run"], device, folder)
        rows = "".join(f"sentence {number},another one\n" for number in range(16))
        Path(folder, "rows.csv").write_text(f"sentence1,sentence2\n{rows}", encoding="utf-8")
        left_out = {"export onnx"} if any(find_spec(name) is None for name in ("onnx", "onnxruntime")) else set()
        for number in range(rounds):
            for name, words in VERBS.items():
                if name not in left_out:
                    whole = [word.format(new=f"{name.replace(' ', '-')}-{number}") for word in words]
                    yield name, ended(whole, device, folder, (0, 1) if name in JUDGES else (0,))


def quickstart(device: dict[str, str]) -> dict[str, tuple[float, float]]:
    """When the quickstart came to each moment: seconds by the clock, and of the processor so far."""
    import psutil

    environment = {**os.environ, **device, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    found: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, *QUICKSTART]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, env=environment, cwd=folder, text=True, **streams) as run:
            process = psutil.Process(run.pid)
            assert run.stdout is not None
            for line in run.stdout:
                words = " ".join(line.split())
                for moment, sign in MOMENTS.items():
                    if sign in words and moment not in found:
                        used = process.cpu_times()
                        found[moment] = (time.perf_counter() - start, used.user + used.system)
                if len(found) == len(MOMENTS):
                    run.kill()  # what comes behind is no start
                    break
    if len(found) < len(MOMENTS):
        sys.exit(f"the quickstart ended before its first step; next: python {' '.join(QUICKSTART)}")
    return found


def dear(device: dict[str, str], most: int) -> list[str]:
    """The packages whose modules took longest to import, up to the end of a run of two steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-X", "importtime", *QUICKSTART]
        environment = {**os.environ, **device, "HF_HUB_OFFLINE": "1"}
        ran = subprocess.run(command, env=environment, cwd=Path(folder), capture_output=True, text=True, check=False)
    seconds: Counter[str] = Counter()
    for microseconds, module in IMPORTED.findall(ran.stderr):
        seconds[module.partition(".")[0]] += int(microseconds)
    total = sum(seconds.values()) / 1e6
    lines = [f"imports of the quickstart: {total:.1f} s by the clock"]
    return lines + [f"{name:<26}{spent / 1e6:>7.2f} s" for name, spent in seconds.most_common(most)]


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
