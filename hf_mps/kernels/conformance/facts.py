"""What is known of a difference: PyTorch's own issue, or why it is none. Facts, each with its source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Fact(NamedTuple):
    """A known difference of an operator; further fields narrow it down, and empty ones do not."""

    operator: str
    """The rule's operator, or its name before the dot: "scatter_add", "lerp.Scalar"."""
    says: str
    upstream: bool = True
    """PyTorch's fault; else a difference that is none, or one of the method."""
    link: str = ""
    dtypes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    before: str = ""
    """The first release that has not got it."""
    detail: str = ""
    """How the case's own words begin: "result 1:"."""
    up_to: float = math.inf
    """The largest error in units in the last place that it explains."""
    example: str = ""
    """A program that prints what the kernels give, and then what is right."""
    guard: str = ""
    """The guard that hides it, to be left out for the example."""


HALVES = ("float16", "bfloat16")
SCALER = "_amp_foreach_non_finite_check_and_unscale_"
MOMENTS = (
    "The second moment is kept, and read back for the step, in the parameter's dtype: a square below 6e-8 is 0 in"
    " float16, and the step is divided by epsilon alone. The CPU's step uses it before it is rounded. No issue is known"
)
FACTS = (
    Fact(
        SCALER,
        "A gradient with gaps in memory is walked as if it had none: half of it stays scaled, and what lies in the"
        " gaps is scaled (the single-tensor way in operations/Amp.mm). No issue is known",
        layouts=("strided",),
        example="""\
gradient, half = torch.full([8], 4.0, device="mps")[::2], torch.tensor(0.5, device="mps")
torch._amp_foreach_non_finite_check_and_unscale_([gradient], torch.zeros([], device="mps"), half)
print(gradient.tolist())
print([2.0, 2.0, 2.0, 2.0])""",
    ),
    Fact(
        "linalg_cholesky_ex",
        "Where a matrix is not positive definite, info counts from the beginning of the block of 32 rows"
        " (`info[bid.x] = kk + 1`), and a later block that fails overwrites it; linalg.cholesky's error then names"
        " another minor. No issue is known",
        dtypes=("float32",),
        before="2.14.1",
        detail="result 1:",
        example="""\
matrix = torch.diag(torch.tensor([1.0] * 32 + [-1.0]))
print(torch.linalg.cholesky_ex(matrix.to("mps")).info.item())
print(torch.linalg.cholesky_ex(matrix).info.item())""",
    ),
    Fact(
        "_fused_adam_",
        MOMENTS,
        dtypes=HALVES,
        example="""\
for where in ("mps", "cpu"):
    weight = torch.ones(1, dtype=torch.float16, device=where, requires_grad=True)
    weight.grad = torch.full_like(weight, 1e-3)
    torch.optim.Adam([weight], fused=True).step()
    print(weight.item())""",
    ),
    Fact("_fused_adamw_", MOMENTS, dtypes=HALVES),
    Fact(
        "digamma",
        "Below zero the fractional part is taken by fract(x), which is x + 1 rounded: of a number just below zero its"
        " last digits are lost (c10/metal/special_math.h; the CPU's modf keeps them). No issue is known",
        dtypes=("float32",),
        up_to=2e6,
        example="""\
number = torch.tensor([-4.7e-4])
print(number.to("mps").digamma().item())
print(number.double().digamma().item())""",
    ),
    Fact(
        "i0",
        "The exponential is computed in float16 and overflows from 11.1 on, where the result fits up to 13.4. No issue"
        " is known",
        dtypes=("float16",),
        example="""\
number = torch.tensor([12.0], dtype=torch.float16)
print(torch.i0(number.to("mps")).item())
print(torch.i0(number.double()).item())""",
    ),
    Fact(
        "sqrt",
        "The real part is the root of half the modulus plus the real part: beside the negative axis these cancel. No"
        " issue is known",
        dtypes=("complex64",),
        example="""\
number = torch.tensor([-8.5 + 0.002j])
print(number.to("mps").sqrt().cpu().tolist())
print(number.sqrt().tolist())""",
    ),
    Fact(
        "_standard_gamma_grad",
        "The expansions of native/Distributions.h in float32, as Metal has no float64, in which the CPU computes them",
        upstream=False,
        dtypes=("float32",),
        up_to=4e3,
    ),
)


def known(release: str, case: Mapping[str, Any]) -> Fact | None:
    """The fact about a case that does not agree, if one is written down."""
    for fact in FACTS:
        packet = case["rule"].partition(".")[0]
        if fact.operator not in (case["rule"], packet, packet.rstrip("_")):
            continue
        if mended(fact, release):
            continue
        if not case["detail"].startswith(fact.detail) or case.get("error", 0.0) > fact.up_to:
            continue
        if (not fact.dtypes or case["dtype"] in fact.dtypes) and (not fact.layouts or case["layout"] in fact.layouts):
            return fact
    return None


def mended(fact: Fact, release: str) -> bool:
    """Whether a release has not got the fault any more."""
    return bool(fact.before) and _numbers(release) >= _numbers(fact.before)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("+")[0].split(".") if part.isdigit())
