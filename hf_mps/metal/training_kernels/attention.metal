// Attention both ways, whose scores are never in memory (Dao, FlashAttention-2, arXiv 2307.08691).
//
// A threadgroup of four simdgroups has a block of rows, queries or, for the gradients of keys and values, keys. It takes
// the other side 32 at a time, one for each lane, and each simdgroup computes a few rows with them. Rows are padded with
// zeros to W columns. Sums are float32.
constant constexpr int LANES = 32, SIMDGROUPS = 4, THREADS = LANES * SIMDGROUPS;
constant constexpr float LOWEST = -3.4e38f;  // below any score; not an infinity, whose difference from itself is no number

// A thread's arrays are registers where the loops over them are unrolled.
#define UNROLLED _Pragma("clang loop unroll(full)")
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)

struct View {  // elements from one to the next; columns are side by side
  int batch, head, place;
};
struct Call {
  int heads, sharing, queries, keys, width, value_width;  // sharing: heads of queries for each head of keys
  int causal, masked, threshold;
  View query, key, value, out;
  int mask[4];
  View of_query, of_key, of_value, upstream;
};

inline bool is_seen(constant Call &call, const device uchar *mask, int batch, int head, int query, int key) {
  if (query >= call.queries || key >= call.keys || (call.causal && key > query))
    return false;
  const long at = long(batch) * call.mask[0] + long(head) * call.mask[1] + long(query) * call.mask[2];
  return !call.masked || mask[at + long(key) * call.mask[3]];
}

inline bool is_kept(constant Call &call, ulong2 draw, int matrix, int query, int key) {
  return is_drawn(draw, call.threshold, (uint(matrix) * call.queries + query) * call.keys + key);
}

inline long offset(constant View &view, int batch, int head) { return long(batch) * view.batch + long(head) * view.head; }

// `rows` of a matrix of `count` from `first` on, as float32, each followed by `apart - W` numbers that nobody reads.
template <typename T, int W>
inline void load(threadgroup float *block, int apart, const device T *from, int place, int first, int rows, int count,
                 int width, int thread_number) {
  for (int i = thread_number; i < rows * W; i += THREADS) {
    const int row = i / W, column = i % W;
    const bool inside = first + row < count && column < width;
    block[row * apart + column] = inside ? float(from[long(first + row) * place + column]) : 0.0f;
  }
}

// The products of this simdgroup's rows with the row of this lane.
template <int W, int ROWS>
inline void products(thread float *found, threadgroup const float *mine, threadgroup const float *theirs, int lane) {
  threadgroup const float4 *rows = (threadgroup const float4 *)mine;
  threadgroup const float4 *other = (threadgroup const float4 *)(theirs + lane * (W + 4));
  UNROLLED for (int r = 0; r < ROWS; ++r)
    found[r] = 0;
  for (int c = 0; c < W / 4; ++c) {
    const float4 one = other[c];
    UNROLLED for (int r = 0; r < ROWS; ++r)
      found[r] += dot(rows[r * (W / 4) + c], one);
  }
}

// Adds the other side's rows by their weights to this simdgroup's, of which a lane has every 32nd column.
template <int W, int ROWS>
inline void add(thread float (*found)[W / LANES], threadgroup const float *weights, threadgroup const float *theirs,
                int lane) {
  threadgroup const float4 *weight = (threadgroup const float4 *)weights;
  for (int j = 0; j < LANES; j += 4) {
    UNROLLED for (int e = 0; e < W / LANES; ++e) {
      threadgroup const float *column = theirs + j * (W + 4) + e * LANES + lane;
      const float4 four = float4(column[0], column[W + 4], column[2 * (W + 4)], column[3 * (W + 4)]);
      UNROLLED for (int r = 0; r < ROWS; ++r)
        found[r][e] += dot(weight[r * (LANES / 4) + j / 4], four);
    }
  }
}

