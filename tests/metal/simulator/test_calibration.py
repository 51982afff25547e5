"""What fails on PyTorch's Mac runners fails on the simulated device, and what passes there passes here."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from hf_mps.core.releases import torch_release
from hf_mps.metal.simulator import strictness

pytest.importorskip("expecttest", reason="PyTorch's operator samples import it")

from scripts.tools import calibrate
from scripts.tools.calibration_cells import Cell

PARTS = 12
"""A commit checks one of so many parts of the operators, another one another part; the script checks all."""
TELLING = {"addmm", "addr", "linalg.inv", "linalg.solve_triangular", "pow", "renorm", "sort", "std", "trunc"}
released = pytest.mark.skipif(torch_release()[:2] != (2, 13), reason="calibration.yaml is about the lists of 2.13")


def part_of_this_commit() -> int:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=calibrate.CHECKOUT, capture_output=True, check=False)
    return int(found.stdout.strip() or b"0", 16) % PARTS


@released
@pytest.mark.slow
@pytest.mark.rotated("/")
def test_the_device_fails_where_pytorchs_lists_say_so_and_nowhere_else() -> None:
    listed = calibrate.names_of_operators()
    numbers = [i for i, name in enumerate(listed) if name in TELLING or i % PARTS == part_of_this_commit()]
    cells = calibrate.in_processes(argparse.Namespace(profile="m2-pro-16gb", workers=1, list=None), numbers)
    assert {cell.operator for cell in cells} >= TELLING
    unexplained, needless = calibrate.explained(cells, calibrate.read_differences())
    assert not unexplained
    assert not needless, "these entries of calibration.yaml explain nothing any more: delete them"
    assert calibrate.share(cells, "passes") > 0.99


def test_every_known_difference_has_its_cause() -> None:
    listed = calibrate.names_of_operators()
    for entry in calibrate.read_differences():
        assert set(entry) <= {"listed", "operators", "dtypes", "cause", "sometimes", "reason"}
        assert entry["cause"] in calibrate.CAUSES
        assert set(entry["operators"]) <= set(listed)
        assert len(entry["reason"].split()) > 7


def test_a_new_difference_and_a_known_one_that_is_gone_are_both_found() -> None:
    known = [{"listed": "fails", "operators": ["pow"], "dtypes": ["int8"]}, {"listed": "fails", "operators": ["addr"]}]
    passes, fails = Cell("pow", "int8", "fails", "passes"), Cell("addr", "int8", "fails", "raises")
    new = Cell("mul", "int8", "passes", "differs", "…")
    assert calibrate.explained([passes, fails, new], known) == ([new], [known[1]])
    assert calibrate.explained([passes], known) == ([], []), "addr did not run"
    assert calibrate.explained([fails], [known[1] | {"sometimes": True}]) == ([], []), "this time it did not differ"


# Each result of a dtype that a Mac refuses, with its words.


def complexes(*shape: int) -> torch.Tensor:
    return torch.eye(*shape, device="mps", dtype=torch.complex64)


Call = Callable[[], torch.Tensor]
REFUSED: dict[str, tuple[Call, str]] = {
    "inverse": (lambda: torch.linalg.inv(complexes(2)), r"^linalg_inv: not supported for complex types yet!$"),
    "determinant": (
        lambda: torch.linalg.det(complexes(2)),
        r"^linalg\.lu_factor\(\): MPS doesn't support complex types\.$",
    ),
    "solution": (
        lambda: torch.linalg.solve(complexes(2), complexes(2)),
        r"^linalg\.lu_factor\(\): MPS (only supports floats|doesn't support complex types)\.$",  # since 2.14
    ),
    "triangular solution": (
        lambda: torch.linalg.solve_triangular(complexes(2), complexes(2), upper=True),
        r"^linalg\.solve\.triangular\(\); Only float is supported!$",
    ),
    "QR": (lambda: torch.linalg.qr(complexes(2))[0], "^linalg_qr: MPS currently supports float32 only$"),
    "renorm": (lambda: complexes(2).renorm(2, 0, 1), "^Failed to create function state object for: renorm_float2$"),
    "product times a complex number": (
        lambda: torch.addmm(complexes(2), complexes(2), complexes(2), alpha=1j),
        "^value cannot be converted to type double without overflow$",
    ),
    "outer product of integers": (
        lambda: torch.ones(2, 2, device="mps").long().addr(*torch.ones(2, 2, device="mps").long()),
        "^MPS device does not support addr for non-float input$",
    ),
    "bicubic of bytes": (
        lambda: F.interpolate(torch.ones(1, 1, 4, 4, device="mps", dtype=torch.uint8), size=(2, 2), mode="bicubic"),
        "^Failed to create function state object for: upsample_bicubic2d_uchar$",
    ),
}


# Factors and solutions of complex matrices, as the texts in the wheels say.
SINCE_2_15 = ("determinant", "solution", "triangular solution")


@pytest.mark.usefixtures("mps")
@pytest.mark.parametrize("name", [name for name in REFUSED if torch_release() < (2, 15) or name not in SINCE_2_15])
def test_a_dtype_that_metal_refuses_is_refused_in_its_words(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(RuntimeError, match=words):
        call()
    with strictness.off("refusals"):
        call()


@pytest.mark.usefixtures("mps")
def test_a_dtype_that_metal_computes_and_the_cpu_does_not_is_computed() -> None:
    halves = torch.tensor([0.5, 2.0], dtype=torch.float16)
    with pytest.raises(NotImplementedError):
        torch.special.bessel_j0(halves)
    found = torch.special.bessel_j0(halves.to("mps"))
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.cpu(), torch.special.bessel_j0(halves.float()).half())
    into = torch.empty(0, dtype=torch.float16, device="mps")
    torch.special.bessel_j0(halves.to("mps"), out=into)
    assert into.tolist() == found.tolist()
    bools = torch.tensor([True, False], device="mps")
    assert bools.trunc().tolist() == [True, False]
    assert bools.clone().trunc_().dtype == torch.bool
    assert torch.polar(halves.to("mps"), halves.to("mps")).dtype == torch.complex32


@pytest.mark.usefixtures("mps")
@released
def test_what_metal_makes_of_dtypes_otherwise() -> None:
    ties = torch.randint(4, (5_000,), generator=torch.Generator().manual_seed(0)).to("mps", torch.int8)
    stable = ties.cpu().sort(stable=True).indices.tolist()
    row = torch.full((1, 3), torch.nan, device="mps")
    numbers = torch.tensor([1 + 1j, 2 - 1j], device="mps")
    positive = torch.tensor([[4, 1j], [-1j, 4]], device="mps")
    assert ties.sort().indices.tolist() == stable
    assert row.nanmedian(1).values.tolist() == [0.0]
    assert numbers.var().dtype == torch.complex64
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        torch.linalg.cholesky(positive)
    with strictness.off("dtype-results"):
        assert ties.sort().indices.tolist() != stable
        assert row.nanmedian(1).values.isnan().all()
        assert numbers.var().dtype == torch.float32
        torch.linalg.cholesky(positive)


@pytest.mark.usefixtures("mps")
@released
def test_log_softmax_rounds_each_step_to_bfloat16() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    shifted = logits - logits.amax(-1, keepdim=True)
    rounded = shifted - shifted.exp().sum(-1, keepdim=True).log()
    assert not torch.equal(rounded, logits.log_softmax(-1))
    assert torch.equal(logits.to("mps").log_softmax(-1).cpu(), rounded)
    with strictness.off("dtype-results"):
        assert torch.equal(logits.to("mps").log_softmax(-1).cpu(), logits.log_softmax(-1))
