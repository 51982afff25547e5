"""The polynomials' coefficients, lowest power first (Chebyshev fits at 60 digits, mpmath.chebyfit), and 2/pi."""


def _read(text: str) -> tuple[float, ...]:
    return tuple(float.fromhex(word) for word in text.split())


# (2^r - 1) / r for |r| <= 1/2, relative error 2^-37
EXP2_MINUS_1 = _read("""
    0x1.62e42fef9cc69p-1 0x1.ebfbdff82a734p-3 0x1.c6b08da70cce3p-5 0x1.3b2ab70ad2565p-7
    0x1.5d877598350dep-10 0x1.4308c7183d6a2p-13 0x1.00c0e4e15189cp-16 0x1.63b2d7971923fp-20
""")
# (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2, as floats: the error in e^r is 2^-32
EXP_QUADRATIC = _read("""
    0x1.0p-1 0x1.555556p-3 0x1.5554e8p-5 0x1.1110e0p-7 0x1.6d43acp-10 0x1.a1256ap-13
""")
# 2 atanh(s) / (s ln 2) in s^2, for |s| <= (sqrt 2 - 1) / (sqrt 2 + 1), relative error 2^-56
LOG2 = _read("""
    0x1.71547652b82fep+1 0x1.ec709dc3a047dp-1 0x1.2776c50ee39dcp-1 0x1.a61762d693934p-2
    0x1.484afb7a67652p-2 0x1.0ca160627dbfcp-2 0x1.c46e1440404d7p-3 0x1.b592d3c48c41cp-3
""")
# sin(r) / r in r^2 for |r| <= pi/4, relative error 2^-37
SIN = _read("""
    0x1.fffffffff67c2p-1 -0x1.5555554948094p-3 0x1.1111074b2ec5ep-7 -0x1.a00ee7e30b36cp-13 0x1.6cb748c562976p-19
""")
# cos(r) in r^2 for |r| <= pi/4, relative error 2^-43
COS = _read("""
    0x1.ffffffffffe0bp-1 -0x1.ffffffffe3762p-2 0x1.555555447639ep-5
    -0x1.6c16b2d3e0aa9p-10 0x1.a00e968302e7fp-16 -0x1.23c5c0d130a07p-22
""")
# sin(pi r) / r in r^2 for |r| <= 1/2, relative error 2^-43
SINPI = _read("""
    0x1.921fb54442bb4p+1 -0x1.4abbce624ad99p+2 0x1.466bc66ed3d1cp+1 -0x1.32d2c9b2d1df5p-1
    0x1.50770f6a5a66bp-4 -0x1.e29b82ab98ea9p-8 0x1.d53abdeb199c1p-12
""")
# atan(t) / t in t^2 for |t| <= tan(pi/8), relative error 2^-40
ATAN = _read("""
    0x1.fffffffffe56dp-1 -0x1.5555554ba45bcp-2 0x1.99999046d1e86p-3 -0x1.24909144ba082p-3
    0x1.c6cc2f2f6f999p-4 -0x1.7055c066509b3p-4 0x1.1da9c35cc3322p-4 -0x1.34787b1b4ac83p-5
""")
# asin(s) / s in s^2 for |s| <= 1/2, relative error 2^-43
ASIN = _read("""
    0x1.ffffffffffe37p-1 0x1.55555556ba261p-3 0x1.333331c54a5c9p-4 0x1.6db76c4073936p-5 0x1.f1aa2e3259ba2p-6
    0x1.703109f1e31b1p-6 0x1.0de3abdd2358ep-6 0x1.315f91ce454b4p-6 -0x1.76633841944a1p-9 0x1.05af6a78bec66p-5
""")
# the bits of 2/pi in words of 64, two zero bits before them
TWO_OVER_PI = (0x28BE60DB9391054A, 0x7F09D5F47D4D3770, 0x36D8A5664F10E410, 0x7F9458EAF7AEF158)
