"""What is known of a difference: PyTorch's own issue, or why it is none. Facts, each with its source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Fact(NamedTuple):
    """A known difference of an operator, or of kernels whose name begins so."""

    operator: str
    kernel: str
    """The beginning of a kernel's name that the case launched; empty for any."""
    upstream: bool
    """PyTorch's fault; else a difference that is none, or one of the method."""
    says: str
    link: str = ""


FACTS = (
    Fact(
        "_amp_foreach_non_finite_check_and_unscale_",
        "ampNonFiniteCheckAndUnscale",
        True,
        "GradScaler reads its float32 scale as a half: gradients with gaps become zeros, up to 2.12",
        "https://github.com/pytorch/pytorch/pull/184286",
    ),
)


def known(operator: str, kernels: Sequence[str]) -> Fact | None:
    """The fact about an operator's difference that launched these kernels, if one is written down."""
    packet = operator.partition(".")[0].rstrip("_")
    for fact in FACTS:
        if fact.operator in (operator, packet, f"{packet}_") and (
            not fact.kernel or any(each.startswith(fact.kernel) for each in kernels)
        ):
            return fact
    return None
