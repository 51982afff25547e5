#include <metal_stdlib>
using namespace metal;

// The first of the four numbers of Philox 4x32-10 (Salmon and others, Parallel Random Numbers, SC11).
inline uint philox(ulong place, ulong seed) {
  uint4 counter = uint4(as_type<uint2>(place), 0, 0);
  uint2 key = as_type<uint2>(seed);
  for (int i = 0; i < 10; ++i) {
    const uint2 high = uint2(mulhi(0xD2511F53u, counter.x), mulhi(0xCD9E8D57u, counter.z));
    counter = uint4(high.y ^ counter.y ^ key.x, 0xCD9E8D57u * counter.z, high.x ^ counter.w ^ key.y,
                    0xD2511F53u * counter.x);
    key += uint2(0x9E3779B9u, 0xBB67AE85u);
  }
  return counter.x;
}

// Whether dropout keeps a number: where 24 random bits are at or above the threshold. draw: the generator's seed and
// offset; place: which number of the draw.
inline bool is_drawn(ulong2 draw, int threshold, uint place) {
  return threshold == 0 || (philox(draw.y + place, draw.x) >> 8) >= uint(threshold);
}
