"""Metal, then CUDA, then the CPU, unless HF_MPS_DEVICE says otherwise; a device that is not there is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.core.errors import UserError
from hf_mps.metal import device
from hf_mps.metal.device import probe
from tests.metal.device.machines import LINUX, MAC, Pretend

NO_METAL = (
    "this is Linux, not a Mac, and PyTorch 2.13.0 is built without Metal; "
    "for a simulated Metal device: HF_MPS_SIMULATE=1"
)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.13.0"))


def refusal() -> str:
    with pytest.raises(UserError) as caught:
        device.choose()
    return str(caught.value)


@pytest.mark.usefixtures("cuda")
def test_metal_comes_first_and_cuda_second(pretend: Pretend) -> None:
    pretend(MAC)
    assert str(device.choose()) == snapshot("mps (Metal passed its probe on Apple M2, macOS 15.6)")
    pretend(LINUX, built=False)
    assert str(device.choose()) == f"cuda (CUDA answers as NVIDIA H200; no Metal: {NO_METAL})"


@pytest.mark.usefixtures("no_cuda")
def test_the_cpu_is_what_remains_also_where_metal_fails_its_probe(pretend: Pretend) -> None:
    pretend(LINUX, built=False)
    assert str(device.choose()) == (f"cpu (no CUDA: PyTorch 2.13.0 is built without CUDA; no Metal: {NO_METAL})")
    pretend(MAC, trial=lambda: False)
    assert device.choose().value == "cpu"
    assert "no CUDA: there is no CUDA on a Mac; no Metal: a matrix product" in device.choose().reason


@pytest.mark.parametrize("wanted", ["mps", "cuda", "cpu"])
@pytest.mark.usefixtures("cuda")
def test_the_switch_decides(wanted: str, pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(MAC)
    monkeypatch.setenv("HF_MPS_DEVICE", wanted)
    assert device.choose().value == device.switch() == wanted
    assert device.choose().reason.startswith(f"HF_MPS_DEVICE={wanted} asks for it")
    assert device.metal().value is (wanted == "mps")


@pytest.mark.usefixtures("no_cuda")
def test_a_device_that_is_not_there_is_refused_with_its_reason(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(LINUX, built=False)
    monkeypatch.setenv("HF_MPS_DEVICE", "mps")
    assert refusal() == f"HF_MPS_DEVICE=mps: {NO_METAL}"
    monkeypatch.setenv("HF_MPS_DEVICE", "cuda")
    assert refusal() == snapshot(
        "HF_MPS_DEVICE=cuda: PyTorch 2.13.0 is built without CUDA; "
        "for a build that has it: https://pytorch.org/get-started/locally"
    )
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert refusal() == snapshot(
        "HF_MPS_DEVICE=cuda: PyTorch 2.13.0 is built for CUDA but finds no GPU it can use; see: nvidia-smi"
    )
    monkeypatch.setattr(torch.version, "cuda", None)
    pretend(MAC)
    assert refusal() == snapshot(
        "HF_MPS_DEVICE=cuda: there is no CUDA on a Mac; to train on the CPU: HF_MPS_DEVICE=cpu"
    )


@pytest.mark.usefixtures("no_cuda")
def test_with_the_layer_off_it_says_what_the_libraries_take(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS", "0")
    pretend(MAC, trial=lambda: False)
    assert str(device.choose()) == snapshot(
        "mps (HF_MPS=0 switches hf_mps off, and the libraries take the Metal that PyTorch sees on Apple M2, untried)"
    )
    pretend(LINUX, built=False, found=False)
    assert str(device.choose()) == f"cpu (no CUDA: PyTorch 2.13.0 is built without CUDA; no Metal: {NO_METAL})"


@pytest.mark.parametrize("wanted", ["mps", "cpu"])
def test_the_switch_is_refused_while_the_layer_is_off(
    wanted: str, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(MAC)
    monkeypatch.setenv("HF_MPS", "0")
    monkeypatch.setenv("HF_MPS_DEVICE", wanted)
    assert refusal() == (
        f"HF_MPS=0 and HF_MPS_DEVICE={wanted} contradict each other: with hf_mps off no library follows the device; "
        f"unset one of them"
    )


def test_an_unknown_device_is_refused_with_the_nearest(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(MAC)
    monkeypatch.setenv("HF_MPS_DEVICE", "cudaa")
    assert refusal() == snapshot(
        "HF_MPS_DEVICE=cudaa is not a device it knows; allowed: mps, cuda, cpu; did you mean 'cuda'?"
    )


def test_pytorchs_own_question_has_the_probes_answer(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(dataclasses.replace(MAC, virtual=True), trial=lambda: False)
    assert torch.backends.mps.is_available() is False
    pretend(MAC)
    assert torch.backends.mps.is_available() is True
    monkeypatch.setenv("HF_MPS_DEVICE", "cpu")
    assert torch.backends.mps.is_available() is False
    assert torch.backends.mps.is_available.__doc__ == "Return a bool indicating if MPS is currently available."
    torch.backends.mps.is_available.cache_clear()  # as on the stock function, which callers may know


def accelerator() -> tuple[bool, int, str | None, str | None]:
    """What torch.accelerator answers: whether there is one, how many, which was built for, which can be used."""
    built, usable = torch.accelerator.current_accelerator(), torch.accelerator.current_accelerator(check_available=True)
    kinds = [None if each is None else each.type for each in (built, usable)]
    return (torch.accelerator.is_available(), torch.accelerator.device_count(), *kinds)


@pytest.mark.usefixtures("simulated")
def test_the_accelerator_of_newer_libraries_follows_the_switch(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(MAC)
    assert accelerator() == (True, 1, "mps", "mps")
    monkeypatch.setenv("HF_MPS_DEVICE", "cpu")
    assert accelerator() == (False, 0, None, None)
    monkeypatch.setenv("HF_MPS", "0")
    monkeypatch.delenv("HF_MPS_DEVICE")
    assert accelerator() == (True, 1, "mps", "mps")


@pytest.mark.usefixtures("simulated")
def test_the_accelerator_is_none_once_metal_has_failed_and_is_not_tried_where_pytorch_promises_not_to(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MPS_PROBE", "1")
    monkeypatch.setenv(probe.HANDED_DOWN, "")
    tried: list[bool] = []
    pretend(MAC, trial=lambda: bool(tried.append(True)))
    assert torch.accelerator.current_accelerator() == torch.device("mps")
    assert not tried
    assert torch.accelerator.device_count() == 0
    assert tried == [True]
    assert accelerator() == (False, 0, None, None)


@pytest.mark.usefixtures("simulated")
def test_another_accelerator_is_no_business_of_the_switch(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(LINUX, built=False, found=False)
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert accelerator() == (True, 4, "cuda", "cuda")
