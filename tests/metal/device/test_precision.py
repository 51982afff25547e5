"""A precision is chosen with its reason, and one that cannot be had is refused with what it would need."""

from __future__ import annotations

import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.core.errors import UserError
from hf_mps.metal.device import precision


def refusal(name: str, device: str) -> str:
    with pytest.raises(UserError) as caught:
        precision.requested(name, device)
    return str(caught.value)


@pytest.mark.parametrize(
    ("chip", "reason"),
    [
        ("Apple M1", "this chip emulates bf16 in float32, so bf16 would save memory and no time"),
        ("Apple M4", "gives the CPU's losses and needs no loss scaling; bf16 saves memory where it is short"),
    ],
)
def test_metal_trains_in_fp32_unless_asked(chip: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: chip)
    choice = precision.default("mps")
    assert choice.value == "fp32"
    assert choice.reason.startswith(reason)


@pytest.mark.parametrize(("native", "value"), [(True, "bf16"), (False, "fp32")])
def test_cuda_trains_in_bf16_where_the_gpu_has_it(native: bool, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA T4")
    assert precision.default("cuda").value == value


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_what_the_device_has_is_granted_and_trains(name: str) -> None:
    assert precision.requested(name).value == name
    dtype = getattr(torch, precision.DTYPES[name])
    layer = torch.nn.Linear(4, 2).to("mps")
    with torch.autocast("mps", dtype, enabled=name != "fp32"):
        loss = layer(torch.ones(3, 4, device="mps")).float().sum()
    loss.backward()
    assert torch.equal(layer.weight.grad.cpu(), torch.full((2, 4), 3.0))


def test_a_precision_that_cannot_be_had_names_what_it_needs() -> None:
    assert precision.default("cpu").value == "fp32"
    assert precision.default() == precision.default("mps")
    assert refusal("fp16", "cpu") == f"fp16 cannot be used on cpu: {precision.dtypes('cpu')['float16'].reason}"


def test_an_unknown_precision_is_refused_with_the_nearest() -> None:
    assert refusal("bf61", "mps") == snapshot("bf61 is no precision; allowed: fp32, bf16, fp16; did you mean 'bf16'?")
