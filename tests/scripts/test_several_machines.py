"""docs/several-machines.md works when typed: its console lines run on two hosts, with a network between them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.tools.hosts import Host, hosts, refusal, stop
from tests import CHECKOUT
from tests.distributed.launching import file_on_page

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(refusal()), reason=f"no hosts: {refusal()}")]
PAGE = (CHECKOUT / "docs" / "several-machines.md").read_text()
BLOCKS = [block.splitlines() for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)]
# Commands of this environment come first; two processes of a CPU each, as no host here has a Mac's GPU.
QUIET = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "HF_MPS_DEVICE": "cpu"}


@pytest.fixture(scope="module")
def macs() -> Iterator[list[Host]]:
    with hosts(2, rate="1gbit", latency="0.3ms") as made:
        yield made


def typed(macs: list[Host], lines: list[str], folder: Path) -> list[subprocess.Popen[str]]:
    """The lines of a block as they run, each on its machine."""
    environment = {**{name: value for name, value in os.environ.items() if name != "HF_MPS_SIMULATE"}, **QUIET}
    settings = {"cwd": folder, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    parted = [re.fullmatch(r"mac-(\d)\$ (.*)", line) for line in lines]
    # `nsenter --wd` would lead back here: the shell goes to the folder itself.
    return [macs[int(one[1])].start(["sh", "-c", f"cd {folder} && exec {one[2]}"], **settings) for one in parted if one]


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(lines, id=lines[0].split()[1] + str(at), marks=[pytest.mark.nightly] if at else [])
        for at, lines in enumerate(BLOCKS)
    ],
)
def test_both_machines_train(macs: list[Host], lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "machines.yaml").write_text(file_on_page("machines.yaml"))
    started = typed(macs, lines, tmp_path)
    try:
        said = [one.communicate(timeout=120)[0] for one in started]
    finally:
        for one in started:
            if one.poll() is None:
                stop(one)
    assert [one.returncode for one in started] == [0] * len(lines), "\n".join(said)
    assert "smoke run ended well" in said[0]
    assert all("hf_mps finetune" not in other for other in said[1:])  # one of them speaks
