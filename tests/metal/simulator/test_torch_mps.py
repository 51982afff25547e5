"""What `torch.mps`, `torch.backends.mps` and `torch.accelerator` answer on the simulated device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hf_mps.core.releases import torch_release
from hf_mps.layer import guards
from hf_mps.layer.guards.platform.memory import PYTORCHS
from hf_mps.metal import simulator

pytestmark = pytest.mark.usefixtures("mps")

MIB = 2**20


def test_torch_takes_it_for_a_mac() -> None:
    profile = simulator.loaded()
    assert torch.backends.mps.is_available()
    assert torch.backends.mps.is_built()
    assert torch.backends.mps.is_macos_or_newer(*profile.macos)
    assert not torch.backends.mps.is_macos_or_newer(profile.macos[0] + 1, 0)
    assert torch.backends.mps.get_name() == profile.chip
    assert torch.backends.mps.get_core_count() == profile.cores
    assert torch.mps.recommended_max_memory() == profile.recommended_max
    assert torch.accelerator.current_accelerator() == torch.device("mps")
    assert torch.accelerator.device_count() == torch.mps.device_count() == 1


def test_a_tensor_says_where_it_is() -> None:
    x = torch.ones(2, device="mps")
    assert x.device == torch.device("mps:0")
    assert x.is_mps
    assert repr(x) == "tensor([1., 1.], device='mps:0')"
    assert x.cpu().tolist() == x.tolist() == [1.0, 1.0]


def test_memory_figures_follow_tensors() -> None:
    torch.mps.empty_cache()
    before = torch.mps.current_allocated_memory()
    x = torch.empty(MIB, device="mps")
    assert torch.mps.current_allocated_memory() - before == 4 * MIB
    assert torch.mps.driver_allocated_memory() >= torch.mps.current_allocated_memory()
    simulator.reset_peak_memory()
    y = torch.empty(2 * MIB, device="mps")
    del y
    assert simulator.peak_memory() - torch.mps.current_allocated_memory() == 8 * MIB
    del x
    assert torch.mps.current_allocated_memory() == before


def test_a_view_and_a_gradient_of_it_cost_what_they_hold() -> None:
    before = torch.mps.current_allocated_memory()
    x = torch.zeros(MIB, device="mps", requires_grad=True)
    view = x[:10].view(2, 5)
    assert torch.mps.current_allocated_memory() - before == 4 * MIB
    with guards.suspended(kind="sentinel"):  # they keep the last losses, 64 at most
        view.sum().backward()
    assert x.grad is not None
    assert torch.mps.current_allocated_memory() - before >= 8 * MIB
    del x, view
    assert torch.mps.current_allocated_memory() == before


def test_a_fraction_of_memory_is_a_limit_with_pytorchs_own_text() -> None:
    torch.mps.empty_cache()
    torch.mps.set_per_process_memory_fraction(0.01)
    try:
        with pytest.raises(
            RuntimeError, match=r"MPS backend out of memory \(MPS allocated: .*, max allowed: "
        ) as caught:
            torch.empty(100 * MIB, device="mps")
        assert "PYTORCH_MPS_HIGH_WATERMARK_RATIO" in str(caught.value)
        assert torch.ones(3, device="mps").sum().item() == 3, "what fits still goes"
    finally:
        torch.mps.set_per_process_memory_fraction(PYTORCHS)
    assert torch.empty(100 * MIB, device="mps").numel() == 100 * MIB


@pytest.mark.parametrize("fraction", [-0.1, 2.5])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        torch.mps.set_per_process_memory_fraction(fraction)


def test_synchronize_events_and_the_profiler_answer() -> None:
    torch.mps.synchronize()
    start, end = torch.mps.Event(enable_timing=True), torch.mps.Event(enable_timing=True)
    start.record()
    torch.randn(200, 200, device="mps") @ torch.randn(200, 200, device="mps")
    end.record()
    end.synchronize()
    end.wait()
    assert end.query()
    assert 0 <= start.elapsed_time(end) < 60_000
    torch.accelerator.synchronize()


@pytest.mark.skipif(torch_release() < (2, 15), reason="torch.mps.Stream came with 2.15")
def test_streams_are_taken_from_a_pool_and_each_thread_has_its_own() -> None:
    streams: Any = torch.mps
    default = streams.default_stream()
    assert streams.current_stream() == default
    assert default.stream_id == 0
    taken = [streams.Stream().stream_id for _ in range(33)]
    assert set(taken) == set(range(1, 33))
    assert taken[0] == taken[32], "a pool of 32, in turn"
    mine = streams.Stream()
    with streams.stream(mine), ThreadPoolExecutor(1) as others:
        assert streams.current_stream() == mine == torch.accelerator.current_stream()
        assert others.submit(streams.current_stream).result() == default
        x = torch.ones(3, device="mps") * 2
        x.record_stream(default)
    mine.synchronize()
    assert (x.tolist(), streams.current_stream()) == ([2.0] * 3, default)
    assert repr(streams.Stream(stream_id=5)) == "<torch.mps.Stream stream_id=5>"
    with pytest.raises(RuntimeError, match="stream_id=33"):
        streams.Stream(stream_id=33)


def test_a_stream_of_torch_stream_cannot_be_asked_whether_it_is_done() -> None:
    with pytest.raises(RuntimeError, match="doesn't support querying streams"):
        torch.Stream(device="mps").query()


def test_the_host_alias_is_the_same_memory() -> None:
    if not hasattr(torch.mps, "_host_alias_storage"):
        pytest.skip("torch.mps._host_alias_storage came with 2.13")
    x = torch.arange(4.0, device="mps")
    before = torch.mps.current_allocated_memory()
    alias = torch.mps._host_alias_storage(x.untyped_storage())
    on_host = torch.empty(0).set_(alias, 0, (4,))
    assert on_host.device.type == "cpu"
    on_host[1] = 7
    torch.mps.synchronize()
    assert x.tolist() == [0.0, 7.0, 2.0, 3.0]
    assert torch.mps.current_allocated_memory() == before
    del x
    assert on_host.tolist() == [0.0, 7.0, 2.0, 3.0], "the alias keeps the memory alive"


# Random numbers: the device's own, apart from the CPU's.


def test_drawing_on_the_device_leaves_the_cpus_generator_alone_and_the_other_way_round() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3), torch.rand(3, device="mps")
    torch.manual_seed(5)
    for _ in range(4):
        torch.rand(7, device="mps")
    assert torch.equal(torch.rand(3), expected[0])
    torch.manual_seed(5)
    torch.rand(9)
    assert torch.equal(torch.rand(3, device="mps"), expected[1])
    assert not torch.equal(torch.rand(3, device="mps"), expected[1])


def test_the_state_can_be_saved_and_restored() -> None:
    torch.mps.manual_seed(3)
    torch.rand(3, device="mps")
    state = torch.mps.get_rng_state()
    assert state.device.type == "cpu"
    drawn = torch.rand(5, device="mps"), torch.randint(99, (5,), device="mps")
    torch.mps.seed()
    torch.mps.set_rng_state(state)
    assert torch.equal(torch.rand(5, device="mps"), drawn[0])
    assert torch.equal(torch.randint(99, (5,), device="mps"), drawn[1])


def test_a_generator_of_ones_own_is_apart_from_the_default_one() -> None:
    torch.mps.manual_seed(3)
    expected = torch.rand(3, device="mps")
    torch.mps.manual_seed(3)
    own = torch.Generator(device="mps").manual_seed(11)
    first = torch.rand(3, device="mps", generator=own)
    assert own.device.type == "mps"
    assert torch.equal(torch.rand(3, device="mps"), expected)
    assert torch.equal(torch.rand(3, device="mps", generator=torch.Generator("mps").manual_seed(11)), first)
    state = own.get_state()
    second = torch.rand(3, device="mps", generator=own)
    own.set_state(state)
    assert torch.equal(torch.rand(3, device="mps", generator=own), second)


def test_a_generator_of_another_device_is_refused() -> None:
    with pytest.raises(RuntimeError):
        torch.rand(3, device="mps", generator=torch.Generator())


def test_draws_have_their_distributions() -> None:
    torch.mps.manual_seed(0)
    n = 20_000
    uniform, normal = torch.rand(n, device="mps"), torch.randn(n, device="mps")
    assert 0 <= uniform.min().item() <= uniform.max().item() < 1
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.02)
    assert normal.mean().item() == pytest.approx(0, abs=0.03)
    assert normal.std().item() == pytest.approx(1, abs=0.03)
    assert torch.randint(3, 6, (n,), device="mps").unique().tolist() == [3, 4, 5]
    assert torch.randperm(50, device="mps").sort().values.tolist() == list(range(50))
    weights = torch.tensor([0.0, 1.0, 3.0], device="mps")
    picked = torch.multinomial(weights, n, replacement=True)
    assert (picked == 2).float().mean().item() == pytest.approx(0.75, abs=0.02)
    assert torch.bernoulli(torch.full((n,), 0.3, device="mps")).mean().item() == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout_scales_what_it_keeps_and_its_gradient_uses_the_same_mask(p: float) -> None:
    x = torch.ones(20_000, device="mps", requires_grad=True)
    y = torch.nn.functional.dropout(x, p)
    kept = y != 0
    assert kept.float().mean().item() == pytest.approx(1 - p, abs=0.02)
    if p < 1:
        assert torch.allclose(y[kept], torch.tensor(1 / (1 - p), device="mps"))
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
