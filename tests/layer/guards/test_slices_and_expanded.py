"""Products into slices and of expanded tensors: what the faults do, where they are, and our own step without guard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_mps.layer import guards
from hf_mps.layer.fused_step.joint_projections import JointLinear, Plan
from hf_mps.layer.fused_step.short_attention import Attention, Call
from hf_mps.metal.simulator import strictness
from hf_mps.metal.training_kernels import attention
from tests import hazards
from tests.hazards import device
from tests.layer.guards.experiments import sizes

SLICED, EXPANDED = "sliced-products", "expanded-operands"
ONE, OTHER = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2)


def test_a_slice_is_never_written_and_gaps_are_written_over() -> None:
    right, one, other = ONE @ OTHER, ONE.to("mps"), OTHER.to("mps")
    with guards.suspended(SLICED), strictness.off("gapped-products"), strictness.on("sliced-products"):
        slices, wide = torch.zeros(2, 2, 2, device="mps"), torch.zeros(2, 4, device="mps")
        torch.mm(one, other, out=slices[1])
        torch.mm(one, other, out=wide[:, :2])
        assert not slices.cpu().any()
        assert not wide.cpu().any()
        assert torch.equal(torch.mm(one, other, out=slices[0]).cpu(), right)
    with guards.suspended(SLICED), strictness.off("sliced-products"), strictness.on("gapped-products"):
        torch.mm(one, other, out=slices[1])
        torch.mm(one, other, out=wide[:, :2])
        assert torch.equal(slices[1].cpu(), right)
        assert torch.equal(wide.cpu(), torch.tensor([[*right.flatten().tolist()], [0.0] * 4]))


def test_a_result_that_grows_is_written_and_another_dtype_is_torchs_own_error() -> None:
    with hazards.on(SLICED):
        guards.get(SLICED).forget()
        buffer = torch.zeros(9, device="mps")
        with pytest.warns(UserWarning, match="resized"):
            found = torch.mm(ONE.to("mps"), OTHER.to("mps"), out=torch.zeros(1, 1, device="mps"))
        assert torch.equal(found.cpu(), ONE @ OTHER)
        with pytest.raises(RuntimeError, match=r"[Dd]type|type"):
            torch.mm(ONE.to("mps"), OTHER.to("mps"), out=buffer.half()[5:].view(2, 2))


@pytest.mark.parametrize(("macos", "fault"), [("14.7", "sliced-baddbmm"), ("15.6", "gapped-baddbmm")])
def test_from_torch_2_14_on_baddbmm_alone_is_wrong_and_is_cured(macos: str, fault: str) -> None:
    def wrong(on: str) -> list[bool]:
        one, other = ONE.to(on), OTHER.to(on)
        places = [torch.ones(3, 2, 4, device=on)[1:, :, 1:3] for _ in range(3)]
        torch.baddbmm(places[0], one.expand(2, 2, 3), other.expand(2, 3, 2), beta=2, out=places[0])
        places[1].baddbmm_(one.expand(2, 2, 3), other.expand(2, 3, 2), alpha=3)
        torch.bmm(one.expand(2, 2, 3), other.expand(2, 3, 2), out=places[2])
        rights = [ONE @ OTHER + 2, 3 * (ONE @ OTHER) + 1, ONE @ OTHER]
        return [
            not torch.equal(place.cpu(), right.expand(2, 2, 2)) for place, right in zip(places, rights, strict=True)
        ]

    with device.mac(macos=macos, torch="2.14.1"), strictness.off("sliced-products", "gapped-products"):
        with strictness.on(fault), guards.suspended(SLICED):
            assert wrong("mps") == [True, True, False]
        with strictness.on(fault):
            guards.get(SLICED).forget()
            assert wrong("mps") == [False] * 3
            assert "baddbmm differ" in guards.get(SLICED).verdict().reason


def test_where_the_device_is_right_the_first_such_call_takes_the_kernels_away() -> None:
    buffer, one, other = torch.zeros(2, 2, 2, device="mps"), ONE.to("mps"), OTHER.to("mps")
    with device.mac(macos="14.7"), strictness.off(*guards.get(SLICED).faults):
        guards.get(SLICED).forget()
        assert torch.equal(torch.mm(one, other, out=buffer[1]).cpu(), ONE @ OTHER)
        assert not guards.get(SLICED).kernels
    with device.mac(macos="27.0"), strictness.off("expanded-mm", "expanded-operands", "expanded-gradient"):
        guards.get(EXPANDED).forget()
        assert torch.equal((one[:1].expand(40, 3) @ other).cpu(), ONE[:1].expand(40, 3) @ OTHER)
        assert not guards.get(EXPANDED).kernels


def test_products_that_are_cut_in_parts_reach_their_slices(tmp_path: Path) -> None:
    with hazards.on("huge-products", SLICED):
        for name in ("huge-products", SLICED):
            guards.get(name).forget()
        assert sizes.products_in_every_form(tmp_path)
        with guards.suspended(SLICED):
            assert not sizes.products_in_every_form(tmp_path)


@pytest.mark.parametrize("fault", ["sliced-products", "gapped-products"])
def test_the_fused_attention_needs_no_guard(fault: str) -> None:
    def gradients(where: str) -> list[Tensor]:
        draw = torch.Generator().manual_seed(0)
        given = [torch.randn(2, 3, 5, 4, generator=draw).to(where).requires_grad_() for _ in range(3)]
        Attention.apply(*given, Call(attention.Call(0.25), None)).square().sum().backward()
        return [each.grad.cpu() for each in given if each.grad is not None]

    with guards.suspended(SLICED), strictness.on(fault):
        torch.testing.assert_close(gradients("mps"), gradients("cpu"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fault", ["sliced-products", "gapped-products"])
def test_joint_adapters_need_no_guard(fault: str) -> None:
    def computed(where: str) -> list[Tensor]:
        draw = torch.Generator().manual_seed(0)
        shapes = ((6, 4), (6, 4), (2, 4), (2, 4), (6, 2), (6, 2))  # two layers with adapters of rank 2
        learned = [torch.randn(shape, generator=draw).to(where).requires_grad_() for shape in shapes]
        rows = torch.randn(2, 5, 4, generator=draw).to(where).requires_grad_()
        outs = JointLinear.apply(rows, Plan(torch.float32, 2, (0, 1), (1.0, 3.0)), *learned)
        torch.cat(outs, -1).square().sum().backward()
        return [each.detach().cpu() for each in (*outs, *(each.grad for each in (rows, *learned[2:])))]

    with guards.suspended(SLICED), strictness.on(fault):
        torch.testing.assert_close(computed("mps"), computed("cpu"), rtol=1e-4, atol=1e-4)