// sums: the logarithm of each row's sum of powers, from which the gradients know its chances.
template <typename T, int W>
[[kernel, max_total_threads_per_threadgroup(THREADS)]]
void forward(device T *out [[buffer(0)]], device float *sums [[buffer(1)]], const device T *query [[buffer(2)]],
             const device T *key [[buffer(3)]], const device T *value [[buffer(4)]],
             const device uchar *mask [[buffer(5)]], constant ulong2 &draw [[buffer(6)]],
             constant Call &call [[buffer(7)]], constant float2 &factors [[buffer(8)]],
             uint group [[threadgroup_position_in_grid]], uint number [[thread_position_in_threadgroup]]) {
  constexpr int ROWS = W == 128 ? 4 : 8, BLOCK = ROWS * SIMDGROUPS;
  threadgroup float mine[BLOCK * W], theirs[LANES * (W + 4)], weights[BLOCK * LANES];
  const int blocks = (call.queries + BLOCK - 1) / BLOCK, first = int(group) % blocks * BLOCK;
  const int one = int(group) / blocks, batch = one / call.heads, head = one % call.heads;
  const int lane = number % LANES, simdgroup = number / LANES, top = simdgroup * ROWS;
  query += offset(call.query, batch, head);
  key += offset(call.key, batch, head / call.sharing);
  value += offset(call.value, batch, head / call.sharing);
  load<T, W>(mine, W, query, call.query.place, first, BLOCK, call.queries, call.width, number);
  float scores[ROWS], most[ROWS], sum[ROWS], found[ROWS][W / LANES];
  UNROLLED for (int r = 0; r < ROWS; ++r) {
    most[r] = LOWEST;
    sum[r] = 0;
    UNROLLED for (int e = 0; e < W / LANES; ++e)
      found[r][e] = 0;
  }
  const int end = call.causal ? min(call.keys, first + BLOCK) : call.keys;
  for (int start = 0; start < end; start += LANES) {
    BARRIER;  // what was there before has been read
    load<T, W>(theirs, W + 4, key, call.key.place, start, LANES, call.keys, call.width, number);
    BARRIER;
    products<W, ROWS>(scores, mine + top * W, theirs, lane);
    BARRIER;
    load<T, W>(theirs, W + 4, value, call.value.place, start, LANES, call.keys, call.value_width, number);
    UNROLLED for (int r = 0; r < ROWS; ++r) {
      const int row = first + top + r;
      const bool seen = is_seen(call, mask, batch, head, row, start + lane);
      const float score = seen ? scores[r] * factors.x : LOWEST, before = most[r];
      most[r] = max(before, simd_max(score));
      const float power = seen ? exp(score - most[r]) : 0.0f, shrink = exp(before - most[r]);
      sum[r] = sum[r] * shrink + simd_sum(power);
      UNROLLED for (int e = 0; e < W / LANES; ++e)
        found[r][e] *= shrink;
      weights[(top + r) * LANES + lane] = is_kept(call, draw, one, row, start + lane) ? power : 0.0f;
    }
    BARRIER;
    add<W, ROWS>(found, weights + top * LANES, theirs, lane);
  }
  out += offset(call.out, batch, head);
  UNROLLED for (int r = 0; r < ROWS; ++r) {
    const int row = first + top + r;
    if (row >= call.queries)
      continue;
    const float factor = sum[r] == 0 ? 0.0f : factors.y / sum[r];  // a row that sees nothing
    UNROLLED for (int e = 0; e < W / LANES; ++e)
      if (e * LANES + lane < call.value_width)
        out[long(row) * call.out.place + e * LANES + lane] = T(found[r][e] * factor);
    if (lane == 0)
      sums[long(one) * call.queries + row] = most[r] + log(sum[r]);
  }
}

