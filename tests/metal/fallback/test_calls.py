"""Each kind of call works as on the CPU: in-place, out=, lists, generators, devices, zero sizes, graphs."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_mps.core.releases import torch_release
from hf_mps.metal import fallback
from hf_mps.metal.fallback import MetalFallbackWarning
from hf_mps.metal.fallback.accounting import ledger
from hf_mps.metal.operators.table import table
from tests.metal.fallback.calls import CALLS, Made
from tests.metal.simulator.conformance.compare import outcome

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore")


def used() -> set[str]:
    return {entry.operator for entry in fallback.report().operators}


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_without_samples_gives_what_the_cpu_gives(name: str, way: str) -> None:
    full = f"aten::{name}"
    if table().kind(full) == "native":
        pytest.skip("has a Metal kernel in this torch")
    found = outcome(lambda: CALLS[name](Made("cpu")), lambda: CALLS[name](Made("mps")))
    assert found.kind in ("same", "close"), found.detail
    assert table().kernel_owners.get(full, full) in used()


@pytest.mark.skipif(torch_release() != (2, 13, 0), reason="later releases have kernels for some")
def test_each_of_them_lacks_a_kernel_in_torch_2_13() -> None:
    assert not [name for name in CALLS if table().kind(f"aten::{name}") == "native"]


def test_an_out_tensor_of_the_wrong_size_is_resized_with_torchs_warning(way: str) -> None:
    x, where = torch.arange(6.0, device="mps"), torch.tensor([1, 3], device="mps")
    out = torch.zeros(5, device="mps")
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        returned = torch.take(x, where, out=out)
    assert returned is out
    assert out.tolist() == [1.0, 3.0]
    empty = torch.empty(0, device="mps")
    assert torch.take(x, where, out=empty).tolist() == [1.0, 3.0]


def test_an_out_tensor_in_a_larger_one_is_written_there_and_nowhere_else(way: str) -> None:
    whole = torch.zeros(4, 3, device="mps")
    torch.special.airy_ai(torch.ones(4, device="mps"), out=whole[:, 1])
    assert torch.equal(whole.cpu()[:, 1], torch.special.airy_ai(torch.ones(4)))
    assert whole.cpu()[:, ::2].abs().sum() == 0


def test_memory_that_overlaps_is_refused_or_right_as_on_the_cpu(way: str) -> None:
    def shifted(device: str) -> torch.Tensor:
        x = torch.rand(9, generator=torch.Generator().manual_seed(1)).to(device)
        torch.special.ndtri(x[:-1], out=x[1:])
        return x

    def itself(device: str) -> torch.Tensor:
        x = torch.rand(9, generator=torch.Generator().manual_seed(1)).to(device)
        return torch.special.ndtri(x, out=x)

    def spread(device: str) -> torch.Tensor:
        return torch.rand(1, device=device).expand(4).logit_()

    for call in (shifted, spread):
        with pytest.raises(RuntimeError, match=r"overlap|single memory location"):
            call("cpu")
        with pytest.raises(RuntimeError, match=r"overlap|single memory location"):
            call("mps")
    torch.testing.assert_close(itself("mps").cpu(), itself("cpu"))


def test_in_place_writes_the_callers_tensor_and_its_views(way: str) -> None:
    base = torch.full((3, 4), 0.25, device="mps")
    column = base.t()[1]
    version = base._version
    assert column.logit_() is column
    torch.testing.assert_close(base.cpu()[:, 1], torch.full((3,), 0.25).logit())
    assert base.cpu()[:, 0].tolist() == [0.25] * 3
    assert base._version > version, "autograd sees that the tensor was written"


def test_gaps_and_strange_strides_change_nothing(way: str) -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    for look in (
        lambda t: t.permute(2, 0, 1),
        lambda t: t[:, ::2, 1:],
        lambda t: t[0, 0].expand(3, 4),
        lambda t: t[:, 1],
    ):
        expected = look(x).mode(-1)
        got = look(x.to("mps")).mode(-1)
        assert torch.equal(got.values.cpu(), expected.values)
        assert torch.equal(got.indices.cpu(), expected.indices)


def test_zero_sized_tensors_work(way: str) -> None:
    nothing = torch.empty(0, 3, device="mps")
    assert torch.take(nothing, torch.empty(0, dtype=torch.int64, device="mps")).shape == (0,)
    assert nothing.logit_().shape == (0, 3)
    assert torch.linalg.svdvals(torch.empty(0, 0, device="mps")).shape == (0,)


def test_the_devices_seed_decides_what_is_drawn_and_the_cpus_numbers_stay(way: str) -> None:
    rates = torch.full((50,), 4.0, device="mps")
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second = torch.poisson(rates), torch.poisson(rates)
    assert torch.equal(torch.get_rng_state(), state), "the CPU's generator was not asked"
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(torch.poisson(rates), first)
    own = torch.Generator("mps").manual_seed(9)
    drawn = torch.poisson(rates, generator=own)
    assert torch.equal(torch.poisson(rates, generator=torch.Generator("mps").manual_seed(9)), drawn)
    assert 2.5 < drawn.mean().item() < 5.5
    assert torch.binomial(rates, torch.full_like(rates, 0.5)).max() <= 4


def test_noise_is_written_for_the_backward_pass(way: str) -> None:
    x, noise = -torch.ones(30, device="mps"), torch.empty(30, device="mps")
    result = aten.rrelu_with_noise(x, noise, 0.1, 0.3, True)
    torch.testing.assert_close(result, x * noise)
    out = torch.empty(30, device="mps")
    aten.rrelu_with_noise.out(x, noise, 0.1, 0.3, True, out=out)
    torch.testing.assert_close(out, x * noise)
    assert noise.min() >= 0.1
    assert noise.max() <= 0.3


def test_a_device_argument_stays_mps() -> None:
    assert aten._make_dep_token(device="mps").device.type == "mps"
    assert torch.logspace(0, 2, 3, device="mps").device.type == "mps"


def test_a_default_device_does_not_reach_into_the_kernels(way: str) -> None:
    torch.set_default_device("mps")
    try:
        assert torch.arange(6.0).mode().values.device.type == "mps"
        assert torch.tensor([0.25]).logit_().device.type == "mps"
    finally:
        torch.set_default_device(None)


def test_a_subclass_of_tensor_comes_through(way: str) -> None:
    class Named(torch.Tensor):
        pass

    x = torch.arange(4.0, device="mps").as_subclass(Named)
    assert isinstance(torch.take(x, torch.tensor([1], device="mps")), Named)


def test_gradients_flow_through_and_through_twice(way: str) -> None:
    def second(device: str) -> torch.Tensor:
        x = torch.tensor([0.3, 0.6], device=device, requires_grad=True)
        (first,) = torch.autograd.grad(torch.special.ndtri(x).sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(first.sum(), x)
        return again.cpu()

    torch.testing.assert_close(second("mps"), second("cpu"))


@pytest.mark.filterwarnings("error:.*autograd kernel was not registered.*")
def test_svd_has_its_gradient_without_a_warning(way: str) -> None:
    def gradient(device: str) -> torch.Tensor:
        a = torch.tensor([[2.0, 1.0], [0.5, 3.0]], device=device, requires_grad=True)
        u, s, v = torch.linalg.svd(a)
        (s.sum() + (u @ torch.diag(s) @ v)[0, 1]).backward()
        return a.grad.cpu()

    torch.testing.assert_close(gradient("mps"), gradient("cpu"))
    assert "aten::linalg_svd" not in used(), "it is made of others, and those are named"
    assert ("aten::_linalg_svd.U" in used()) is (torch_release() < (2, 14))
    with torch.inference_mode():
        torch.linalg.svd(torch.eye(2, device="mps"))


def test_an_upsampling_that_pytorch_sends_to_the_cpu_stays_on_metal() -> None:
    x = torch.rand(1, 2, 3, 3, 3, device="mps", requires_grad=True)
    result = torch.nn.functional.interpolate(x, scale_factor=2)
    result.sum().backward()
    assert torch.equal(result.detach().cpu(), torch.nn.functional.interpolate(x.detach().cpu(), scale_factor=2))
    assert x.grad.unique().tolist() == [8.0]
    assert used() == set()


def test_rms_norm_trains_on_metal_without_the_cpu() -> None:
    def gradients(device: str) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 12).view(3, 4).to(device).requires_grad_()
        w = torch.linspace(1, 2, 4).to(device).requires_grad_()
        (torch.nn.functional.rms_norm(x, (4,), w) ** 2).sum().backward()
        return [x.grad.cpu(), w.grad.cpu()]

    torch.testing.assert_close(gradients("mps"), gradients("cpu"))
    assert used() == set()


def test_quantization_aware_training_has_its_gradient(way: str) -> None:
    def gradient(device: str) -> torch.Tensor:
        x = torch.linspace(-2, 2, 9).to(device).requires_grad_()
        torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7).square().sum().backward()
        return x.grad.cpu()

    torch.testing.assert_close(gradient("mps"), gradient("cpu"))


def test_a_compiled_graph_may_hold_one(way: str) -> None:
    def function(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.multi_margin_loss(x * 2, labels).cos()

    x = torch.linspace(0, 1, 6, device="mps").view(2, 3).requires_grad_()
    labels = torch.tensor([2, 0], device="mps")
    function(x, labels).backward()
    expected, x.grad = x.grad, None
    torch.compile(function, backend="aot_eager", fullgraph=True)(x, labels).backward()
    torch.testing.assert_close(x.grad, expected)
    assert {"aten::multi_margin_loss", "aten::multi_margin_loss_backward"} <= used()


def test_fake_tensors_are_not_computed() -> None:
    with FakeTensorMode():
        x = torch.empty(3, 4, device="mps")
        result = x.mode(-1)
        assert result.values.device.type == "mps"
        assert result.indices.shape == (3,)
        assert torch.linalg.svd(x).S.shape == (3,)
    assert used() == set()


def test_a_float64_result_becomes_float32_and_is_said_once() -> None:
    with torch.library._scoped_library("hf_mps_double", "FRAGMENT") as library:
        library.define("halves(Tensor x) -> Tensor")
        library.define("both(Tensor x, Tensor y) -> (Tensor, Tensor)")
        library.impl("halves", lambda x: x.double() / 2, "CPU")
        library.impl("both", lambda x, y: (x.double(), y + 1), "CPU")
        x = torch.ones(3, device="mps")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            half = torch.ops.hf_mps_double.halves(x)
            torch.ops.hf_mps_double.halves(x)
            both = torch.ops.hf_mps_double.both(x, x)
        said = [one for one in seen if "gave float64 on the CPU, which Metal does not have" in str(one.message)]
        assert [one.category for one in said] == [MetalFallbackWarning]
        assert half.dtype == both[0].dtype == torch.float32
        assert half.tolist() == [0.5] * 3
        assert both[1].tolist() == [2.0] * 3


def test_large_tensors_go_without_a_copy_where_memory_is_shared_and_small_ones_by_copies() -> None:
    if not hasattr(torch.mps, "_host_alias_storage"):
        pytest.skip("this torch lends no device buffers (2.13 does)")
    for size, shared in ((100, 0), (1 << 20, 1)):
        fallback.reset()
        x = torch.full((size,), 0.25, device="mps")
        x.logit_()
        entry = next(one for one in fallback.report().operators if one.operator == "aten::logit_")
        assert entry.shared == shared
        assert entry.bytes == (0 if shared else 2 * 4 * size)
        torch.testing.assert_close(x.cpu(), torch.full((size,), 0.25).logit())


def test_a_large_result_is_written_into_device_memory() -> None:
    if not hasattr(torch.mps, "_host_alias_storage"):
        pytest.skip("this torch lends no device buffers (2.13 does)")
    x, labels = torch.randn(1 << 16, 3, device="mps"), torch.randint(3, (1 << 16,), device="mps")
    before = ledger.snapshot()
    losses = torch.nn.functional.multi_margin_loss(x, labels, reduction="none")
    assert torch.equal(losses.cpu(), torch.nn.functional.multi_margin_loss(x.cpu(), labels.cpu(), reduction="none"))
    (entry,) = ledger.report(before).operators
    assert (entry.shared, entry.bytes) == (1, 0)


def test_a_number_beside_a_tensor_is_a_number_as_on_the_cpu(way: str) -> None:
    whole = [torch.linspace(-1, 1, 5), torch.arange(3), torch.tensor(0.5, dtype=torch.float16), torch.tensor(2)]
    for x in whole:
        for call in (
            lambda y: torch.special.laguerre_polynomial_l(y, 3),
            lambda y: torch.special.laguerre_polynomial_l(2, y),
            lambda y: torch.special.legendre_polynomial_p(y, 2.0),
        ):
            try:
                expected = call(x)
            except RuntimeError:  # not for this dtype
                with pytest.raises(RuntimeError):
                    call(x.to("mps"))
                continue
            torch.testing.assert_close(call(x.to("mps")).cpu(), expected)


def test_errors_are_the_cpus_own(way: str) -> None:
    with pytest.raises(IndexError, match="out of range"):
        torch.take(torch.ones(3, device="mps"), torch.tensor([7], device="mps"))
    assert used() == set(), "a call that failed is not booked"
