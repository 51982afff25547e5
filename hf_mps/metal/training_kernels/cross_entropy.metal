#include <metal_stdlib>
using namespace metal;

// The loss of a row of logits, and its gradient in their place; a threadgroup for each row, sums in float32.
constant constexpr uint SIMDGROUPS = 32;

// Two parts of a row, each (its largest value, the sum of the exponentials of what is below that), as one.
inline float2 joined(float2 a, float2 b) {
  const float most = max(a.x, b.x);
  if (most == -INFINITY)  // nothing but masked words yet
    return float2(most, 0);
  return float2(most, a.y * exp(a.x - most) + b.y * exp(b.x - most));
}

inline float2 joined_over_simdgroup(float2 value) {
  for (ushort apart = 16; apart > 0; apart /= 2)
    value = joined(value, float2(simd_shuffle_xor(value.x, apart), simd_shuffle_xor(value.y, apart)));
  return value;
}

// sizes: words, the label of rows that do not count, and whether the gradient is wanted; it is multiplied by `factor`.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]]
void cross_entropy(device T *logits [[buffer(0)]], device float *losses [[buffer(1)]],
                   const device long *labels [[buffer(2)]], constant int4 &sizes [[buffer(3)]],
                   constant float &factor [[buffer(4)]], uint row [[threadgroup_position_in_grid]],
                   uint lane [[thread_position_in_threadgroup]], uint width [[threads_per_threadgroup]]) {
  threadgroup float2 parts[SIMDGROUPS];
  const int words = sizes.x;
  const long label = labels[row];
  device T *x = logits + ulong(row) * words;
  const bool counts = label != sizes.y;
  if (!counts) {
    if (lane == 0)
      losses[row] = 0;
    for (int i = lane; sizes.z && i < words; i += width)
      x[i] = T(0);
    return;
  }
  const float of_label = float(x[label]);
  float2 mine = float2(-INFINITY, 0);
  for (int i = lane; i < words; i += width) {
    const float value = float(x[i]);
    // NaN is passed on: max() would drop it.
    mine = isnan(value) ? float2(value, value) : joined(mine, float2(value, 1));
  }
  mine = joined_over_simdgroup(mine);
  if (lane % 32 == 0)
    parts[lane / 32] = mine;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float2 whole = joined_over_simdgroup(lane % 32 < width / 32 ? parts[lane % 32] : float2(-INFINITY, 0));
  if (lane == 0)
    losses[row] = log(whole.y) + whole.x - of_label;
  for (int i = lane; sizes.z && i < words; i += width) {
    const float share = exp(float(x[i]) - whole.x) / whole.y;
    x[i] = T((share - (i == label ? 1.0f : 0.0f)) * factor);
  }
}

#define INSTANCES(T) \
  template [[host_name("cross_entropy_" #T)]] [[kernel]] decltype(cross_entropy<T>) cross_entropy<T>;
INSTANCES(float)
INSTANCES(half)
INSTANCES(bfloat)
