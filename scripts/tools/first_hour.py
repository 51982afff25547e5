"""What only a real Mac can tell, step by step, into one file to send: docs/first-hour.md is the same list to type.

    python scripts/tools/first_hour.py
    python scripts/tools/first_hour.py --only doctor --only head-gradient --output doctor.json

Each step runs in a process of its own, so that one that ends by a fault of Metal costs itself alone; the file is
written after each. Exit code 1 where something was not as expected.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
LONGEST = 1800
"""Seconds that a step may take; the quickstart is the longest, some minutes on any Mac."""
KEPT = 20_000
"""Characters of what a step prints that go into the file, from the end."""

Judge = Callable[[int, str, str], "bool | None"]


def by_code(code: int, out: str, err: str) -> bool | None:
    """Well where the command says so itself."""
    return code == 0


def figures(code: int, out: str, err: str) -> bool | None:
    """Figures, of which none is wrong; a command that ends otherwise than with 0 or 1 failed."""
    return None if code in (0, 1) else False


def silent(code: int, out: str, err: str) -> bool | None:
    """Well where nothing at all was said."""
    return code == 0 and not (out + err).strip()


def by_experiment(code: int, out: str, err: str) -> bool | None:
    """What an experiment of scripts/tools/on_a_mac.py says of itself."""
    told = _object(out)
    return told["as_expected"] if told and "as_expected" in told else False


def by_trials(code: int, out: str, err: str) -> bool | None:
    """Well where every guard's trial found what the list of known problems has for this torch and Mac."""
    told = _object(out)
    if not told or "trials" not in told:
        return False
    as_listed = {True: ("faulty", "not tried"), False: ("right", "not tried")}
    return bool(told["trials"]) and all(each["verdict"] in as_listed[each["listed"]] for each in told["trials"])


@dataclass(frozen=True)
class Step:
    """A command, what it settles (letters and numbers are the project's own lists of doubts), and what is expected."""

    name: str
    settles: str
    command: str
    expected: str
    judge: Judge = by_experiment
    issues: tuple[str, ...] = ()


def _mac(name: str) -> str:
    return f"python scripts/tools/on_a_mac.py {name}"


