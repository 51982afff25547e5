"""What training uses, on the simulated device with the CPU's numbers: layers, mixed precision, fakes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

pytestmark = pytest.mark.usefixtures("mps")

Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def plainly(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result = module(x)
    return result[0] if isinstance(result, tuple) else result


def gradients(module: nn.Module, x: torch.Tensor, device: str, call: Call) -> list[torch.Tensor]:
    """Output, the input's gradient and the parameters' gradients of `module`, computed on `device`, on the CPU."""
    module = copy.deepcopy(module).to(device)
    x = x.detach().clone().to(device).requires_grad_()
    y = call(module, x)
    weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float32).view(y.shape).to(device)
    (y.float() * weight).sum().backward()
    given = [y.detach(), x.grad, *(p.grad for p in module.parameters())]
    return [tensor.cpu() for tensor in given if tensor is not None]


def agree(module: nn.Module, x: torch.Tensor, call: Call = plainly) -> None:
    torch.manual_seed(1)
    for a, b in zip(gradients(module, x, "cpu", call), gradients(module, x, "mps", call), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


def test_a_convolution_over_channels_last_memory() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    agree(nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)), x)


def test_a_frozen_convolution_gives_its_input_a_gradient() -> None:
    layer = nn.Conv2d(3, 3, 3).requires_grad_(False)
    agree(layer, torch.randn(1, 3, 6, 6))


@pytest.mark.parametrize("kind", ["GRU", "RNN"])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2}, {"bidirectional": True}, {"batch_first": True, "bias": False}], ids=str
)
def test_recurrent_layers(kind: str, options: dict[str, int]) -> None:
    torch.manual_seed(0)
    agree(getattr(nn, kind)(5, 6, **options), torch.randn(4, 3, 5))


# Mixed precision.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_what_it_casts_on_a_mac(dtype: torch.dtype) -> None:
    x, w = torch.randn(4, 4, device="mps"), torch.randn(4, 4, device="mps", requires_grad=True)
    with torch.autocast("mps", dtype=dtype):
        product = x @ w
        assert product.dtype == dtype
        assert nn.functional.linear(x, w).dtype == dtype
        assert product.softmax(-1).dtype == torch.float32
        assert nn.functional.layer_norm(product, (4,)).dtype == torch.float32
        loss = nn.functional.mse_loss(product, x)
        assert loss.dtype == torch.float32
    loss.backward()
    assert w.grad.dtype == torch.float32
    assert (x @ w).dtype == torch.float32


def test_the_gradient_scaler_skips_an_overflow_and_goes_on() -> None:
    weight = nn.Parameter(torch.ones(2, device="mps"))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = torch.amp.GradScaler("mps", init_scale=1024.0, growth_interval=1)

    def step(factor: float) -> None:
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step(float("inf"))
    assert weight.tolist() == [1.0, 1.0]
    assert scaler.get_scale() == 512.0
    step(1.0)
    assert weight.tolist() == [0.5, 0.5]
    assert scaler.get_scale() == 1024.0
    again = torch.amp.GradScaler("mps")
    again.load_state_dict(scaler.state_dict())
    assert again.get_scale() == 1024.0


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"amsgrad": True}], ids=str)
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD"])
def test_optimizers_step_as_on_the_cpu(kind: str, options: dict[str, bool]) -> None:
    if kind == "SGD":
        options = {"momentum": 0.9, **{key: value for key, value in options.items() if key != "amsgrad"}}
    found = []
    for device in ("cpu", "mps"):
        weight = nn.Parameter(torch.linspace(-1, 1, 6).to(device))
        optimizer = getattr(torch.optim, kind)([weight], lr=0.1, **options)
        for _ in range(4):
            weight.grad = (weight.detach() * 2 + 1).clone()
            optimizer.step()
        found.append(weight.detach().cpu())
    torch.testing.assert_close(found[1], found[0])


# Fakes, hooks.


def test_fake_tensors_on_mps_go_forward_and_backward() -> None:
    with FakeTensorMode(), torch.device("mps"):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
        loss = nn.functional.cross_entropy(net(torch.randn(5, 3, 8, 8)), torch.zeros(5, dtype=torch.long))
        loss.backward()
        optimizer = torch.optim.AdamW(net.parameters())
        optimizer.step()
    assert loss.device == torch.device("mps:0")
    assert all(p.grad is not None and p.grad.shape == p.shape and p.grad.is_mps for p in net.parameters())


def test_anomaly_detection_names_the_operator() -> None:
    x = torch.zeros(2, device="mps", requires_grad=True)
    with (
        pytest.raises(RuntimeError, match=r"SqrtBackward0.* returned nan"),
        pytest.warns(UserWarning, match="SqrtBackward0"),
        torch.autograd.detect_anomaly(),
    ):
        (x.sqrt() * 0).sum().backward()


def test_threads_use_the_device_together() -> None:
    def work(number: int) -> float:
        x = torch.full((64, 64), float(number), device="mps", requires_grad=True)
        (x @ x).sum().backward()
        return x.grad.sum().item()

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(8)))
    assert found == [2.0 * 64**3 * number for number in range(8)]


# Without MALLOC_CHECK_ glibc finds a heap that was written over only when it next frees the neighbour.
POINTS = """
import torch
from torch import nn

weight, images = torch.randn(8, 4, 1, 1), torch.randn(2, 4, 8, 8)
last = torch.channels_last
for _ in range(100):
    layer = nn.Conv2d(4, 8, 1, 2, bias=False).to(device, memory_format=last)
    layer.weight.data.copy_(weight)
    layer(images.to(device).contiguous(memory_format=last).requires_grad_()).square().sum().backward()
rows = images[:, :, ::2, ::2].double()
right = 2 * torch.einsum("nohw,nihw->oi", torch.einsum("oi,nihw->nohw", weight.flatten(1).double(), rows), rows)
torch.testing.assert_close(layer.weight.grad.cpu().double().flatten(1), right, rtol=1e-4, atol=1e-4)
"""


def test_points_of_images_with_channels_last_do_not_corrupt_memory(run_python: Any) -> None:
    """oneDNN's kernel for AVX2 does, on the CPU (https://github.com/uxlfoundation/oneDNN/issues/6035)."""
    checked = {"MALLOC_CHECK_": "3", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    ended = run_python("-c", f"device = 'mps'\n{POINTS}", env=checked)
    assert ended.returncode == 0, ended.stderr
