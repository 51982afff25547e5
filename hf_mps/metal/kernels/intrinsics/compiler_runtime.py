"""The functions of compiler-rt that LLVM calls for half and bfloat on hosts without F16C or AVX512-BF16.

The process that compiles a kernel need not hold them, so a module carries its own: weak, named as LLVM names them,
written with integers and floats alone.
"""

import itertools
from collections.abc import Mapping

from hf_mps.metal.kernels.intrinsics.bfloat import nearest
from hf_mps.metal.kernels.intrinsics.body import Body
from hf_mps.metal.kernels.intrinsics.definition import Definition

_LINKAGE = "weak"


def _half_to_float() -> Definition:
    """Shifts the half's bits into a float's place; a product by 2^112 mends the exponent, subnormals included."""
    body = Body("__extendhfsf2", "float", "half")
    bits = body.bits(body.arguments[0]).cast("zext", "i32")
    size = (bits & 0x7FFF) << 13
    scaled = body.bits(size.cast("bitcast", "float") * 2.0**112)
    special = size.compare("uge", 0x7C00 << 13)
    magnitude = special.select(size | 0x7F800000, scaled)
    return body.finish((magnitude | ((bits & 0x8000) << 16)).cast("bitcast", "float"), "nounwind", _LINKAGE)


def _float_to_half() -> Definition:
    """To nearest, ties to even: normal halves by integers, subnormal ones by adding 1/2, whose last bit is theirs."""
    body = Body("__truncsfhf2", "half", "float")
    bits = body.bits(body.arguments[0])
    size = bits & 0x7FFFFFFF
    rebased = size - (112 << 23)
    normal = (rebased + 0xFFF + ((rebased >> 13) & 1)) >> 13
    small = body.bits(size.cast("bitcast", "float") + 0.5) - 0x3F000000
    result = size.compare("ult", 113 << 23).select(small, normal)
    result = size.compare("uge", 0x47800000).select(0x7C00, result)
    result = size.compare("ugt", 0x7F800000).select((size >> 13) | 0x7E00, result)
    half = ((result & 0x7FFF) | ((bits >> 16) & 0x8000)).cast("trunc", "i16")
    return body.finish(half.cast("bitcast", "half"), "nounwind", _LINKAGE)


def _float_to_bfloat() -> Definition:
    body = Body("__truncsfbf2", "bfloat", "float")
    return body.finish(nearest(body.arguments[0]), "nounwind", _LINKAGE)


_WITHOUT = {"f16c": (_half_to_float(), _float_to_half()), "avx512bf16": (_float_to_bfloat(),)}
RUNTIME = tuple(itertools.chain(*_WITHOUT.values()))


def lacking(features: Mapping[str, bool]) -> tuple[Definition, ...]:
    """The functions for a CPU with these of LLVM's features: it may have F16C and not AVX512-BF16, as AVX2 hosts do."""
    return tuple(itertools.chain(*(some for feature, some in _WITHOUT.items() if not features.get(feature, False))))