// passed: for each row the product of its result and the gradient that arrives, which both gradients take.
template <typename T, int W>
[[kernel, max_total_threads_per_threadgroup(THREADS)]]
void queries(device T *of_query [[buffer(0)]], device float *passed [[buffer(1)]], const device T *upstream [[buffer(2)]],
             const device T *out [[buffer(3)]], const device float *sums [[buffer(4)]],
             const device T *query [[buffer(5)]], const device T *key [[buffer(6)]],
             const device T *value [[buffer(7)]], const device uchar *mask [[buffer(8)]],
             constant ulong2 &draw [[buffer(9)]], constant Call &call [[buffer(10)]],
             constant float2 &factors [[buffer(11)]], uint group [[threadgroup_position_in_grid]],
             uint number [[thread_position_in_threadgroup]]) {
  constexpr int ROWS = W == 128 ? 2 : 4, BLOCK = ROWS * SIMDGROUPS;
  threadgroup float mine[BLOCK * W], arriving[BLOCK * W], theirs[LANES * (W + 4)], weights[BLOCK * LANES];
  const int blocks = (call.queries + BLOCK - 1) / BLOCK, first = int(group) % blocks * BLOCK;
  const int one = int(group) / blocks, batch = one / call.heads, head = one % call.heads;
  const int lane = number % LANES, simdgroup = number / LANES, top = simdgroup * ROWS;
  query += offset(call.query, batch, head);
  key += offset(call.key, batch, head / call.sharing);
  value += offset(call.value, batch, head / call.sharing);
  upstream += offset(call.upstream, batch, head);
  out += offset(call.out, batch, head);
  load<T, W>(mine, W, query, call.query.place, first, BLOCK, call.queries, call.width, number);
  load<T, W>(arriving, W, upstream, call.upstream.place, first, BLOCK, call.queries, call.value_width, number);
  float scores[ROWS], of_weight[ROWS], through[ROWS], total[ROWS], found[ROWS][W / LANES];
  UNROLLED for (int r = 0; r < ROWS; ++r) {
    const int row = first + top + r;
    float sum = 0;
    UNROLLED for (int e = 0; e < W / LANES; ++e) {
      const int column = e * LANES + lane;
      found[r][e] = 0;
      if (row < call.queries && column < call.value_width)
        sum += float(out[long(row) * call.out.place + column]) * float(upstream[long(row) * call.upstream.place + column]);
    }
    through[r] = simd_sum(sum);
    total[r] = row < call.queries ? sums[long(one) * call.queries + row] : 0.0f;
    if (row < call.queries && lane == 0)
      passed[long(one) * call.queries + row] = through[r];
  }
  const int end = call.causal ? min(call.keys, first + BLOCK) : call.keys;
  for (int start = 0; start < end; start += LANES) {
    BARRIER;
    load<T, W>(theirs, W + 4, key, call.key.place, start, LANES, call.keys, call.width, number);
    BARRIER;
    products<W, ROWS>(scores, mine + top * W, theirs, lane);
    BARRIER;
    load<T, W>(theirs, W + 4, value, call.value.place, start, LANES, call.keys, call.value_width, number);
    BARRIER;
    products<W, ROWS>(of_weight, arriving + top * W, theirs, lane);
    BARRIER;
    load<T, W>(theirs, W + 4, key, call.key.place, start, LANES, call.keys, call.width, number);
    UNROLLED for (int r = 0; r < ROWS; ++r) {
      const int row = first + top + r;
      const bool seen = is_seen(call, mask, batch, head, row, start + lane);
      const float chance = seen ? exp(scores[r] * factors.x - total[r]) : 0.0f;
      const float arrived = is_kept(call, draw, one, row, start + lane) ? of_weight[r] * factors.y : 0.0f;
      weights[(top + r) * LANES + lane] = chance * (arrived - through[r]);
    }
    BARRIER;
    add<W, ROWS>(found, weights + top * LANES, theirs, lane);
  }
  of_query += offset(call.of_query, batch, head);
  UNROLLED for (int r = 0; r < ROWS; ++r)
    UNROLLED for (int e = 0; e < W / LANES; ++e) {
      const int row = first + top + r, column = e * LANES + lane;
      if (row < call.queries && column < call.width)
        of_query[long(row) * call.of_query.place + column] = T(found[r][e] * factors.x);
    }
}