STEPS = (
    Step(
        "import",
        "B1, B2: `import torch` warns of nothing with hf_mps in the environment",
        'python -W error -c "import torch"',
        "No line at all.",
        silent,
    ),
    Step(
        "start",
        "B2: what hf_mps adds to `import torch`; it creates no Metal device there",
        "python scripts/bench/bench_autoload.py --rounds 5",
        "Some 50 ms or less.",
        figures,
    ),
    Step(
        "doctor",
        "A1 to A4, A6, 8 to 10, 15 to 18: every guard's own trial of the device, each training kernel's, and all that"
        " the doctor sees",
        "hf-mps doctor --trials --json",
        "Each trial finds what is listed for this torch, chip and macOS; none ends its process.",
        by_trials,
        ("193487", "195163", "188438", "189495", "189563", "175189", "190056"),
    ),
    Step(
        "head-gradient",
        "A1: the gradient below a head of 50,257 words. Wrong without the guard on M1 and M2 up to torch 2.13",
        _mac("head-gradient"),
        "With the guard it is the CPU's to a thousandth. On M3 and later without it too.",
        issues=("153957", "193487"),
    ),
    Step(
        "evaluation",
        "A2: the loss of a causal model under no_grad in three precisions, by both ways to attend",
        _mac("evaluation"),
        "All are the CPU's to two hundredths.",
        issues=("195910", "191794"),
    ),
    Step(
        "out-of-range",
        "A5: an id and a label that are out of range",
        _mac("out-of-range"),
        "Zeros and no error up to torch 2.13, an AcceleratorError from 2.14 on.",
        issues=("144824", "178079"),
    ),
    Step(
        "twice",
        "A9: whether two equal trainings end in the same bits, and whether they do when torch is asked for that",
        _mac("twice"),
        "A few last bits apart by itself, none under torch.use_deterministic_algorithms(True).",
        issues=("195404",),
    ),
    Step(
        "repeated",
        "A7, 19: the same sums and half-precision layers again and again",
        _mac("repeated"),
        "Always the same bits.",
        issues=("178497", "180776", "181936"),
    ),
    Step(
        "precision",
        "whether float32 products keep all of their bits, also on M5, where MLX's have about 11 (mlx#3534, mlx#4411)",
        _mac("precision"),
        "Each relative error is below 1e-5; 8e-4 would be 11 bits.",
    ),
    Step(
        "copies",
        "D, F: copies to the device with non_blocking=True whose source is given back at once",
        _mac("copies"),
        "None is wrong, with the layer or without it.",
        issues=("189690", "181017"),
    ),
    Step(
        "fallback",
        "E: operators without a Metal kernel in place and into a given tensor, over shared memory",
        _mac("fallback"),
        "All are the CPU's.",
        issues=("141287",),
    ),
    Step(
        "fork",
        "B2: a child that is forked after `import torch` uses the device",
        _mac("fork"),
        "It ends as it does with HF_MPS=0.",
    ),
    Step(
        "workers",
        "D: a Trainer whose loader has two workers, started after the device was used",
        _mac("workers"),
        "It ends, and its first step takes some seconds at most.",
        issues=("178037",),
    ),
    Step(
        "batches",
        "F: batches that are moved without a wait, from memory that the next one is written to",
        _mac("batches"),
        "Each arrives whole, and a step takes less time than with stock's waits.",
        issues=("181017", "189690"),
    ),
    Step(
        "memory",
        "C1, C4: what the driver holds beside live tensors, and how much a process is granted",
        _mac("memory"),
        "Below 3 GB beside live memory; 4 GB or half of what is recommended are granted. A hosted runner grants 1 GB.",
        issues=("181485",),
    ),
    Step(
        "shapes",
        "C2: seconds a step over fifty lengths, with the guard that gives memory back and without it",
        _mac("shapes"),
        "The guard costs less than a fifth.",
        issues=("132596",),
    ),
    Step(
        "sizes",
        "12, 13: torch.cat to more than 2^31 elements, and a batched product of more than 2^32 where memory holds it",
        _mac("sizes"),
        "Both are right with their guards.",
        issues=("197636", "189960"),
    ),
    Step(
        "parity",
        "G: three training steps on the device against the CPU, module by module",
        "hf-mps parity quickstart --json",
        "The same within the tolerance.",
        by_code,
    ),
    Step(
        "trainer-step",
        "F: a Trainer's step with the whole layer and without it",
        "python scripts/bench/bench_trainer_step.py --rounds 20",
        "At most a few hundredths longer; waits that the layer saves may make it shorter.",
        figures,
    ),
    Step(
        "quickstart",
        "everything together: a BERT learns on the device",
        "HF_HUB_OFFLINE=1 hf-mps finetune quickstart",
        "F1 of 0.85 or more.",
        by_code,
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps, write the file after each, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [step.name for step in STEPS]
    parser.add_argument("--only", action="append", choices=names, help="a single step; may be given several times")
    parser.add_argument("--output", type=Path, default=Path("first-hour.json"), help="default first-hour.json")
    given = parser.parse_args(arguments)
    if given.output.exists():
        parser.error(f"{given.output} is there already; next: --output another.json")
    chosen = [step for step in STEPS if not given.only or step.name in given.only]
    report: dict[str, Any] = {"of": about(), "steps": []}
    for step in chosen:
        found = run(step)
        report["steps"].append(found)
        write(given.output, report)
        print(f"{found['verdict']:<15}  {step.name:<13}  {found['seconds']:6.1f} s  {step.expected}", flush=True)
    unlike = [found["step"] for found in report["steps"] if found["verdict"] == "not as expected"]
    print(f"next: send {given.output}" + (f"; not as expected: {', '.join(unlike)}" if unlike else ""))
    return 1 if unlike else 0


def run(step: Step) -> dict[str, Any]:
    """Run one step in a folder of its own; what it printed, how it ended, and whether that was expected."""
    begun = time.monotonic()
    variables, words = split(step.command)
    # A file and no pipe: what was printed is there also where the step is stopped.
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(words, cwd=folder, env={**os.environ, **variables}, stdout=out, stderr=err)
        try:
            code: int | str = process.wait(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = f"no end in {LONGEST} s"
        printed = []
        for stream in (out, err):
            stream.seek(0)
            printed.append(without_places(stream.read().decode("utf-8", errors="replace")))
    right = step.judge(code, *printed) if isinstance(code, int) and code >= 0 else False
    return {
        "step": step.name,
        "settles": step.settles,
        "command": step.command,
        "expected": step.expected,
        "verdict": {True: "as expected", False: "not as expected", None: "figures"}[right],
        "exit_code": code,
        "seconds": round(time.monotonic() - begun, 1),
        "told": _object(printed[0]) or printed[0][-KEPT:],
        "stderr": printed[1][-KEPT:],
    }


def without_places(text: str) -> str:
    """What a step printed, without the folders of whoever sends it."""
    return text.replace(str(CHECKOUT), "…").replace(str(Path.home()), "~")


def split(command: str) -> tuple[dict[str, str], list[str]]:
    """The variables before a command, and its words for this environment and from any folder."""
    import shlex

    words = shlex.split(command)
    variables = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    if words[0] == "hf-mps":
        words[:1] = [sys.executable, "-m", "hf_mps"]
    else:
        words[0] = sys.executable
    return variables, [str(CHECKOUT / word) if word.startswith("scripts/") else word for word in words]


def about() -> Mapping[str, Any]:
    """What the report is of: versions and the commit, the machine, and whether it is simulated."""
    from importlib import metadata

    import torch

    from hf_mps import __version__
    from hf_mps.metal.device import machine, simulated

    here = machine.present()
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    return {
        "hf_mps": __version__,
        "commit": asked.stdout.strip(),
        "torch": str(torch.__version__),
        **{name: metadata.version(name) for name in ("transformers", "accelerate")},
        "python": sys.version.split()[0],
        "chip": here.chip,
        "macos": here.macos,
        "memory": here.memory,
        "virtual": here.virtual,
        "simulated": simulated(),
    }


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report whole or not at all."""
    from hf_mps.core.files import write_json

    write_json(path, report)


def page() -> Iterator[str]:
    """The lines of docs/first-hour.md behind its title."""
    yield from (*INTRODUCTION.strip().splitlines(), "")
    for step in STEPS:
        links = ", ".join(f"[#{issue}](https://github.com/pytorch/pytorch/issues/{issue})" for issue in step.issues)
        settles = re.sub(r"^[A-Z\d][\w, ]*: ", "", step.settles)  # the file has the numbers of doubts, for us
        yield f"- **{step.name}**, `{step.command}`: {settles}. *{step.expected}*" + (f" {links}" if links else "")


INTRODUCTION = """
Nothing of hf_mps has run on a Mac yet: what is known comes from PyTorch's sources and issues, and from a simulated
device. With a Mac you can tell us what is true. One command runs all that is listed below, in half an hour or so, and
writes one file to send:

```console
$ git clone … hf_mps && cd hf_mps
$ make ready                            # sets everything up in .venv
$ source .venv/bin/activate
$ python scripts/tools/first_hour.py    # leaves first-hour.json
```

`make ready` installs PyTorch 2.15, or 2.14.1 before macOS 15 or Python 3.11. PyTorch 2.14 mended much of what is asked
below, on M1 and M2 above all, so a second round is worth its time: `pip install torch==2.13.0`, and
`python scripts/tools/first_hour.py --output first-hour-2.13.json`. Reports from macOS 14 are worth most: no hosted
runner has it any more. The file holds the chip, macOS, versions and what each step printed, without the checkout's
folder and your home folder.

Each step may also be typed alone. What is expected of it is in italics; the verdict in the file is `as expected`, `not
as expected` or, where nothing can be wrong, `figures`. Whatever is not as expected is news, also where it is better.
"""


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that a command printed, alone or as its last line; None where there is none."""
    for part in (text, *reversed(text.strip().splitlines())):
        try:
            found = json.loads(part)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return None


if __name__ == "__main__":
    sys.exit(main())
