#include <metal_stdlib>
using namespace metal;

// A step of Adam or AdamW whose moments are bytes (Dettmers and others, 8-bit Optimizers via Block-wise Quantization,
// arXiv 2110.02861): a threadgroup for each block of 256 elements, which share the largest value of each moment.
constant constexpr int BLOCK = 256, CODES = 256;

struct Numbers {
  float beta1, beta2, epsilon, rate, correction, decay, scale;
};

inline float largest(float value, threadgroup float *parts, int lane) {
  value = simd_max(value);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // what was shared before has been read
  if (lane % 32 == 0)
    parts[lane / 32] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_max(lane % 32 < BLOCK / 32 ? parts[lane % 32] : 0.0f);
}

// The byte whose value in the map, in rising order, is nearest.
inline uchar nearest(const device float *map, float value) {
  int first = 0, last = CODES - 1;
  while (first < last) {
    const int middle = (first + last) / 2;
    if ((map[middle] + map[middle + 1]) / 2 < value)
      first = middle + 1;
    else
      last = middle;
  }
  return uchar(first);
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(BLOCK)]]
void adam(device T *weights [[buffer(0)]], const device T *gradients [[buffer(1)]], device uchar *first [[buffer(2)]],
          device uchar *second [[buffer(3)]], device float *first_most [[buffer(4)]],
          device float *second_most [[buffer(5)]], const device float *first_map [[buffer(6)]],
          const device float *second_map [[buffer(7)]], constant int &count [[buffer(8)]],
          constant Numbers &with [[buffer(9)]], uint block [[threadgroup_position_in_grid]],
          uint number [[thread_position_in_threadgroup]]) {
  threadgroup float parts[BLOCK / 32];
  const int lane = number, i = int(block) * BLOCK + lane;
  float mean = 0, square = 0;
  if (i < count) {
    const float gradient = float(gradients[i]) * with.scale;
    mean = first_map[first[i]] * first_most[block] * with.beta1 + gradient * (1 - with.beta1);
    square = second_map[second[i]] * second_most[block] * with.beta2 + gradient * gradient * (1 - with.beta2);
    const float weight = float(weights[i]) * with.decay;
    weights[i] = T(weight - with.rate * (mean / (sqrt(square) / with.correction + with.epsilon)));
  }
  const float mean_most = largest(fabs(mean), parts, lane), square_most = largest(square, parts, lane);
  if (i < count) {
    first[i] = nearest(first_map, mean / max(mean_most, 1e-38f));
    second[i] = nearest(second_map, square / max(square_most, 1e-38f));
  }
  if (lane == 0) {
    first_most[block] = mean_most;
    second_most[block] = square_most;
  }
}

#define INSTANCE(T) template [[host_name("adam_" #T)]] [[kernel]] decltype(adam<T>) adam<T>;
INSTANCE(float)
INSTANCE(half)
INSTANCE(bfloat)
