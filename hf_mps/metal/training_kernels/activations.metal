#include <metal_stdlib>
using namespace metal;

// Activations x * share(x), behind a bias or times a second factor, both ways. Sums are float32.
enum Kind { GELU, TANH, SILU, QUICK };
constant constexpr uint SIMDGROUP = 32;

// The share of x that passes, and its slope.
template <int KIND>
inline float2 share(float x) {
  if (KIND == GELU) {  // the error function by 7.1.26 of Abramowitz and Stegun, off by 1.5e-7 at most
    const float t = 1.0f / (1.0f + 0.3275911f * 0.70710678f * fabs(x)), bell = exp(-0.5f * x * x);
    const float sum = 0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f)));
    const float beyond = 0.5f * t * sum * bell;
    return float2(x < 0 ? beyond : 1.0f - beyond, 0.39894228f * bell);
  }
  float inner = x, slope = 1;  // tanh(y / 2) is 2 logistic(y) - 1
  if (KIND == TANH) {
    inner = 1.59576912f * x * (1.0f + 0.044715f * x * x);
    slope = 1.59576912f * (1.0f + 0.134145f * x * x);
  } else if (KIND == QUICK) {
    inner = 1.702f * x;
    slope = 1.702f;
  }
  const float part = 1.0f / (1.0f + exp(-fmax(inner, -80.0f)));  // no infinity, which fast arithmetic leaves undefined
  return float2(part, part * (1.0f - part) * slope);
}

// A thread for each element. sizes: columns, and whether there is a bias.
template <typename T, int KIND>
[[kernel]]
void forward(device T *found [[buffer(0)]], const device T *given [[buffer(1)]], const device T *bias [[buffer(2)]],
             constant int2 &sizes [[buffer(3)]], uint number [[thread_position_in_grid]]) {
  const float x = float(given[number]) + (sizes.y ? float(bias[number % sizes.x]) : 0.0f);
  found[number] = T(x * share<KIND>(x).x);
}

// A threadgroup for each 32 columns; a simdgroup takes every so many rows of them. `of_bias` becomes the columns' sums.
// sizes: rows, columns, and whether there is a bias.
template <typename T, int KIND>
[[kernel, max_total_threads_per_threadgroup(1024)]]
void backward(device T *of_given [[buffer(0)]], device T *of_bias [[buffer(1)]],
              const device T *upstream [[buffer(2)]], const device T *given [[buffer(3)]],
              const device T *bias [[buffer(4)]], constant int4 &sizes [[buffer(5)]],
              uint group [[threadgroup_position_in_grid]], uint lane [[thread_position_in_threadgroup]],
              uint width [[threads_per_threadgroup]]) {
  threadgroup float sums[1024];
  const int column = group * SIMDGROUP + lane % SIMDGROUP;
  const bool inside = column < sizes.y;
  const float shift = inside && sizes.z ? float(bias[column]) : 0.0f;
  float sum = 0;
  for (int row = lane / SIMDGROUP; inside && row < sizes.x; row += width / SIMDGROUP) {
    const ulong place = ulong(row) * sizes.y + column;
    const float x = float(given[place]) + shift;
    const float2 passed = share<KIND>(x);
    const float arrived = float(upstream[place]) * (passed.x + x * passed.y);
    of_given[place] = T(arrived);
    sum += arrived;
  }
  if (!sizes.z)
    return;
  sums[lane] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane >= SIMDGROUP || !inside)
    return;
  for (uint other = lane + SIMDGROUP; other < width; other += SIMDGROUP)
    sum += sums[other];
  of_bias[column] = T(sum);
}

// Elements of a row, and from one row to the next.
struct Rows {
  int columns, gate, up, of_gate, of_up;
};

// The activation of `gate` times `up`: a thread for each element.
template <typename T, int KIND>
[[kernel]]
void gated(device T *found [[buffer(0)]], const device T *gate [[buffer(1)]], const device T *up [[buffer(2)]],
           constant Rows &rows [[buffer(3)]], uint number [[thread_position_in_grid]]) {
  const long row = number / rows.columns, column = number % rows.columns;
  const float x = float(gate[row * rows.gate + column]);
  found[number] = T(x * share<KIND>(x).x * float(up[row * rows.up + column]));
}

template <typename T, int KIND>
[[kernel]]
void gated_backward(device T *of_gate [[buffer(0)]], device T *of_up [[buffer(1)]],
                    const device T *upstream [[buffer(2)]], const device T *gate [[buffer(3)]],
                    const device T *up [[buffer(4)]], constant Rows &rows [[buffer(5)]],
                    uint number [[thread_position_in_grid]]) {
  const long row = number / rows.columns, column = number % rows.columns;
  const float x = float(gate[row * rows.gate + column]), arrived = float(upstream[number]);
  const float2 passed = share<KIND>(x);
  of_gate[row * rows.of_gate + column] = T(arrived * float(up[row * rows.up + column]) * (passed.x + x * passed.y));
  of_up[row * rows.of_up + column] = T(arrived * x * passed.x);
}

#define INSTANCES(T, NAME, KIND)                                                                                    \
  template [[host_name("forward_" #NAME "_" #T)]] [[kernel]] decltype(forward<T, KIND>) forward<T, KIND>;           \
  template [[host_name("backward_" #NAME "_" #T)]] [[kernel]] decltype(backward<T, KIND>) backward<T, KIND>;        \
  template [[host_name("gated_" #NAME "_" #T)]] [[kernel]] decltype(gated<T, KIND>) gated<T, KIND>;                 \
  template [[host_name("gated_backward_" #NAME "_" #T)]] [[kernel]] decltype(gated_backward<T, KIND>) gated_backward<T, KIND>;
#define KINDS(T) INSTANCES(T, gelu, GELU) INSTANCES(T, tanh, TANH) INSTANCES(T, silu, SILU) INSTANCES(T, quick, QUICK)
KINDS(float)
KINDS(half)
KINDS(bfloat)
