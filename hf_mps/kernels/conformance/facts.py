"""What is known of a difference: PyTorch's own issue, or why it is none. Facts, each with its source."""

from __future__ import annotations

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


HALVES = ("float16", "bfloat16")
FACTS = (
    Fact(
        "lerp",
        "Halves are interpolated in their own arithmetic, where the CPU does it in float32 and rounds once",
        upstream=False,
        dtypes=HALVES,
    ),
    Fact(
        "scatter_add",
        "Several values for one place are added one by one to a half; the CPU has them in another order",
        upstream=False,
        dtypes=HALVES,
    ),
    Fact(
        "log_sigmoid_forward",
        "The second result is a buffer of the CPU's own backward; on Metal it is empty",
        upstream=False,
    ),
    Fact(
        "unfold_backward",
        "A size that does not fit the gradient, which PyTorch does not check: the CPU reads beyond it as well",
        upstream=False,
    ),
    *(
        Fact(operator, "Equal values come in any order where a stable one is not asked for", upstream=False)
        for operator in ("sort", "topk", "kthvalue")
    ),
    Fact(
        "digamma",
        "Beside a pole, where the CPU's float32 errors are large as well",
        upstream=False,
    ),
    Fact(
        "_amp_foreach_non_finite_check_and_unscale_",
        "GradScaler's unscale_ reads its float32 factor as a half: float16 and bfloat16 gradients become zeros",
        link="https://github.com/pytorch/pytorch/pull/184286",
        dtypes=HALVES,
        before="2.13.0",
    ),
    Fact(
        "_amp_foreach_non_finite_check_and_unscale_",
        "A gradient with gaps in memory is walked as if it had none: half of it stays scaled, and what lies in the"
        " gaps is scaled (the single-tensor way in operations/Amp.mm). No issue is known",
        layouts=("strided",),
    ),
    *(
        Fact(
            operator,
            "The host asks for four elements at once whatever the storage offset; Metal does not define a vector at an"
            " address that is aligned to one element, as with fill_ of bytes. Here the process ends",
            link="https://github.com/pytorch/pytorch/pull/183790",
            layouts=("offset",),
            before="2.13.0",
        )
        for operator in ("relu", "silu")
    ),
)


def known(release: str, case: Mapping[str, Any]) -> Fact | None:
    """The fact about a case that does not agree, if one is written down."""
    for fact in FACTS:
        packet = case["rule"].partition(".")[0]
        if fact.operator not in (case["rule"], packet, packet.rstrip("_")):
            continue
        if fact.before and _numbers(release) >= _numbers(fact.before):
            continue
        if (not fact.dtypes or case["dtype"] in fact.dtypes) and (not fact.layouts or case["layout"] in fact.layouts):
            return fact
    return None


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("+")[0].split(".") if part.isdigit())
