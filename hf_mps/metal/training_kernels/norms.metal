// LayerNorm (CENTERED) and RMSNorm of rows, both ways. A threadgroup computes a row at a time, its threads the columns
// `lane`, `lane + width` and so on. Sums are float32.
constant constexpr uint SIMDGROUPS = 32;
constant constexpr uint COLUMNS = 8;  // of a thread, in the backward pass

// The sums of two values over a threadgroup, for each of its threads.
inline float2 shared_sum(float2 value, threadgroup float2 *sums, uint lane, uint width) {
  value = float2(simd_sum(value.x), simd_sum(value.y));
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the sums of before have been read
  if (lane % 32 == 0)
    sums[lane / 32] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float2 part = lane % 32 < width / 32 ? sums[lane % 32] : float2(0);
  return float2(simd_sum(part.x), simd_sum(part.y));
}

// Writes the norm of a row; `statistic` becomes its mean, and one over its deviation.
template <typename T, bool CENTERED>
inline void norm_row(device T *y, device float2 *statistic, const device T *x, const device T *weight,
                     const device T *bias, bool biased, uint columns, float epsilon, threadgroup float2 *memory, uint lane,
                     uint width) {
  float sum = 0;
  if (CENTERED) {
    for (uint i = lane; i < columns; i += width)
      sum += float(x[i]);
    sum = shared_sum(float2(sum, 0), memory, lane, width).x;
  }
  const float mean = sum / columns;
  float squares = 0;
  for (uint i = lane; i < columns; i += width) {
    const float apart = float(x[i]) - mean;
    squares += apart * apart;
  }
  squares = shared_sum(float2(squares, 0), memory, lane, width).x;
  const float scale = 1.0f / sqrt(squares / columns + epsilon);
  if (lane == 0)
    *statistic = float2(mean, scale);
  for (uint i = lane; i < columns; i += width) {
    const float normed = (float(x[i]) - mean) * scale * float(weight[i]);
    y[i] = T(biased ? normed + float(bias[i]) : normed);
  }
}

// sizes: columns, and whether there is a bias.
template <typename T, bool CENTERED>
[[kernel, max_total_threads_per_threadgroup(1024)]]
void forward(device T *found [[buffer(0)]], device float2 *statistics [[buffer(1)]],
             const device T *given [[buffer(2)]], const device T *weight [[buffer(3)]],
             const device T *bias [[buffer(4)]], constant int2 &sizes [[buffer(5)]],
             constant float &epsilon [[buffer(6)]], uint row [[threadgroup_position_in_grid]],
             uint lane [[thread_position_in_threadgroup]], uint width [[threads_per_threadgroup]]) {
  threadgroup float2 memory[SIMDGROUPS];
  const ulong first = ulong(row) * sizes.x;
  norm_row<T, CENTERED>(found + first, statistics + row, given + first, weight, bias, sizes.y, sizes.x, epsilon, memory,
                        lane, width);
}

// The same of a residual and what dropout leaves of `given`, times a factor; `total` becomes their sum. sizes: columns,
// whether there is a bias, and dropout's threshold. numbers: epsilon, factor.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]]
void joined(device T *found [[buffer(0)]], device float2 *statistics [[buffer(1)]], device T *total [[buffer(2)]],
            const device T *given [[buffer(3)]], const device T *residual [[buffer(4)]],
            const device T *weight [[buffer(5)]], const device T *bias [[buffer(6)]],
            constant ulong2 &draw [[buffer(7)]], constant int4 &sizes [[buffer(8)]],
            constant float2 &numbers [[buffer(9)]], uint row [[threadgroup_position_in_grid]],
            uint lane [[thread_position_in_threadgroup]], uint width [[threads_per_threadgroup]]) {
  threadgroup float2 memory[SIMDGROUPS];
  const ulong first = ulong(row) * sizes.x;
  for (int i = lane; i < sizes.x; i += width) {  // a thread reads below what it has written itself
    const float kept = is_drawn(draw, sizes.z, first + i) ? float(given[first + i]) * numbers.y : 0.0f;
    total[first + i] = T(float(residual[first + i]) + kept);
  }
  norm_row<T, true>(found + first, statistics + row, total + first, weight, bias, sizes.y, sizes.x, numbers.x, memory,
                    lane, width);
}

