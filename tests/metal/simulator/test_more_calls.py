"""Native operators that OpInfo's samples do not call: the CPU's results for these too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.func import grad, hessian, jvp, vmap

from tests.metal.simulator.conformance.compare import outcome

pytestmark = pytest.mark.usefixtures("mps")

aten = torch.ops.aten


def floats(device: str, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(-2, 2, count).view(shape).to(device)


def whole(device: str, *values: int) -> torch.Tensor:
    return torch.tensor(values).to(device)


def changed(tensor: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    return [change(tensor), tensor]


@pytest.mark.parametrize(
    "view",
    [
        lambda d, x: x.permute(1, 0),
        lambda d, x: x.unfold(0, 2, 1),
        lambda d, x: torch.view_as_complex(x),
        lambda d, x: torch.einsum("ab,cb->ac", floats(d, 3, 2), x),
    ],
    ids=["permute", "unfold", "view_as_complex", "einsum"],
)
@pytest.mark.parametrize("before", [True, False])
def test_a_view_in_inference_mode_is_normal_where_its_base_is(view: Any, before: bool) -> None:
    def found(device: str) -> torch.Tensor:
        base = floats(device, 4, 2)
        with torch.inference_mode():
            return view(device, base if before else base.clone())

    here, there = found("cpu"), found("mps")
    assert there.is_inference() == here.is_inference()
    assert torch.equal(there.cpu(), here)


CALLS: dict[str, Callable[[str], Any]] = {
    "shifts": lambda d: [whole(d, 1, 2, 9) << 2, whole(d, 8, 9) >> whole(d, 1, 2)],
    "shift in place": lambda d: changed(whole(d, 1, 2), lambda x: x.__ilshift__(3)),
    "compare in place": lambda d: [
        changed(floats(d, 5), lambda x, name=name: getattr(x, name)(0.5)) for name in ("eq_", "ge_", "lt_")
    ],
    "compare into out": lambda d: torch.gt(floats(d, 5), 0.5, out=torch.empty(0, dtype=torch.bool, device=d)),
    "clamp_max_": lambda d: changed(floats(d, 5), lambda x: x.clamp_max_(0.5)),
    "activations in place": lambda d: [
        changed(floats(d, 5), f) for f in (torch.nn.functional.hardswish, nn.Hardtanh(inplace=True), aten.gelu_)
    ],
    "scalar on the left": lambda d: [5 % floats(d, 4), 2 ** floats(d, 4), torch.remainder(7, whole(d, 2, 3))],
    "isin": lambda d: [torch.isin(2, whole(d, 1, 2)), torch.isin(whole(d, 1, 2), 2)],
    "searchsorted": lambda d: [torch.searchsorted(floats(d, 9), 0.3), torch.bucketize(0.3, floats(d, 9))],
    "scatter a value": lambda d: floats(d, 2, 3).scatter(1, whole(d, 0, 2).view(2, 1), 7.0, reduce="add"),
    "fill with a tensor": lambda d: floats(d, 3).fill_(torch.tensor(4.0)),
    "unique rows": lambda d: torch.unique(floats(d, 2, 2).repeat(2, 1), dim=0, return_inverse=True, return_counts=True),
    "unique neighbours": lambda d: torch.unique_consecutive(whole(d, 1, 1, 2, 1), return_counts=True),
    "median": lambda d: [floats(d, 3, 4).median(1), floats(d, 3, 4).nanmedian(0)],
    "norm in another dtype": lambda d: torch.norm(floats(d, 3, 4).half(), 2, 1, dtype=torch.float32),
    "set_": lambda d: [
        torch.empty(0, device=d).set_(floats(d, 6)),
        torch.empty(0, device=d).set_(floats(d, 6).untyped_storage(), 2, (2, 2), (2, 1)),
    ],
    "is_set_to": lambda d: (lambda x: [x.is_set_to(x.view(6)), x.is_set_to(x.clone())])(floats(d, 6)),
    "resize": lambda d: floats(d, 6).resize_(2, 2),
    "reflection and replication": lambda d: [
        nn.functional.pad(floats(d, 1, 2, 3, 4), (1, 1, 1, 1), mode) for mode in ("reflect", "replicate")
    ],
    "nearest-exact": lambda d: nn.functional.interpolate(floats(d, 1, 2, 3, 4), scale_factor=2, mode="nearest-exact"),
    "bicubic, antialiased": lambda d: nn.functional.interpolate(
        floats(d, 1, 1, 6, 6), size=(3, 3), mode="bicubic", antialias=True
    ),
    "weight norm": lambda d: torch._weight_norm_interface(floats(d, 3, 4), torch.ones(3, 1, device=d)),
    "batch norm without statistics": lambda d: nn.functional.batch_norm(floats(d, 4, 3), None, None, training=True),
    "embedding bag": lambda d: nn.functional.embedding_bag(
        whole(d, 1, 2, 0, 3), floats(d, 5, 2), whole(d, 0, 2), mode="max"
    ),
    "max unpooling": lambda d: (lambda p: nn.functional.max_unpool2d(*p, 2))(
        nn.functional.max_pool2d(floats(d, 1, 1, 4, 4), 2, return_indices=True)
    ),
    "cholesky solve": lambda d: torch.cholesky_solve(floats(d, 2, 1), torch.eye(2, device=d) * 2),
    "softmax into out": lambda d: torch.softmax(floats(d, 2, 3), 1, out=torch.empty(0, device=d)),
    "a view written through out": lambda d: (
        lambda x: [torch.add(x[0], 1, out=x[:, 1][:2].view(2)), x]
    )(floats(d, 2, 2)),
    "overlapping out": lambda d: torch.add(floats(d, 3), 1, out=torch.zeros(1, device=d).expand(3)),
    "foreach": lambda d: torch._foreach_mul([floats(d, 3), floats(d, 2, 2)], [2.0, 3.0]),
    "foreach in place": lambda d: (lambda xs: [torch._foreach_add_(xs, xs), xs])([floats(d, 3), floats(d, 2)]),
    "loss scale": lambda d: (lambda g, f: [
        torch._amp_foreach_non_finite_check_and_unscale_([g], f, torch.tensor(0.5, device=d)), g, f,
    ])(torch.tensor([1.0, float("inf")], device=d), torch.zeros(1, device=d)),
    "assert": lambda d: torch._assert_async(torch.tensor(True, device=d)),
    "a mask on the CPU": lambda d: floats(d, 3)[torch.tensor([True, False, True])],
    "indices": lambda d: [floats(d, 2, 3)[whole(d, 1, 0)], floats(d, 2, 3).gather(1, floats(d, 2, 3).argsort(1))],
    "attention": lambda d: nn.functional.scaled_dot_product_attention(*[floats(d, 1, 1, 3, 4)] * 3),
    "products": lambda d: [floats(d, 3, 2) @ floats(d, 2, 3), torch.einsum("ij,kj->ik", *[floats(d, 3, 2)] * 2)],
    "numbers of the host": lambda d: [floats(d, 3) * torch.tensor(2.0), floats(d, 3).half() * 2.0],
    "nothing": lambda d: [floats(d, 3)[:0].sum(), torch.empty(0, device=d) + 1],
    "complex": lambda d: torch.view_as_real(torch.fft.rfft(floats(d, 8))),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_cpus_result(name: str) -> None:
    found = outcome(lambda: CALLS[name]("cpu"), lambda: CALLS[name]("mps"))
    assert found.kind in ("same", "close") or (name == "overlapping out" and found.kind == "both raise"), found


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["sum", "mean", "max"])
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_a_bag_of_embeddings_returns_what_pytorch_expects_of_a_gpu(mode: int, include_last_offset: bool) -> None:
    """torch.compile asserts the sizes that its fake tensors have."""

    def bags() -> list[torch.Tensor]:
        weight, indices, offsets = floats("mps", 10, 4), whole("mps", 1, 2, 3, 4, 5), whole("mps", 0, 2, 2, 5)
        return list(torch._embedding_bag(weight, indices, offsets, False, mode, False, None, include_last_offset))

    found = bags()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert [each.shape for each in found] == [each.shape for each in bags()]
    assert found[1].tolist() == [0, 0, 2, 2, 2]


@pytest.mark.parametrize("kind", ["Dirichlet", "Gamma", "Beta", "StudentT"])
def test_distributions_draw_on_the_device(kind: str) -> None:
    one = torch.full((2,), 2.0, device="mps", requires_grad=True)
    arguments = (one, one) if kind in ("Gamma", "Beta") else (one + 3,)
    drawn = getattr(torch.distributions, kind)(*arguments).rsample((500,))
    assert drawn.is_mps
    assert drawn.isfinite().all()
    drawn.sum().backward()
    assert one.grad is not None


def test_random_integers_fill_a_tensor() -> None:
    x = torch.empty(5000, dtype=torch.int64, device="mps")
    assert x.random_(3).unique().tolist() == [0, 1, 2]
    assert x.random_(4, 6).unique().tolist() == [4, 5]
    assert x.random_().max().item() > 2**20


def test_functional_transforms() -> None:
    x = torch.linspace(-1, 1, 6).view(2, 3).to("mps")
    assert torch.equal(grad(lambda a: (a * a).sum())(x), 2 * x)
    assert torch.equal(jvp(torch.neg, (x,), (torch.ones_like(x),))[1], -torch.ones_like(x))
    torch.testing.assert_close(hessian(lambda a: (a**3).sum())(x[0]), torch.diag(6 * x[0]))
    weight = torch.ones(2, 3, device="mps")
    each = vmap(grad(lambda w, a: nn.functional.linear(a, w).square().sum()), in_dims=(None, 0))(weight, x)
    assert each.shape == (2, 2, 3)


def test_a_second_derivative_through_convolution_and_linear() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(18, 3))
    image, found = torch.randn(2, 1, 4, 4), []
    for device in ("cpu", "mps"):
        net.zero_grad()
        moved, x = net.to(device), image.to(device).detach().requires_grad_()
        (first,) = torch.autograd.grad(moved(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
        found.append([p.grad.cpu().clone() for p in moved.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) >= 3
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("weights", "sums"),
    [
        (torch.float32, [0.5, 4.0, 0.0, 0.0, 2.5]),
        (torch.float16, [0.5, 4.0, 0.0, 0.0, 2.5]),
        (torch.int32, [0, 3, 0, 0, 2]),
        (torch.int8, [0, 3, 0, 0, 2]),
        (torch.bfloat16, [0, 3, 0, 0, 2]),
    ],
    ids=str,
)
def test_bincount_cuts_weights_to_int32_but_for_float_and_half(weights: torch.dtype, sums: list[float]) -> None:
    given = torch.tensor([0.5, 1.5, 2.5, 2.5]).to(weights)
    found = torch.bincount(torch.tensor([0, 1, 1, 4], device="mps"), given.to("mps"))
    assert found.dtype == (weights if weights in (torch.float32, torch.float16) else torch.int32)
    assert found.tolist() == sums
