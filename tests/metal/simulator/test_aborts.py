"""What ends Python on a Mac ends it here: faults by name, with the lines of Apple's assertions, and nothing else does.

Each is tried in a child of this process, which does without autograd: that has its threads in the parent.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from hf_mps.core.releases import torch_release
from hf_mps.layer import guards
from hf_mps.layer.guards.catalogue import GUARDS
from hf_mps.metal.device import faults, machine
from hf_mps.metal.simulator import strictness

pytestmark = pytest.mark.usefixtures("mps")

aten = torch.ops.aten


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="mps")


def norm_backward(dtype: torch.dtype) -> None:
    rows, weight = ones(2, 4, dtype=dtype), ones(4)
    moments = [ones(2, 1), ones(2, 1)]
    aten.native_layer_norm_backward(rows, rows, [4], *moments, weight, weight, [True, True, True])


def linear_backward(rows: tuple[int, ...], weight: tuple[int, ...], grad: tuple[int, ...]) -> None:
    aten.linear_backward(ones(*rows), ones(*grad), ones(*weight), [True, True, False])


# Fault -> what it ends, what it says, and a call beside it that goes on.
CALLS: dict[str, tuple[Callable[[], None], str, Callable[[], None]]] = {
    "mixed-norm-backward": (
        lambda: norm_backward(torch.float16),
        "'mps.multiply' op requires the same element type for all operands and results",
        lambda: norm_backward(torch.float32),
    ),
    "vector-weight": (
        lambda: linear_backward((6, 3), (3,), (6,)),
        "'mps.matmul' op contracting dimensions differ 6 & 3",
        lambda: linear_backward((6, 3), (1, 3), (6, 1)),
    ),
    "deep-linear": (
        lambda: linear_backward((2, 1, 2, 1, 2), (4, 2), (2, 1, 2, 1, 4)),
        "failed assertion `Error: MLIR pass manager failed'",
        lambda: linear_backward((2, 1, 2, 3, 2), (4, 2), (2, 1, 2, 3, 4)),
    ),
    "empty-linear": (
        lambda: F.linear(ones(3, 0), ones(5, 0)),
        "device may not be nil",
        lambda: linear_backward((3, 2), (5, 2), (3, 5)),
    ),
}


def child(call: Callable[[], None]) -> tuple[int, str]:
    """How a child ends that makes a call: the signal that ended it, or 0, and what it wrote on stderr."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        os.dup2(writing, 2)
        torch.set_num_threads(1)  # OpenMP's threads do not live on in a forked process
        try:
            call()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as stream:
        said = stream.read()
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, said
    return (os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0), said


def test_every_abort_has_a_row() -> None:
    assert set(CALLS) == set(faults.ABORTS) <= set(faults.SIMULATED)


@pytest.mark.parametrize("name", CALLS)
def test_an_abort_ends_the_process_with_apples_words_and_nothing_else_does(name: str) -> None:
    ends, says, beside = CALLS[name]
    with guards.suspended(), strictness.off(*faults.ABORTS), strictness.on(name):
        ended, said = child(ends)
        assert ended == signal.SIGABRT
        assert says in said
        assert "failed assertion `" in said
        assert child(beside) == (0, "")
    with guards.suspended(), strictness.off(*faults.ABORTS):
        assert child(ends) == (0, "")


def test_the_installed_release_has_the_aborts_that_it_has_on_a_mac() -> None:
    release = torch_release()
    here = {"mixed-norm-backward", "vector-weight"} if release < (2, 14) else set()
    here |= {"empty-linear"} if release < (2, 14) and machine.present().macos_at_least(15) else set()
    assert here == strictness.active() & set(faults.ABORTS), "the default profile is no macOS 27"


TRIALS = """
from hf_mps.layer import guards
from hf_mps.layer.guards.catalogue import GUARDS
from hf_mps.metal.device import faults
from hf_mps.metal.simulator import strictness
import hf_mps, torch, transformers, accelerate
with strictness.on(*faults.ABORTS):
    for name in GUARDS.names:
        print(name, flush=True)
        guards.get(name).forget()
        guards.get(name).applies()
"""


def test_no_guards_trial_ends_python(run_python: Callable[..., object]) -> None:
    done = run_python("-c", TRIALS, env={"HF_MPS_SIMULATE": "m1-macos26-16gb"})
    assert (done.returncode, done.stdout.split()) == (0, list(GUARDS.names)), done.stderr[-2000:]
