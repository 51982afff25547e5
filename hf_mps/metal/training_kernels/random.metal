#include <metal_stdlib>
using namespace metal;

// The first of the four numbers of Philox 4x32-10 (Salmon and others, Parallel Random Numbers, SC11).
inline uint philox(uint4 counter, uint2 seed) {
  for (int i = 0; i < 10; ++i) {
    const uint2 high = uint2(mulhi(0xD2511F53u, counter.x), mulhi(0xCD9E8D57u, counter.z));
    counter = uint4(high.y ^ counter.y ^ seed.x, 0xCD9E8D57u * counter.z, high.x ^ counter.w ^ seed.y,
                    0xD2511F53u * counter.x);
    seed += uint2(0x9E3779B9u, 0xBB67AE85u);
  }
  return counter.x;
}

// Whether dropout keeps a number: where 24 random bits are at or above the threshold.
inline bool is_drawn(uint2 seed, int threshold, int matrix, int row, int column) {
  return threshold == 0 || (philox(uint4(column, row, matrix, 0), seed) >> 8) >= uint(threshold);
}
