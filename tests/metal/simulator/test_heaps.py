"""What the driver holds beside tensors, as MPSAllocator has it: heaps, buffers kept for their size, two watermarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# Each case is a child of one process that has allocated nothing: the allocator reads its variables at the first use.
PROGRAM = """
import json, os, sys, torch
from hf_mps.metal.simulator import strictness
MIB = 2**20

def block(mebibytes):
    return torch.empty(int(mebibytes * MIB), dtype=torch.uint8, device="mps")

def held():
    return round(torch.mps.driver_allocated_memory() / MIB)

def sizes():
    found, kept = [], []
    for size in (0.5, 5, 30, 1100, 1101):
        kept.append(block(size))
        found.append(held())
    live = torch.mps.current_allocated_memory() / MIB
    kept.clear()
    idle = held()
    torch.mps.empty_cache()
    return found, live, idle, held()

def kept():
    found = []
    for size in (100, 90, 130, 150, 60):
        del_me = block(size)
        del del_me
        found.append(held())
    first = [block(600), held()][1]
    return found, first, [block(580), held()][1]

def shapes(whole):
    with (strictness.on if whole else strictness.off)("whole-buffers"):
        for size in range(100, 500, 40):
            gone = block(size)
            del gone
        return held()

def beyond_the_limit():
    torch.mps.set_per_process_memory_fraction(0.2)
    tensors = [block(1000)]
    gone = block(600)
    del gone
    tensors.append(block(700))
    after = held()
    try:
        tensors.append(block(1000))
    except RuntimeError as error:
        return after, str(error).splitlines()[0]

def collected():
    tensors = [block(1000) for _ in range(14)]
    for size in (560, 800):
        gone = block(size)
        del gone
    before = held()
    tensors.append(block(900))
    return before, held()

def training():
    from hf_mps.metal import simulator
    model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.Linear(2048, 4)).to("mps")
    optimizer = torch.optim.Adam(model.parameters())
    for rows in (64, 48, 64):
        model(torch.ones(rows, 2048, device="mps")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return simulator.peak_memory() / MIB, held()

def first_use():
    try:
        block(1)
    except RuntimeError as error:
        return str(error).splitlines()[0]

HIGH, LOW = "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO"
CASES = {
    "sizes": (sizes, {}),
    "kept": (kept, {}),
    "whole": (lambda: shapes(True), {}),
    "joined": (lambda: shapes(False), {}),
    "limit": (beyond_the_limit, {}),
    "collected": (collected, {}),
    "never collected": (collected, {LOW: "0"}),
    "training": (training, {}),
    "low above high": (first_use, {HIGH: "0.9"}),
    "both lowered": (first_use, {HIGH: "0.9", LOW: "0.8"}),
    "without a limit": (first_use, {HIGH: "0"}),
    "no such ratio": (first_use, {HIGH: "2.5"}),
}
for name, (case, variables) in CASES.items():
    sys.stdout.flush()
    if os.fork() == 0:
        os.environ.update(variables)
        with strictness.on("heaps", "whole-buffers"):
            print(json.dumps([name, case()]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def found(mps: None) -> dict[str, object]:
    """What each case came to, in MiB, on a Mac of 16 GB."""
    environment = {name: value for name, value in os.environ.items() if "WATERMARK" not in name}
    environment["HF_MPS_SIMULATE"] = "m2-pro-16gb"
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_heaps_have_the_sizes_of_mpsallocator_and_are_given_back_when_the_cache_is_emptied(found: dict) -> None:
    growing, live, idle, emptied = found["sizes"]
    assert growing == [8, 8 + 32, 40 + 1024, 1064 + 1100, 2164 + 1102], "8 MiB, 32 MiB, 1 GiB, even numbers of MiB"
    assert live == 0.5 + 5 + 30 + 1100 + 1101, "live memory counts tensors alone"
    assert idle == growing[-1]
    assert emptied == 0


def test_a_buffer_is_kept_for_the_next_of_about_its_size(found: dict) -> None:
    small, first, second = found["kept"]
    assert small == [1024] * 5
    assert first == second == 1024 + 600, "32 MiB more than asked for are little enough"


def test_memory_grows_with_every_new_shape_unless_what_is_free_is_joined(found: dict) -> None:
    assert found["whole"] == 3 * 1024, "2.8 GB of buffers for ten sizes, of which one is needed at a time"
    assert found["joined"] == 1024, "from torch 2.14 on"


def test_what_was_kept_makes_room_before_the_limit_refuses(found: dict) -> None:
    after, refusal = found["limit"]
    assert after == 1000 + 700
    assert refusal.startswith("MPS backend out of memory (MPS allocated: 1.66 GiB, other allocations: 0 bytes, max ")
    assert "Tried to allocate 1000.00 MiB on " in refusal


def test_above_the_low_watermark_what_waited_longest_is_collected(found: dict) -> None:
    # 1.4 times the recommended 10.67 GiB: 14.93 GiB.
    assert found["collected"] == [14000 + 560 + 800, 14000 + 800 + 900]
    assert found["never collected"] == [15360, 15360 + 900]


def test_a_training_holds_about_a_heap_of_a_gigabyte_beside_its_tensors(found: dict) -> None:
    live, driver = found["training"]
    assert 600 < driver - live < 1064, "as device.memory.beside_live says, for people who plan"


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("low above high", "invalid low watermark ratio 1.4"),
        ("both lowered", None),
        ("without a limit", None),
        ("no such ratio", "invalid high watermark ratio 2.5"),
    ],
)
def test_a_low_watermark_above_the_high_one_is_refused_at_the_first_allocation(
    case: str, says: str | None, found: dict
) -> None:
    assert found[case] == says


FORKS = """
import os, threading, time, torch

held = [torch.empty(10, device="mps")]
going = True

def allocate():
    while going:
        torch.empty(10, device="mps")

threads = [threading.Thread(target=allocate) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(150):
    child = os.fork()
    if child == 0:
        held.clear()
        os._exit(0)
    end = time.monotonic() + 60
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            going = False
            raise SystemExit("a child waits for a lock that nobody holds")
        time.sleep(0.001)
going = False
"""


def test_a_process_forked_while_threads_allocate_can_free_what_it_has_from_its_parent(run_python) -> None:
    """Without Heaps' handlers of forks 4 children of 100 hang, as a worker of a data loader would."""
    ended = run_python("-W", "ignore", "-c", FORKS)
    assert ended.returncode == 0, ended.stderr[-500:]
