"""Products that sum over more than 32,766 values: what reaches an M1's kernels, and that other chips hear nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from transformers import GPT2Config, GPT2LMHeadModel

from hf_mps.core.releases import torch_release
from hf_mps.layer import guards
from hf_mps.layer.guards import kernel_overrides
from hf_mps.layer.guards.numerics import products
from hf_mps.metal.simulator import strictness
from tests.hazards import device

LONGEST = 32766
up_to_2_13 = pytest.mark.skipif(torch_release() >= (2, 14), reason="2.14 multiplies matrices rightly; batches not")


@pytest.fixture(autouse=True)
def _settled(untouched: None) -> None:
    """The guard as it is in a process that has just begun, its trial behind it."""
    guards.get("large-k").verdict()
    strictness.take_longest_sum()


def gpt2_step() -> int:
    """The longest sum that reaches a kernel in a training step of a small GPT-2 with the real vocabulary."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50257)).to("mps")
    ids = torch.arange(64, device="mps").view(2, 32)
    model(input_ids=ids, labels=ids).loss.backward()
    return strictness.take_longest_sum()


def test_no_product_of_a_gpt2_step_sums_over_more_than_the_chip_can() -> None:
    with guards.suspended("large-k"):
        assert gpt2_step() == 50257
    assert gpt2_step() <= LONGEST


def test_short_products_go_to_the_devices_own_kernel_as_they_are() -> None:
    one, other = torch.randn(2, 64, 300, device="mps").unbind()
    with guards.suspended("large-k"):
        right = one @ other.T
    assert torch.equal(one @ other.T, right)
    assert strictness.take_longest_sum() == 300
    assert "large-k" not in [each["name"] for each in guards.acted()]


@up_to_2_13
def test_a_trial_finds_the_fault_and_fills_memory_first() -> None:
    found = guards.get("large-k").applies()
    assert found.value
    assert found.reason == snapshot("tried on the device: mm, bmm, linear over 40,009 values differ from the CPU")
    # A trial that finds nothing clears no release that is known to have the fault.
    with strictness.off():
        found = guards.get("large-k").applies()
    assert found.value
    assert "whatever a trial found" in found.reason


@pytest.mark.parametrize(("profile", "state"), [("m1-8gb", "on"), ("m3-pro-18gb", "needless")])
def test_only_owners_of_a_chip_with_the_fault_hear_of_it(
    profile: str, state: str, run_python: Callable[..., Any]
) -> None:
    program = (
        "import torch; from hf_mps.layer import guards; from hf_mps.metal.simulator import strictness\n"
        "one = torch.ones(1, 16, 40009, device='mps'); (one @ one.mT).cpu()\n"
        "print(*('large-k' in each.name and each.state for each in guards.report().guards if each.name == 'large-k'))\n"
        "print('large-k-batched' in strictness.active(), strictness.take_longest_sum() > 32766)"
    )
    done = run_python("-c", program, env={"HF_MPS_SIMULATE": profile})
    assert done.stderr == ""
    if state == "on":
        assert done.stdout.splitlines()[:1] == ["acted"]
        assert done.stdout.splitlines()[1].startswith("True")
    else:
        assert done.stdout.splitlines() == ["needless", "False True"]


@pytest.mark.parametrize("release", ["2.13.0", "2.14.1"])
def test_from_2_14_on_long_sums_are_split_for_speed(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[str] = []
    monkeypatch.setattr(kernel_overrides, "before", lambda guard, name, *rest, **named: put.append(name))
    guard = products.LargeK()
    with device.mac(torch=release):
        guard.install(torch)
    assert {"mm", "addmm", "linear", "linear_backward", "bmm", "baddbmm"} < set(put)
    with device.mac(torch=release), strictness.off("large-k", "large-k-batched"):
        found = guard.applies()
    assert found.value
    assert ("slow kernel" in found.reason) is (release == "2.14.1")
