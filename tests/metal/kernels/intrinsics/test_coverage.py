"""Every intrinsic that a kernel of the supported releases declares has a definition of exactly those types."""

import re
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from hf_mps.metal.kernels import intrinsics
from tests.metal.kernels.intrinsics.harness import linked, signature

# the declarations of the macOS 14 libraries of 2.12.1, 2.13.0 and 2.14.1
DECLARED = Path(__file__).with_name("declared.txt").read_text().splitlines()
BARRIERS = {"air.wg.barrier": "barrier", "air.simdgroup.barrier": "simdgroup_barrier"}


@pytest.mark.parametrize(
    "line", [line for line in DECLARED if "barrier" not in line], ids=lambda line: line.split("@air.")[1].split("(")[0]
)
def test_a_declared_intrinsic_is_defined_with_its_types(line: str) -> None:
    found = re.fullmatch(r"(.*) @(air[\w.]+)\((.*)\)", line)
    assert found
    returns, name, inside = found.groups()
    kind = intrinsics.kind(name)
    definition = intrinsics.lanes(name) if kind == "simd" else intrinsics.define(name)
    assert definition
    module = llvm.parse_assembly(linked([definition]))
    module.verify()
    if kind == "simd":
        assert intrinsics.define(name) is None
        assert signature(definition) == ("void", ["ptr", "ptr", "i32"])
    else:
        assert signature(definition)[0] == returns
        assert ", ".join(signature(definition)[1]) == inside


def test_all_names_are_here() -> None:
    assert len(DECLARED) == 220


@pytest.mark.parametrize(
    "name", ["air.exp.f8", "air.no_such_thing.f32", "air.simd_sum", "air.convert.f.f32", "air.min.i32", "exp", ""]
)
def test_an_unknown_name_is_not_guessed(name: str) -> None:
    assert intrinsics.define(name) is None
    assert intrinsics.lanes(name) is None


def test_barriers_have_a_kind_and_no_definition() -> None:
    for name, kind in BARRIERS.items():
        assert intrinsics.kind(name) == kind
        assert intrinsics.define(name) is None
