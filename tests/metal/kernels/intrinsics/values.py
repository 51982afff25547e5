"""Arguments that show errors: edges and dense samples of each type, bfloat as numpy has none, distances in units."""

import numpy as np

_SMALL = "0.0 -0.0 0.5 -0.5 1.0 -1.0 1.5 2.5 -2.5 1.17549435e-38 1e-40 -1e-40 1.4e-45 -1.4e-45 6e-8 2.9802322e-8"
_RANGES = (
    "127 127.5 128 -128 -128.5 -129 255 255.5 256 32767 32767.5 32768 -32768 -32769 65503.9 65504 65519.9 65520 65536 "
    "2147483520 2147483648 -2147483648 -2147483904 4294967040 4294967296 9.2233715e18 9.223372e18 -9.223372e18 "
    "-9.2233731e18 1.8446743e19 1.8446744e19 1e20 -1e20 3.4028235e38 -3.4028235e38 inf -inf nan"
)
EDGES = np.array([float(word) for word in f"{_SMALL} {_RANGES}".split()], np.float32)


def all_halves() -> np.ndarray:
    """Each of the 65,536 halves."""
    return np.arange(65536, dtype=np.uint16).view(np.float16)


def floats(count: int = 200_000, seed: int = 0) -> np.ndarray:
    """Floats of every exponent, drawn by their bits, the edges among them."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    return np.concatenate([bits.view(np.float32), EDGES])


def integers(bits: int, signed: bool, count: int = 20_000) -> np.ndarray:
    """Integers of every magnitude, the extremes among them."""
    kind = np.dtype(f"{'i' if signed else 'u'}{bits // 8}")
    limits = np.iinfo(kind)
    random = np.random.default_rng(bits)
    drawn = random.integers(limits.min, limits.max, count, dtype=kind, endpoint=True) >> random.integers(
        0, bits, count, dtype=kind
    )
    return np.concatenate([drawn, np.array([limits.min, limits.min + 1, 0, 1, limits.max - 1, limits.max], kind)])


def to_bfloat(x: np.ndarray) -> np.ndarray:
    """The bits of floats rounded to bfloat: the nearest of the two neighbours, the even one of a tie; NaN stays NaN."""
    bits = x.astype(np.float32).view(np.uint32)
    below = (bits >> 16).astype(np.uint16)
    rest = bits & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (below & 1 == 1))
    return np.where(np.isnan(x), np.uint16(0x7FC0), below + up.astype(np.uint16))


def from_bfloat(bits: np.ndarray) -> np.ndarray:
    """bfloats as floats."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def units(got: np.ndarray, exact: np.ndarray) -> float:
    """The largest distance from exact values (doubles), in units in the last place of the result's type.

    Where the exact value rounds to an infinity or NaN, the result must be that.
    """
    with np.errstate(all="ignore"):
        nearest = exact.astype(got.dtype)
        finite = np.isfinite(nearest) & np.isfinite(got)
        np.testing.assert_array_equal(got[~finite], nearest[~finite])
        distance = np.abs(got[finite].astype(np.float64) - exact[finite])
        return float((distance / np.spacing(np.abs(nearest[finite])).astype(np.float64)).max(initial=0.0))
