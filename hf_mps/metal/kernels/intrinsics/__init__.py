"""The meaning of every `air.*` intrinsic that PyTorch's Metal kernels call, as LLVM IR.

`define` gives what a lane computes on its own; `lanes` gives, once for a simdgroup, what its lanes compute together;
barriers have no definition, only a kind. A name that is not known gives None: its meaning is never guessed.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Literal

from hf_mps.metal.kernels.intrinsics import conversions, floats, integers, simd
from hf_mps.metal.kernels.intrinsics.body import Definition
from hf_mps.metal.kernels.intrinsics.conversions import RUNTIME, explicit, lacking
from hf_mps.metal.kernels.intrinsics.simd import lanes, narrowed

__all__ = ["RUNTIME", "Definition", "define", "explicit", "gathered", "kind", "lacking", "lanes", "narrowed"]

Kind = Literal["lane", "barrier", "simdgroup_barrier", "simd"]
_BARRIERS: dict[str, Kind] = {"air.wg.barrier": "barrier", "air.simdgroup.barrier": "simdgroup_barrier"}
_LANE = (
    *(conversions.define, conversions.define_bfloat, floats.define),
    *(integers.define, integers.define_atomic, simd.define_matrix),
)


@cache
def define(name: str) -> Definition | None:
    """The definition of a lane's own intrinsic, or of a helper that a definition needs; None for an unknown name."""
    return next((found for family in _LANE if (found := family(name))), None)


def gathered(names: Iterable[str], find: Callable[[str], Definition | None]) -> list[str]:
    """The declarations, then the texts, of what `find` has for these names and for all that it needs."""
    texts: list[str] = []
    declared: set[str] = set()
    waiting, done = list(names), set[str]()
    while waiting:
        name = waiting.pop()
        definition = None if name in done else find(name)
        if definition is not None:
            done.add(name)
            texts.append(definition.text)
            declared |= definition.declares
            waiting += definition.needs
    return [*sorted(declared), *texts]


def kind(name: str) -> Kind:
    """How an intrinsic runs: by a lane alone, as a barrier, or once for all lanes of the simdgroup."""
    return _BARRIERS.get(name) or ("simd" if lanes(name) else "lane")