// A threadgroup takes the rows `group`, `group + groups` and so on, and leaves its sums for weight and bias as a row of
// `sums`. sizes: rows, columns, groups, and whether the sums are wanted. JOINED: `of_dropped` becomes the gradient of
// what dropout was given.
template <typename T, bool CENTERED, bool JOINED>
inline void norm_backward(device T *of_given, device T *of_dropped, device float2 *sums, const device T *upstream,
                          const device T *given, const device T *weight, const device float2 *statistics,
                          ulong2 draw, int threshold, float factor, int4 sizes, threadgroup float2 *memory,
                          uint group, uint lane, uint width) {
  const uint rows = sizes.x, columns = sizes.y, groups = sizes.z;
  float2 kept[COLUMNS];
  for (uint k = 0; k < COLUMNS; ++k)
    kept[k] = float2(0);
  for (uint row = group; row < rows; row += groups) {
    const ulong first = ulong(row) * columns;
    const float mean = CENTERED ? statistics[row].x : 0.0f, scale = statistics[row].y;
    float2 moved = float2(0);  // what arrives in all, and along the row
    for (uint i = lane, k = 0; i < columns; i += width, ++k) {
      const float arriving = float(upstream[first + i]), normed = (float(given[first + i]) - mean) * scale;
      kept[k] += float2(arriving * normed, arriving);
      const float weighted = arriving * float(weight[i]);
      moved += float2(weighted, weighted * normed);
    }
    moved = shared_sum(moved, memory, lane, width) / columns;
    for (uint i = lane; i < columns; i += width) {
      const float normed = (float(given[first + i]) - mean) * scale;
      const float weighted = float(upstream[first + i]) * float(weight[i]);
      const float found = (weighted - (CENTERED ? moved.x : 0.0f) - normed * moved.y) * scale;
      of_given[first + i] = T(found);
      if (JOINED)
        of_dropped[first + i] = T(is_drawn(draw, threshold, first + i) ? found * factor : 0.0f);
    }
  }
  if (sizes.w)
    for (uint i = lane, k = 0; i < columns; i += width, ++k)
      sums[group * columns + i] = kept[k];
}

template <typename T, bool CENTERED>
[[kernel, max_total_threads_per_threadgroup(1024)]]
void backward(device T *of_given [[buffer(0)]], device float2 *sums [[buffer(1)]],
              const device T *upstream [[buffer(2)]], const device T *given [[buffer(3)]],
              const device T *weight [[buffer(4)]], const device float2 *statistics [[buffer(5)]],
              constant int4 &sizes [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
              uint lane [[thread_position_in_threadgroup]], uint width [[threads_per_threadgroup]]) {
  threadgroup float2 memory[SIMDGROUPS];
  norm_backward<T, CENTERED, false>(of_given, nullptr, sums, upstream, given, weight, statistics, ulong2(0), 0, 1.0f, sizes,
                                    memory, group, lane, width);
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]]
void joined_backward(device T *of_residual [[buffer(0)]], device T *of_given [[buffer(1)]],
                     device float2 *sums [[buffer(2)]], const device T *upstream [[buffer(3)]],
                     const device T *total [[buffer(4)]], const device T *weight [[buffer(5)]],
                     const device float2 *statistics [[buffer(6)]], constant ulong2 &draw [[buffer(7)]],
                     constant int4 &sizes [[buffer(8)]], constant int &threshold [[buffer(9)]],
                     constant float &factor [[buffer(10)]], uint group [[threadgroup_position_in_grid]],
                     uint lane [[thread_position_in_threadgroup]], uint width [[threads_per_threadgroup]]) {
  threadgroup float2 memory[SIMDGROUPS];
  norm_backward<T, true, true>(of_residual, of_given, sums, upstream, total, weight, statistics, draw, threshold, factor,
                               sizes, memory, group, lane, width);
}

// A thread for each column: the sums of all groups. sizes: groups, columns.
template <typename T>
[[kernel]]
void columns(device T *of_weight [[buffer(0)]], device T *of_bias [[buffer(1)]],
             const device float2 *sums [[buffer(2)]], constant int2 &sizes [[buffer(3)]],
             uint column [[thread_position_in_grid]]) {
  float2 sum = float2(0);
  for (int group = 0; group < sizes.x; ++group)
    sum += sums[group * sizes.y + column];
  of_weight[column] = T(sum.x);
  of_bias[column] = T(sum.y);
}

#define INSTANCES(T)                                                                                          \
  template [[host_name("layer_norm_" #T)]] [[kernel]] decltype(forward<T, true>) forward<T, true>;            \
  template [[host_name("layer_norm_backward_" #T)]] [[kernel]] decltype(backward<T, true>) backward<T, true>; \
  template [[host_name("rms_norm_" #T)]] [[kernel]] decltype(forward<T, false>) forward<T, false>;            \
  template [[host_name("rms_norm_backward_" #T)]] [[kernel]] decltype(backward<T, false>) backward<T, false>; \
  template [[host_name("joined_" #T)]] [[kernel]] decltype(joined<T>) joined<T>;                              \
  template [[host_name("joined_backward_" #T)]] [[kernel]] decltype(joined_backward<T>) joined_backward<T>;   \
  template [[host_name("columns_" #T)]] [[kernel]] decltype(columns<T>) columns<T>;
INSTANCES(float)
INSTANCES(half)
INSTANCES(bfloat)
