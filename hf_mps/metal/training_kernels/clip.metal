#include <metal_stdlib>
using namespace metal;

// The norm of many gradients, and their product with a factor. A dispatch binds 28 tensors: Metal has 31 buffers, and
// a tensor whose address is only written into another buffer is not made resident (torch/csrc/mps/Module.cpp).
#define TENSORS                                                                                                   \
  device T *t0 [[buffer(0)]], device T *t1 [[buffer(1)]], device T *t2 [[buffer(2)]], device T *t3 [[buffer(3)]], \
  device T *t4 [[buffer(4)]], device T *t5 [[buffer(5)]], device T *t6 [[buffer(6)]], device T *t7 [[buffer(7)]], \
  device T *t8 [[buffer(8)]], device T *t9 [[buffer(9)]], device T *t10 [[buffer(10)]],                           \
  device T *t11 [[buffer(11)]], device T *t12 [[buffer(12)]], device T *t13 [[buffer(13)]],                       \
  device T *t14 [[buffer(14)]], device T *t15 [[buffer(15)]], device T *t16 [[buffer(16)]],                       \
  device T *t17 [[buffer(17)]], device T *t18 [[buffer(18)]], device T *t19 [[buffer(19)]],                       \
  device T *t20 [[buffer(20)]], device T *t21 [[buffer(21)]], device T *t22 [[buffer(22)]],                       \
  device T *t23 [[buffer(23)]], device T *t24 [[buffer(24)]], device T *t25 [[buffer(25)]],                       \
  device T *t26 [[buffer(26)]], device T *t27 [[buffer(27)]]
#define POINTERS                                                                                                      \
  {t0, t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14, t15, t16, t17, t18, t19, t20, t21, t22, t23, t24, \
   t25, t26, t27}

constant constexpr uint SIMDGROUPS = 32;

// The sum over a threadgroup, for each of its threads.
inline float shared_sum(float value, threadgroup float *sums, uint lane, uint width) {
  value = simd_sum(value);
  if (lane % 32 == 0)
    sums[lane / 32] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane % 32 < width / 32 ? sums[lane % 32] : 0.0f);
}

// A threadgroup for each chunk: (tensor, first element, elements, place of its sum).
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]]
void squares(TENSORS, constant int4 *chunks [[buffer(28)]], device float *sums [[buffer(29)]],
             uint group [[threadgroup_position_in_grid]], uint lane [[thread_position_in_threadgroup]],
             uint width [[threads_per_threadgroup]]) {
  threadgroup float memory[SIMDGROUPS];
  device T *tensors[28] = POINTERS;
  const int4 chunk = chunks[group];
  const device T *x = tensors[chunk.x] + chunk.y;
  float sum = 0;
  for (uint i = lane; i < uint(chunk.z); i += width) {
    const float value = float(x[i]);
    sum += value * value;
  }
  sum = shared_sum(sum, memory, lane, width);
  if (lane == 0)
    sums[chunk.w] = sum;
}

// One threadgroup: the norm, from the sums of all chunks.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]]
void norm(device T *found [[buffer(0)]], const device float *sums [[buffer(1)]],
          constant int &count [[buffer(2)]], uint lane [[thread_position_in_threadgroup]],
          uint width [[threads_per_threadgroup]]) {
  threadgroup float memory[SIMDGROUPS];
  float sum = 0;
  for (int i = lane; i < count; i += width)
    sum += sums[i];
  sum = shared_sum(sum, memory, lane, width);
  if (lane == 0)
    found[0] = T(sqrt(sum));
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]]
void scale(TENSORS, constant int4 *chunks [[buffer(28)]], const device T *norm [[buffer(29)]],
           constant float &largest [[buffer(30)]], uint group [[threadgroup_position_in_grid]],
           uint lane [[thread_position_in_threadgroup]], uint width [[threads_per_threadgroup]]) {
  const float factor = largest / (float(norm[0]) + 1e-6f);
  if (factor >= 1.0f)  // a norm that is NaN makes every gradient NaN, as PyTorch does
    return;
  device T *tensors[28] = POINTERS;
  const int4 chunk = chunks[group];
  device T *x = tensors[chunk.x] + chunk.y;
  for (uint i = lane; i < uint(chunk.z); i += width)
    x[i] = T(float(x[i]) * factor);
}

#define INSTANCES(T)                                                                \
  template [[host_name("squares_" #T)]] [[kernel]] decltype(squares<T>) squares<T>; \
  template [[host_name("norm_" #T)]] [[kernel]] decltype(norm<T>) norm<T>;          \
  template [[host_name("scale_" #T)]] [[kernel]] decltype(scale<T>) scale<T>;
INSTANCES(float)
INSTANCES(half)
INSTANCES(bfloat)
