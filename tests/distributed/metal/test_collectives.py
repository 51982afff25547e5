"""The backend `metal` over several hosts of one simulated Metal device each: what it moves, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import launch_hosts

pytestmark = [pytest.mark.process, pytest.mark.together]
PROGRAMS = Path(__file__).parent / "programs"
HOSTS = [2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.nightly])]


def lines_of_main(hosts: int, program: str, *words: str, **kwargs: Any) -> list[dict[str, Any]]:
    """The JSON lines that rank 0 of a program prints; every process of it must have ended well."""
    done = launch_hosts(hosts, PROGRAMS / program, *words, timeout=300, **kwargs)
    assert [each.returncode for each in done] == [0] * hosts, "\n".join(each.stderr[-2000:] for each in done)
    return [json.loads(line) for line in done[0].stdout.splitlines() if line.startswith('{"')]


@pytest.fixture(scope="module", params=HOSTS)
def hosts(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def lines(hosts: int) -> list[dict[str, Any]]:
    """What the programs say, all run by the same processes; DDP's are last: one of its ranks goes away."""
    return lines_of_main(hosts, "together.py", "fsdp.py", "collectives.py", "ddp.py")


def test_fsdp2_shards_gradients_and_the_optimizer_s_states(hosts: int, lines: list[dict[str, Any]]) -> None:
    said = lines[0]
    assert said["far"] < 1e-6
    assert said["held"] <= said["total"] / hosts + 3 * 33, "a rank holds its part of the states alone"
    assert said["copied"] == 0


def test_every_collective_is_gloo_s_to_the_bit_for_every_dtype(hosts: int, lines: list[dict[str, Any]]) -> None:
    said = lines[1]
    assert said["backend"] == "metal"
    assert said["wrong"] == []
    assert said["count"] > 200
    assert said["copied"] == 0
    summed = hosts * (hosts + 1) / 2
    assert said["slice"] == [[summed, summed, 0, 0]] * 4, "what lies beside a slice was touched"
    assert said["bytes of a slice"] == 64
    assert said["uneven gather"] == [[rank] * (rank + 1) for rank in range(hosts)]
    assert said["uneven scatter"] == [hosts]
    assert said["row"] == [rank for rank in range(hosts) for _ in range(6)]
    assert said["uneven exchange"] == [[rank] for rank in range(hosts)]
    assert said["future"] == [[hosts, hosts]]
    assert said["wait"] == [True, True]
    assert said["average"] == sum(range(hosts)) / hosts
    assert said["objects"] == list(range(hosts))
    assert said["pair"] == [2, "metal"]
    assert said["refusal"].startswith("DistBackendError: allreduce of int16 tensors: Gloo, which the backend metal")


def test_a_step_of_ddp_is_one_process_s_step_with_the_same_global_batch(
    hosts: int, lines: list[dict[str, Any]]
) -> None:
    said, last = lines[2:]
    rounded = {"fp16_compress_hook": 1e-4, "builtin fp16": 1e-4, "bf16_compress_hook": 1e-3}
    assert {way: far for way, far in said["ways"].items() if far > rounded.get(way, 1e-6)} == {}
    assert len(said["ways"]) == 12
    assert said["step"]["copied"] == 0
    assert said["step"]["gradients"] <= said["step"]["payload"] < said["step"]["gradients"] + 64
    assert said["buffers"]
    assert said["joined"] == hosts * (hosts + 1) / 2
    assert said["kept"] < 8, "works stay after they are through"
    # The last rank went away: every way of waiting hears of it, in a line.
    assert set(last) == {"waits", "work", "future"}
    # Whether the closing or an answer to what was sent after it comes first, the network decides.
    gone = re.compile(r"allreduce on rank 0: .*(Connection closed by peer|Connection reset by peer)")
    assert [line for line in last.values() if not gone.search(line)] == []