template <typename T, int W>
[[kernel, max_total_threads_per_threadgroup(THREADS)]]
void keys(device T *of_key [[buffer(0)]], device T *of_value [[buffer(1)]], const device float *passed [[buffer(2)]],
          const device T *upstream [[buffer(3)]], const device float *sums [[buffer(4)]],
          const device T *query [[buffer(5)]], const device T *key [[buffer(6)]], const device T *value [[buffer(7)]],
          const device uchar *mask [[buffer(8)]], constant ulong2 &draw [[buffer(9)]],
          constant Call &call [[buffer(10)]], constant float2 &factors [[buffer(11)]],
          uint group [[threadgroup_position_in_grid]], uint number [[thread_position_in_threadgroup]]) {
  constexpr int ROWS = W == 128 ? 2 : 4, BLOCK = ROWS * SIMDGROUPS;
  threadgroup float mine[BLOCK * W], values[BLOCK * W], theirs[LANES * (W + 4)], weights[BLOCK * LANES];
  const int blocks = (call.keys + BLOCK - 1) / BLOCK, first = int(group) % blocks * BLOCK, heads = call.heads / call.sharing;
  const int batch = int(group) / blocks / heads, shared = int(group) / blocks % heads;
  const int lane = number % LANES, simdgroup = number / LANES, top = simdgroup * ROWS;
  key += offset(call.key, batch, shared);
  value += offset(call.value, batch, shared);
  load<T, W>(mine, W, key, call.key.place, first, BLOCK, call.keys, call.width, number);
  load<T, W>(values, W, value, call.value.place, first, BLOCK, call.keys, call.value_width, number);
  float scores[ROWS], of_weight[ROWS], found[ROWS][W / LANES], found_values[ROWS][W / LANES];
  UNROLLED for (int r = 0; r < ROWS; ++r)
    UNROLLED for (int e = 0; e < W / LANES; ++e)
      found[r][e] = found_values[r][e] = 0;
  for (int head = shared * call.sharing; head < (shared + 1) * call.sharing; ++head) {
    const device T *asking = query + offset(call.query, batch, head);
    const device T *arriving = upstream + offset(call.upstream, batch, head);
    const int one = batch * call.heads + head;
    for (int start = call.causal ? first / LANES * LANES : 0; start < call.queries; start += LANES) {
      const int place = start + lane;
      const bool inside = place < call.queries;
      const float total = inside ? sums[long(one) * call.queries + place] : 0.0f;
      const float through = inside ? passed[long(one) * call.queries + place] : 0.0f;
      BARRIER;
      load<T, W>(theirs, W + 4, asking, call.query.place, start, LANES, call.queries, call.width, number);
      BARRIER;
      products<W, ROWS>(scores, mine + top * W, theirs, lane);
      BARRIER;
      load<T, W>(theirs, W + 4, arriving, call.upstream.place, start, LANES, call.queries, call.value_width, number);
      BARRIER;
      products<W, ROWS>(of_weight, values + top * W, theirs, lane);
      UNROLLED for (int r = 0; r < ROWS; ++r) {
        const int row = first + top + r;
        const bool seen = is_seen(call, mask, batch, head, place, row);
        const float chance = seen ? exp(scores[r] * factors.x - total) : 0.0f;
        const float kept = is_kept(call, draw, one, place, row) ? factors.y : 0.0f;
        weights[(top + r) * LANES + lane] = chance * kept;
        scores[r] = chance * (of_weight[r] * kept - through);
      }
      BARRIER;
      add<W, ROWS>(found_values, weights + top * LANES, theirs, lane);
      BARRIER;
      load<T, W>(theirs, W + 4, asking, call.query.place, start, LANES, call.queries, call.width, number);
      UNROLLED for (int r = 0; r < ROWS; ++r)
        weights[(top + r) * LANES + lane] = scores[r];
      BARRIER;
      add<W, ROWS>(found, weights + top * LANES, theirs, lane);
    }
  }
  of_key += offset(call.of_key, batch, shared);
  of_value += offset(call.of_value, batch, shared);
  UNROLLED for (int r = 0; r < ROWS; ++r)
    UNROLLED for (int e = 0; e < W / LANES; ++e) {
      const int row = first + top + r, column = e * LANES + lane;
      if (row < call.keys && column < call.width)
        of_key[long(row) * call.of_key.place + column] = T(found[r][e] * factors.x);
      if (row < call.keys && column < call.value_width)
        of_value[long(row) * call.of_value.place + column] = T(found_values[r][e]);
    }
}

#define INSTANCES(T, W)                                                                         \
  template [[host_name("forward_" #W "_" #T)]] [[kernel]] decltype(forward<T, W>) forward<T, W>; \
  template [[host_name("queries_" #W "_" #T)]] [[kernel]] decltype(queries<T, W>) queries<T, W>; \
  template [[host_name("keys_" #W "_" #T)]] [[kernel]] decltype(keys<T, W>) keys<T, W>;
#define WIDTHS(T) INSTANCES(T, 32) INSTANCES(T, 64) INSTANCES(T, 128)
WIDTHS(float)
WIDTHS(half)
WIDTHS(bfloat)
