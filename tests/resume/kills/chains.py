"""Chains of up to three kills: a run is killed, goes on by the command that it names, and ends as the unbroken one.

A kill is a signal at the n-th operation of the process: a file of the run's folder that is opened, renamed or removed,
a write (of which half is on the disk), or a line that is printed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import CHECKOUT
from tests.resume.kills import variants
from tests.resume.kills.variants import VARIANTS, Variant

SOURCE = Path(__file__).with_name("at_operation.c")
LIMIT = 120.0
"""Seconds after which a run that takes two hangs."""
# What the clock, the number of calls and the attempts of a run have a part in; how far a stream has read ahead.
TIMED = re.compile(
    r"runtime|per_second|preparation_time|memory|seconds|step_time|waited|efficiency|rows_read|reason|guards|sentinels"
    r"|fallback"
)
WAY_ON = re.compile(r"to go on: (?:hf-mps|python -m hf_mps\.)\s?finetune (.*)")


@dataclass(frozen=True)
class Kill:
    """One signal: at which operation of the process it came, and what that was."""

    number: int
    at: int
    operation: str

    def __str__(self) -> str:
        return f"{signal.Signals(self.number).name} at {self.at} ({self.operation})"


@dataclass
class Chain:
    """How a chain ended: its kills, and what differs from the unbroken run, empty where nothing does."""

    variant: Variant
    device: str
    draw: str
    kills: list[Kill] = field(default_factory=list)
    differs: str = ""
    stuck: bool = False
    unusable: bool = False


class Processes:
    """The server (server.py) of a device, from its first use on, with the library that it starts under."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._library = folder / "at_operation.so"
        self._servers: dict[str, subprocess.Popen[str]] = {}

    def run(self, device: str, **asked: Any) -> dict[str, Any]:
        """Let the server of a device run a group of processes; how that ended."""
        server = self._servers.get(device) or self._started(device)
        assert server.stdin is not None
        assert server.stdout is not None
        print(json.dumps(asked), file=server.stdin, flush=True)
        answer = server.stdout.readline()
        assert answer, "the server ended, see what it printed"
        return json.loads(answer)

    def _started(self, device: str) -> subprocess.Popen[str]:
        if not self._library.exists():
            command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(self._library), str(SOURCE), "-ldl"]
            subprocess.run(command, check=True)
        simulated = device == "simulated"
        env = {name: value for name, value in os.environ.items() if not name.startswith("HF_MPS_")}
        env |= {"LD_PRELOAD": str(self._library), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        env |= {"HF_MPS_SIMULATE": "1" if simulated else "0", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
        env |= {"HF_MPS_FAULTS": "-atomic-order"} if simulated else {"HF_MPS_DEVICE": "cpu"}
        command = [sys.executable, "-W", "ignore", "-m", "tests.resume.kills.server"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(command, cwd=CHECKOUT, env=env, text=True, **pipes)

    def end(self) -> None:
        """End the servers; what they forked has ended before they answered."""
        for server in self._servers.values():
            server.communicate()
        self._servers.clear()


class Harness:
    """Runs chains of a variant on a device and compares each with the variant's unbroken run, which it runs once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes = Processes(folder)
        self._whole: dict[tuple[str, str], tuple[dict[str, Any], list[list[str]]]] = {}
        variants.write(folder)

    def chain(self, variant: Variant, device: str, draw: str) -> Chain:
        """The chain that the text `draw` draws."""
        left, operations = self._unbroken(variant, device)
        drawn, chain = random.Random(f"{variant.name} {device} {draw}"), Chain(variant, device, draw)
        place = self.folder / f"{variant.name}-{device}-{draw}"
        words, share = variant.arguments(f"{place.name}/run"), 1.0
        for _ in range(drawn.choice((1, 1, 2, 3))):
            hit, together = drawn.randrange(variant.ranks), drawn.random() < 0.5
            number, at = _drawn(drawn, operations[hit], share)
            ended = self._run(variant, device, words, place, number=number, at=at, hit=hit, together=together)
            done = ended["operations"][hit]
            if len(done) >= at:
                chain.kills.append(Kill(number, at, done[at - 1]))
                share = max(0.1, share - at / len(operations[hit]))
            said = "".join(ended["err"])
            words = shlex.split(found[1]) if (found := WAY_ON.search(said)) else words
            if self._wrong(chain, ended, killed=True):
                return chain
        ended = self._run(variant, device, words, place)
        if not self._wrong(chain, ended, killed=False):
            chain.differs = "; ".join(_differences(left, _left(place / "run")))
        if not chain.differs:
            shutil.rmtree(place)
        return chain

    def _wrong(self, chain: Chain, ended: dict[str, Any], *, killed: bool) -> bool:
        chain.stuck = ended["stuck"]
        refused = any(code == 2 for code in ended["codes"]) or (not killed and any(ended["codes"]))
        chain.unusable = refused and not chain.stuck
        if chain.stuck or chain.unusable:
            lines = [line for text in ended["err"] for line in text.splitlines() if line.strip()]
            chain.differs = f"{'stuck' if chain.stuck else 'unusable'}, exit {ended['codes']}: {' | '.join(lines[-3:])}"
        return bool(chain.differs)

    def _unbroken(self, variant: Variant, device: str) -> tuple[dict[str, Any], list[list[str]]]:
        key = (variant.name, device)
        if key not in self._whole:
            place = self.folder / f"{variant.name}-{device}-whole"
            ended = self._run(variant, device, variant.arguments(f"{place.name}/run"), place)
            assert not any(ended["codes"]), ended["err"]
            self._whole[key] = _left(place / "run"), ended["operations"]
        return self._whole[key]

    def _run(self, variant: Variant, device: str, words: Sequence[str], place: Path, **kill: Any) -> dict[str, Any]:
        place.mkdir(exist_ok=True)
        asked = {"number": 0, "at": 0, "hit": 0, "together": False, "limit": LIMIT, "ranks": variant.ranks, **kill}
        folder = str((place / "run").resolve())
        return self.processes.run(device, words=list(words), cwd=str(self.folder), folder=folder, **asked)


def _drawn(draw: random.Random, operations: list[str], share: float) -> tuple[int, int]:
    """A signal, and an operation in the last `share` of them: a line in a third of cases, a write in a tenth."""
    number = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
    kind = draw.choices(("line", "write", "file"), (33, 10, 57))[0]
    start = round(len(operations) * (1 - share))
    places = [
        place
        for place, operation in enumerate(operations[start:], start=1)
        if kind == (first if (first := operation.partition(" ")[0]) in ("line", "write") else "file")
    ]
    return int(number), draw.choice(places or [1])


def _left(folder: Path) -> dict[str, Any]:
    """What a run left, or each of a sweep's, that the clock has no part in: part by part."""
    left: dict[str, Any] = {"files": sorted(_files(folder))}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            left[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.name in ("results.json", "sweep.json"):  # a checkpoint may lack the evaluation in which it was saved
            content = json.loads(path.read_text(encoding="utf-8"))
            left |= {f"{name}:{key}": _without_clock(value) for key, value in content.items() if not TIMED.search(key)}
        elif path.suffix in (".csv", ".jsonl") and path.name != "sweep.csv":
            left[name] = path.read_bytes()
    return left


def _files(folder: Path) -> Iterator[str]:
    return (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_clock(one) for key, one in value.items() if not TIMED.search(key)}
    if isinstance(value, str):
        return re.sub(r"^.*/run(?=/|$)", "run", value)
    return [_without_clock(one) for one in value] if isinstance(value, list) else value


def _differences(whole: dict[str, Any], left: dict[str, Any]) -> list[str]:
    """What differs, a clause for each part."""
    found = []
    for name in dict.fromkeys([*whole, *left]):
        one, other = whole.get(name), left.get(name)
        if name == "files":
            more, less = (sorted(set(a) - set(b)) for a, b in ((other, one), (one, other)))
            found += [f"more files: {', '.join(more[:5])}"] if more else []
            found += [f"files are missing: {', '.join(less[:5])}"] if less else []
        elif one != other and one is not None and other is not None:
            found.append(f"{name}: {_first(one, other)}" if ".json:" in name else name)
    return found


def _first(one: Any, other: Any) -> str:
    """The first place where two values differ, in a few words."""
    if isinstance(one, dict) and isinstance(other, dict):
        key = next(key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key))
        return f"{key}: {_first(one.get(key), other.get(key))}"
    if isinstance(one, list) and isinstance(other, list):
        with suppress(StopIteration):
            return next(f"[{n}] {_first(a, b)}" for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        return f"{len(one)} entries unbroken, {len(other)} here"
    return f"{str(one)[:80]} unbroken, {str(other)[:80]} here"


def pairs(*names: str) -> list[tuple[Variant, str]]:
    """These variants, each with every device that it trains on."""
    return [(VARIANTS[name], device) for name in names for device in VARIANTS[name].devices]
