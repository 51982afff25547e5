#include <metal_stdlib>
using namespace metal;

// The softmax of attention's scores with a mask added, in their place, and its gradient in the place of what arrives;
// a threadgroup for each row.
constant constexpr uint SIMDGROUPS = 32;

// The sum, or the largest value, over a threadgroup, for each of its threads.
inline float shared(float value, bool largest, threadgroup float *parts, uint lane, uint width) {
  value = largest ? simd_max(value) : simd_sum(value);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // what was shared before has been read
  if (lane % 32 == 0)
    parts[lane / 32] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float part = lane % 32 < width / 32 ? parts[lane % 32] : (largest ? -INFINITY : 0.0f);
  return largest ? simd_max(part) : simd_sum(part);
}

// sizes: heads, queries, keys, and whether anything is added; strides are those of what is added, over batch, heads,
// queries and keys.
[[kernel, max_total_threads_per_threadgroup(1024)]]
void softmax_float(device float *scores [[buffer(0)]], const device float *added [[buffer(1)]],
                   constant int4 &sizes [[buffer(2)]], constant int4 &strides [[buffer(3)]],
                   uint row [[threadgroup_position_in_grid]], uint lane [[thread_position_in_threadgroup]],
                   uint width [[threads_per_threadgroup]]) {
  threadgroup float parts[SIMDGROUPS];
  const int heads = sizes.x, queries = sizes.y, keys = sizes.z;
  const int number = row, batch = number / (heads * queries);
  const int head = number / queries % heads, query = number % queries;
  device float *x = scores + ulong(row) * keys;
  const device float *mask = added + (long(batch) * strides.x + long(head) * strides.y + long(query) * strides.z);
  float most = -INFINITY;
  for (int i = lane; i < keys; i += width) {
    const float score = sizes.w ? x[i] + mask[i * strides.w] : x[i];
    x[i] = score;
    most = max(most, score);
  }
  most = shared(most, true, parts, lane, width);
  float sum = 0;
  for (int i = lane; i < keys; i += width) {
    const float power = exp(x[i] - most);
    x[i] = power;
    sum += power;
  }
  sum = shared(sum, false, parts, lane, width);
  for (int i = lane; i < keys; i += width)
    x[i] /= sum;
}

// sizes: keys, and whether dropout kept some; what it kept is multiplied by `factor`.
[[kernel, max_total_threads_per_threadgroup(1024)]]
void softmax_backward_float(device float *arriving [[buffer(0)]], const device float *chances [[buffer(1)]],
                            const device uchar *kept [[buffer(2)]], constant int2 &sizes [[buffer(3)]],
                            constant float &factor [[buffer(4)]], uint row [[threadgroup_position_in_grid]],
                            uint lane [[thread_position_in_threadgroup]],
                            uint width [[threads_per_threadgroup]]) {
  threadgroup float parts[SIMDGROUPS];
  const int keys = sizes.x;
  const ulong first = ulong(row) * keys;
  float sum = 0;
  for (int i = lane; i < keys; i += width) {
    float one = arriving[first + i];
    if (sizes.y)
      one = kept[first + i] ? one * factor : 0.0f;
    arriving[first + i] = one;
    sum += one * chances[first + i];
  }
  sum = shared(sum, false, parts, lane, width);
  for (int i = lane; i < keys; i += width)
    arriving[first + i] = (arriving[first + i] - sum) * chances[first + i];
}
