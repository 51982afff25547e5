"""Attention without gradients: what a trial finds, which calls are cured and how, and which never meet the guard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_mps import guards
from hf_mps.guards.numerics import attention_no_grad
from hf_mps.simulator import strictness
from tests.guards.experiments import inference
from tests.hazards import device

NAME = "attention-no-grad"
HALVES = ("float16", "bfloat16")
ALL = ("float32", *HALVES)


@pytest.fixture(autouse=True)
def _settled(untouched: None) -> Iterator[None]:
    """The guard as it is in a process that has just begun, with a torch that has the faults."""
    with device.mac(torch="2.8.0"):
        guards.get(NAME).forget()
        yield


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def attend(*tensors: torch.Tensor, **settings: Any) -> torch.Tensor:
    """On the device, without gradients; the result is back on the CPU."""
    with torch.no_grad():
        query, key, value = (tensor.to("mps") for tensor in tensors)
        return F.scaled_dot_product_attention(query, key, value, **settings).cpu()


def tried() -> bool:
    return guards.get(NAME)._verdict is not None


# Fault -> the case that finds it, the dtypes that have it, and how that case is cured.
FOUND = {
    "causal-leak": ("causal", HALVES, "_by_mask"),
    "permuted-attention": ("permuted", ALL, "_by_copies"),
    "long-keys": ("long keys", HALVES, "_by_math"),
    "odd-keys": ("odd keys", ALL, "_by_math"),
    "masked-rows": ("masked", ALL, "_by_math"),
    "value-width": ("width of values", ALL, "_by_math"),
}


@pytest.mark.parametrize("fault", FOUND)
def test_a_trial_names_each_fault_and_finds_its_cure(fault: str) -> None:
    case, dtypes, cure = FOUND[fault]
    guard: Any = guards.get(NAME)
    with strictness.on(fault):
        verdict = guard.applies()
    assert verdict.value
    assert verdict.reason.startswith(f"tried on the device, without gradients: {case} in {', '.join(dtypes)}")
    assert {name.__name__ for name in guard._cures.values()} == {cure}


def test_where_the_device_is_right_its_own_kernels_are_called_with_what_came() -> None:
    query = drawn(2, 4, 20, 64)
    with guards.suspended(NAME):
        right = attend(query, query, query, is_causal=True)
    before = torch.get_rng_state(), torch.mps.get_rng_state()
    assert torch.equal(attend(query, query, query, is_causal=True), right)
    assert tried()
    assert not guards.get(NAME).verdict().value
    assert not guards.get(NAME).times
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.mps.get_rng_state(), before[1])


def test_where_the_device_is_right_later_calls_no_longer_come_through_the_guard() -> None:
    guard = guards.get(NAME)
    places = [put.place for put in guard.arounds]
    query = drawn(1, 2, 20, 64)
    right = attend(query, query, query, is_causal=True)
    assert places == [f"aten::{attention_no_grad.OPERATOR}"]
    assert not guard.arounds
    assert torch.equal(attend(query, query, query, is_causal=True), right)
    with guards.suspended(NAME):
        assert torch.equal(attend(query, query, query, is_causal=True), right)


def test_torch_without_a_way_to_its_kernels_attends_in_the_math_form(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = attention_no_grad.AttentionNoGrad()
    monkeypatch.delattr(torch.library, "get_kernel")
    guard.install(torch)
    query = drawn(1, 2, 20, 64, dtype=torch.float16)
    right = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    with strictness.on("causal-leak"):
        found = attend(query, query, query, is_causal=True)
    guard.release()
    assert torch.allclose(found.float(), right.float(), atol=1e-2)
    assert "does not give its kernel out" in guard.verdict().reason


def test_calls_that_no_fault_concerns_start_no_trial() -> None:
    model = inference.gpt2().to("mps")
    ids = torch.arange(20, device="mps")[None]
    model(input_ids=ids, labels=ids).loss.backward()  # with gradients: the math form
    attend(*(drawn(2, 4, 20, 64),) * 3)  # an encoder's sentences without padding
    assert not tried()


def test_only_the_calls_that_are_wrong_are_cured() -> None:
    half, full = drawn(1, 2, 20, 64, dtype=torch.bfloat16), drawn(1, 2, 20, 64)
    with guards.suspended(NAME):
        right = attend(half, half, half)
        math = attend(full, full, full, is_causal=True)
    with strictness.on("causal-leak"):
        attend(half, half, half, is_causal=True)
        assert guards.get(NAME).times == 1
        assert torch.equal(attend(half, half, half), right)
        assert torch.equal(attend(full, full, full, is_causal=True), math)
    assert guards.get(NAME).times == 1


def test_a_call_with_two_faults_takes_the_math_form() -> None:
    tensors = [drawn(2, length, 2, 64, dtype=torch.float16).transpose(1, 2) for length in (3, 1100, 1100)]
    query, key, value = (tensor.float() for tensor in tensors)
    right = F.scaled_dot_product_attention(query, key, value)
    query, key, value = (tensor.transpose(1, 2).to("mps").transpose(1, 2) for tensor in tensors)
    with strictness.on("permuted-attention", "long-keys"):
        found = F.scaled_dot_product_attention(query, key, value)
    assert torch.allclose(found.cpu().float(), right, atol=1e-2)


def test_grouped_heads_and_an_own_scale_come_through_a_cure() -> None:
    query, key = drawn(1, 4, 12, 64, dtype=torch.float16), drawn(1, 2, 12, 64, dtype=torch.float16)
    settings: dict[str, Any] = {"is_causal": True, "scale": 0.5, "enable_gqa": True}
    right = F.scaled_dot_product_attention(query, key, key, **settings)
    with strictness.on("causal-leak"):
        assert torch.allclose(attend(query, key, key, **settings).float(), right.float(), atol=1e-2)
    assert guards.get(NAME).times


def test_tracing_meets_nothing_of_it() -> None:
    with FakeTensorMode(), torch.no_grad():
        query = torch.empty(1, 2, 20, 64, device="mps", dtype=torch.float16)
        assert F.scaled_dot_product_attention(query, query, query, is_causal=True).shape == query.shape
    assert not tried()
    explained = torch._dynamo.explain(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True) + 1)
    with torch.no_grad():
        assert explained(torch.ones(1, 2, 20, 64, device="mps")).graph_break_count == 0


@pytest.mark.parametrize(("release", "put"), [("2.12.1", True), ("2.13.0", False), ("2.15.0", False)])
def test_a_release_without_the_faults_is_not_tried(release: str, put: bool) -> None:
    guard = guards.get(NAME)
    with device.mac(torch=release), strictness.on("causal-leak"):
        guard.forget()
        assert bool(guard.kernels) is put
        assert guard.verdict().value is put
        assert guard.tried().value


def test_a_trial_that_fails_leaves_the_call_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise MemoryError("no room for a trial")

    monkeypatch.setattr(attention_no_grad, "_found_wrong", broken)
    query = drawn(1, 2, 20, 64)
    with pytest.warns(guards.GuardNotice, match="no room for a trial"):
        assert attend(query, query, query, is_causal=True).shape == query.shape
    assert "no room for a trial" in str(guards.get(NAME).failure)
