"""Which Mac and release have which fault, and before which kernels of the device a guard stands there."""

from __future__ import annotations

import pytest
import torch

from hf_mps.layer import guards
from hf_mps.layer.guards.numerics import operators
from hf_mps.layer.guards.numerics.layouts import TRIALS
from tests.hazards import device

SIZES = {"huge-products", "huge-cat", "embedding-grad", "conv-batch", "conv3d-layout"}
MISREAD = {"large-pad", "index-add-gaps", "lerp-weight", "scalar-views"}
LAID_OUT = {"sliced-products", "sliced-baddbmm", "gapped-products", "gapped-baddbmm"}
EXPANDED = {"expanded-mm", "expanded-operands", "expanded-gradient"}


@pytest.mark.parametrize(
    ("profile", "macos", "release", "of", "there"),
    [
        ("m4-pro-24gb", (26, 2), "2.13.0", SIZES, SIZES - {"conv3d-layout"}),
        ("m4-pro-24gb", (26, 2), "2.14.1", SIZES, SIZES),
        ("m4-pro-24gb", (26, 3), "2.14.1", SIZES, SIZES - {"conv3d-layout"}),
        ("m4-pro-24gb", (26, 3), "2.15.0", SIZES, SIZES - {"huge-cat", "conv3d-layout"}),
        ("m4-16gb", (14, 7), "2.13.0", MISREAD, MISREAD),
        ("m4-16gb", (26, 6), "2.13.0", MISREAD, MISREAD - {"index-add-gaps"}),
        ("m4-16gb", (14, 7), "2.14.1", MISREAD, {"large-pad", "lerp-weight"}),
        ("m4-16gb", (26, 6), "2.15.0", MISREAD, set()),
        ("m1-8gb", None, "2.13.0", LAID_OUT | EXPANDED, {"sliced-products", "sliced-baddbmm"}),
        ("m2-pro-16gb", None, "2.13.0", LAID_OUT, {"gapped-products", "gapped-baddbmm"}),
        ("m2-pro-16gb", None, "2.13.0", EXPANDED, EXPANDED - {"expanded-mm"}),
        ("m4-16gb", None, "2.13.0", LAID_OUT | EXPANDED, EXPANDED - {"expanded-mm"}),
        ("m5-macos27-24gb", None, "2.13.0", LAID_OUT | EXPANDED, EXPANDED),
    ],
)
def test_a_profile_has_what_upstream_says_of_its_system_and_release(
    profile: str, macos: tuple[int, int] | None, release: str, of: set[str], there: set[str]
) -> None:
    assert device.faults_of(profile, release, macos) & of == there


MM, ADDMM, LINEAR = {"mm", "mm.out"}, {"addmm", "addmm.out", "addmm_"}, {"linear_backward"}
BADDBMM = {"baddbmm.out", "baddbmm_"}
INTO = {"mm.out", "bmm.out", "addmm.out", "addmm_", *BADDBMM}
NONE: set[str] = set()


@pytest.mark.parametrize(
    ("name", "macos", "release", "kernels"),
    [
        ("sliced-products", "14.7", "2.13.0", INTO),
        ("sliced-products", "15.6", "2.13.0", INTO),
        ("sliced-products", "14.7", "2.14.1", BADDBMM),
        ("sliced-products", "15.6", "2.15.0", BADDBMM),
        ("sliced-products", "26.3", "2.13.0", NONE),
        ("expanded-operands", "14.7", "2.13.0", NONE),
        ("expanded-operands", "15.6", "2.13.0", ADDMM | LINEAR),
        ("expanded-operands", "15.6", "2.15.0", ADDMM),
        ("expanded-operands", "26.3", "2.13.0", ADDMM | LINEAR),
        ("expanded-operands", "26.4.1", "2.13.0", NONE),
        ("expanded-operands", "26.6", "2.15.0", NONE),
        ("expanded-operands", "27.0", "2.13.0", MM | ADDMM | LINEAR),
        ("expanded-operands", "27.1", "2.15.0", MM | ADDMM),
        ("permuted-activations", "14.7", "2.13.0", {*TRIALS}),
        ("permuted-activations", "15.6", "2.13.0", NONE),
        ("permuted-activations", "26.1", "2.13.0", {"native_batch_norm_backward"}),
        ("permuted-activations", "14.7", "2.14.1", {*TRIALS}),
        ("permuted-activations", "26.1", "2.14.1", NONE),
        ("large-pad", "14.7", "2.14.1", {*operators.OPERATORS}),
        ("large-pad", "26.6", "2.15.0", NONE),
        ("lerp-weight", "15.6", "2.13.0", {"lerp.Tensor", "lerp_.Tensor"}),
        ("lerp-weight", "26.6", "2.15.0", NONE),
        ("index-add-gaps", "14.7", "2.13.0", {"index_add_"}),
        ("index-add-gaps", "15.6", "2.13.0", NONE),
        ("index-add-gaps", "14.7", "2.14.1", NONE),
        ("linear-bias", "14.7", "2.13.0", NONE),
        ("linear-bias", "26.1", "2.14.0", NONE),
        ("conv3d-layout", "26.2", "2.14.0", {"_mps_convolution", "mps_convolution_transpose_backward"}),
        ("conv3d-layout", "26.3", "2.14.0", NONE),
        ("conv3d-layout", "26.2", "2.13.0", NONE),
        ("conv3d-layout", "15.6", "2.14.0", NONE),
    ],
)
def test_kernels_stand_only_where_release_and_macos_may_be_wrong(
    name: str, macos: str, release: str, kernels: set[str]
) -> None:
    guard = type(guards.get(name))()
    with device.mac(macos=macos, torch=release):
        guard.install(torch)
        try:
            assert {target.removeprefix("aten::") for target in guard.kernels} == kernels
            assert kernels or not guard.applies().value
        finally:
            guard.release()
