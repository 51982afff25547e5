// LayerNorm (CENTERED) and RMSNorm of rows, both ways. A threadgroup computes a row at a time, its threads the columns
// `lane`, `lane + width` and so on. Sums are float32.
constant constexpr uint SIMDGROUP = 32;
constant constexpr uint THREADS = 1024;  // of a threadgroup, at most
constant constexpr uint COLUMNS = 8;     // of a thread, in the backward pass

// The sums of two values over a threadgroup, for each of its threads.
inline float2 shared_sum(float2 value, threadgroup float2 *sums, uint lane, uint width) {
  value = float2(simd_sum(value.x), simd_sum(value.y));
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the sums of before have been read
  if (lane % SIMDGROUP == 0)
    sums[lane / SIMDGROUP] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float2 part = lane % SIMDGROUP < width / SIMDGROUP ? sums[lane % SIMDGROUP] : float2(0);
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
  threadgroup float2 memory[THREADS / SIMDGROUP];
  const ulong first = ulong(row) * sizes.x;
  norm_row<T, CENTERED>(found + first, statistics + row, given + first, weight, bias, sizes.y, sizes.x, epsilon, memory,
                        lane, width);
}

// The same of a residual and what dropout leaves of `given`, times a factor; `total` becomes their sum. sizes: columns,
// whether there is a bias, and dropout's threshold. numbers: epsilon, factor.
template <typename T, bool CENTERED>
[[kernel, max_total_threads_per_threadgroup(1024)]]
void joined(device T *found [[buffer(0)]], device float2 *statistics [[buffer(1)]], device T *total [[buffer(2)]],
            const device T *given [[buffer(3)]], const device T *residual [[buffer(4)]],
            const device T *weight [[buffer(5)]], const device T *bias [[buffer(6)]],
            constant ulong2 &draw [[buffer(7)]], constant int4 &sizes [[buffer(8)]],
            constant float2 &numbers [[buffer(9)]], uint row [[threadgroup_position_in_grid]],
            uint lane [[thread_position_in_threadgroup]], uint width [[threads_per_threadgroup]]) {
  threadgroup float2 memory[THREADS / SIMDGROUP];
  const ulong first = ulong(row) * sizes.x;
  for (int i = lane; i < sizes.x; i += width) {  // a thread reads below what it has written itself
    const float kept = is_drawn(draw, sizes.z, first + i) ? float(given[first + i]) * numbers.y : 0.0f;
    total[first + i] = T(float(residual[first + i]) + kept);
  }
  norm_row<T, CENTERED>(found + first, statistics + row, total + first, weight, bias, sizes.y, sizes.x, numbers.x, memory,
                        lane, width);
}

// groups: threadgroups that take rows. beside: whether a second gradient arrives at what the norm is made of. by_group:
// whether each leaves its sums for weight and bias; threadgroups behind them make them whole.
struct Call {
  int rows, columns, groups, beside, by_group, threshold;
};

// The whole sums of 32 columns; a simdgroup takes every so many rows of them.
template <typename T, bool CENTERED>
inline void whole_sums(device T *of_weight, device T *of_bias, const device T *upstream, const device T *given,
                       const device float2 *statistics, constant Call &call, threadgroup float2 *memory, uint piece,
                       uint lane, uint width) {
  const int column = piece * SIMDGROUP + lane % SIMDGROUP;
  const bool inside = column < call.columns;
  float2 sum = float2(0);
  for (int row = lane / SIMDGROUP; inside && row < call.rows; row += width / SIMDGROUP) {
    const ulong place = ulong(row) * call.columns + column;
    const float mean = CENTERED ? statistics[row].x : 0.0f, arriving = float(upstream[place]);
    sum += float2(arriving * ((float(given[place]) - mean) * statistics[row].y), arriving);
  }
  memory[lane] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane >= SIMDGROUP || !inside)
    return;
  for (uint other = lane + SIMDGROUP; other < width; other += SIMDGROUP)
    sum += memory[other];
  of_weight[column] = T(sum.x);
  of_bias[column] = T(sum.y);
}

// A threadgroup takes the rows `group`, `group + groups` and so on; its sums become a row of `sums`. Of a joined norm,
// `of_given` is the gradient of the sum, and `of_dropped` that of what dropout was given.
template <typename T, bool CENTERED>
[[kernel, max_total_threads_per_threadgroup(1024)]]
void backward(device T *of_given [[buffer(0)]], device T *of_dropped [[buffer(1)]], device T *of_weight [[buffer(2)]],
              device T *of_bias [[buffer(3)]], device float2 *sums [[buffer(4)]], const device T *upstream [[buffer(5)]],
              const device T *beside [[buffer(6)]], const device T *given [[buffer(7)]],
              const device T *weight [[buffer(8)]], const device float2 *statistics [[buffer(9)]],
              constant ulong2 &draw [[buffer(10)]], constant Call &call [[buffer(11)]],
              constant float &factor [[buffer(12)]], uint group [[threadgroup_position_in_grid]],
              uint lane [[thread_position_in_threadgroup]], uint width [[threads_per_threadgroup]]) {
  threadgroup float2 memory[THREADS];
  const uint rows = call.rows, columns = call.columns, groups = call.groups;
  if (group >= groups) {
    whole_sums<T, CENTERED>(of_weight, of_bias, upstream, given, statistics, call, memory, group - groups, lane, width);
    return;
  }
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
      float found = (weighted - (CENTERED ? moved.x : 0.0f) - normed * moved.y) * scale;
      if (call.beside)
        found += float(beside[first + i]);
      of_given[first + i] = T(found);
      if (call.threshold)
        of_dropped[first + i] = T(is_drawn(draw, call.threshold, first + i) ? found * factor : 0.0f);
    }
  }
  if (call.by_group)
    for (uint i = lane, k = 0; i < columns; i += width, ++k)
      sums[group * columns + i] = kept[k];
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

#define INSTANCES(T, NAME, CENTERED)                                                                          \
  template [[host_name(#NAME "_" #T)]] [[kernel]] decltype(forward<T, CENTERED>) forward<T, CENTERED>;         \
  template [[host_name(#NAME "_joined_" #T)]] [[kernel]] decltype(joined<T, CENTERED>) joined<T, CENTERED>;    \
  template [[host_name(#NAME "_backward_" #T)]] [[kernel]] decltype(backward<T, CENTERED>) backward<T, CENTERED>;
#define TYPES(T)                                                                                               \
  INSTANCES(T, layer_norm, true) INSTANCES(T, rms_norm, false)                                                 \
  template [[host_name("columns_" #T)]] [[kernel]] decltype(columns<T>) columns<T>;
TYPES(float)
TYPES(half)
TYPES(bfloat)
