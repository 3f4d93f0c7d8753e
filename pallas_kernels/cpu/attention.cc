// Tree attention on CPUs: the contract is that of `tree_attention` in pallas_kernels/attention.py.
//
// The sequence of a query is, in this order: the committed tokens by position, then the new tokens
// that its row of the mask allows, by index. The bits of a result depend on the query vector, on
// this sequence, and on the first position that the query sees: not on the other queries and rows,
// on the group, on the number of threads, on which tokens of the sequence are in the cache (if the
// cache has the dtype of the new tokens), or on whether the cache is a ring. Three rules ensure it:
//
//  1. Keys are processed in blocks of KEYS by their index in the sequence. A block is a product
//     with the keys, the exponentials, and a product with the values. Every element of a product
//     is one chain of fused multiply-adds, so it does not depend on the tile that computes it.
//  2. A sequence is cut every CHUNK keys. Each chunk begins with an empty state; the states are
//     merged in the order of the chunks. Threads draw runs of chunks.
//  3. Whether the maximum of a row is raised depends on the scores of that row only. Keys before
//     the first that it sees have weight 0, and so have chunks without any other.
//
// The query rows of a key/value head (R = T * G) share the blocks that lie in the cache. The tail
// of a query, which begins at the last boundary of a block in the cache, is gathered and processed
// by the same routine, for its G heads and for the following queries that see the same keys.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <type_traits>
#include <vector>

#include "simd.h"
#include "tasks.h"

namespace ffi = xla::ffi;

namespace {

constexpr int KEYS = 64;       // keys of a block
constexpr int CHUNK = 512;     // keys of a chunk
constexpr int COLUMNS = 4;     // a tile of a product has ROWS rows and COLUMNS vectors: with one
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int ROWS = 3;        // column and the elements of its rows, 16 registers
#else
constexpr int ROWS = 6;        // of 32 registers
#endif
constexpr int PANEL = 24;      // rows whose exponentials lie between the two products
constexpr float NEVER = -1e30f;  // the maximum of a row that has seen no key, and a hidden score
constexpr float SLACK = 8;     // a maximum is kept while scores exceed it by at most this, in log2
constexpr float EMPTY_LSE = -1e29f;  // pallas_kernels.lse_merge
constexpr int64_t WAVE_BYTES = 24 << 20;  // of states; malloc keeps up to 32 MiB for later calls
constexpr int64_t SMALL = 1 << 17;   // multiply-adds that do not pay for a second thread

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// 2**x with a relative error of 1e-7; 1 for 0, and 0 below -127.
INLINE vec exp2_of(vec x) {
  vec n = round_even(x), f = sub(x, n);
  vec y = fill(0.00015353361959569156f);
  y = fma(y, f, fill(0.0013398875016719103f));
  y = fma(y, f, fill(0.00961843691766262f));
  y = fma(y, f, fill(0.055503323674201965f));
  y = fma(y, f, fill(0.24022647738456726f));
  y = fma(y, f, fill(0.6931471824645996f));
  y = fma(y, f, fill(1));
  return times_power_of_two(y, n);
}

// C = A B, or C += A B, for M rows of A and N vectors of columns of B, over i < count in order.
// Each step prefetches STEP bytes of the block that `ahead` points to.
template <int M, int N, int STEP, class T>
INLINE void tile(const float* a, int64_t a_step, const T* b, int64_t b_step, int count, bool add_to,
                 float* c, int64_t c_step, const char* ahead) {
  vec sums[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sums[m][n] = add_to ? load(c + m * c_step + n * W) : zeros();
  for (int i = 0; i < count; i++) {
#pragma GCC unroll 4
    for (int byte = 0; byte < STEP; byte += 64) prefetch(ahead + i * STEP + byte);
    vec x[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) x[m] = fill(a[m * a_step + i]);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      vec y = load(b + i * b_step + n * W);
      keep(y);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) sums[m][n] = fma(x[m], y, sums[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) store(c + m * c_step + n * W, sums[m][n]);
}

// The same for at most M rows and any number of columns, a multiple of W.
template <int STEP, class T, int M = ROWS>
void product(int rows, int columns, const float* a, int64_t a_step, const T* b, int64_t b_step,
             int count, bool add_to, float* c, int64_t c_step, const char* ahead) {
  if constexpr (M > 1) {
    if (rows < M)
      return product<STEP, T, M - 1>(rows, columns, a, a_step, b, b_step, count, add_to, c, c_step,
                                     ahead);
  }
  int n = 0;
  for (; n + COLUMNS * W <= columns; n += COLUMNS * W, ahead += count * STEP)
    tile<M, COLUMNS, STEP>(a, a_step, b + n, b_step, count, add_to, c + n, c_step, ahead);
  for (; n < columns; n += W)
    tile<M, 1, 0>(a, a_step, b + n, b_step, count, add_to, c + n, c_step, ahead);
}

// Keys [live, D] to columns: out[d][key] in float32, for the multiple of W above `live`.
template <class T>
void transpose_keys(const T* k, int live, int size, float* out) {
  // Pairs of bf16 are moved as 32-bit elements, which halves the shuffles.
  constexpr int PER_LANE = std::is_same_v<T, bf16> ? 2 : 1, SPAN = PER_LANE * W;
  for (int key = 0; key < live; key += W, k += W * size, out += W) {
    int d = 0;
    for (; d + SPAN <= size; d += SPAN) {
      vec rows[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++)
        if constexpr (PER_LANE == 2)
          rows[i] = load((const float*)(k + i * size + d));
        else
          rows[i] = load(k + i * size + d);
      transpose(rows);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) {
        float* column = out + (d + i * PER_LANE) * KEYS;
        if constexpr (PER_LANE == 2) {
          vec even, odd;
          split_pairs(rows[i], &even, &odd);
          store(column, even), store(column + KEYS, odd);
        } else {
          store(column, rows[i]);
        }
      }
    }
    for (; d < size; d += W) {
      vec rows[W];
      int columns = std::min(W, size - d);
      for (int i = 0; i < W; i++) rows[i] = load_first(k + i * size + d, columns);
      transpose(rows);
      for (int i = 0; i < columns; i++) store(out + (d + i) * KEYS, rows[i]);
    }
  }
}

// One row in float32, followed by zeros up to a multiple of W.
template <class T>
INLINE void widen_row(const T* x, int size, float* out) {
  int d = 0;
  for (; d + W <= size; d += W) store(out + d, load(x + d));
  if (d < size) store(out + d, load_first(x + d, size - d));
}

// An array whose last axis has `size` elements.
struct Rows {
  const char* data;
  ffi::DataType dtype;
  int64_t size;

  explicit Rows(const ffi::AnyBuffer& x)
      : data((const char*)x.untyped_data()), dtype(x.element_type()), size(x.dimensions().back()) {}

  void widen(int64_t row, float* out) const {
    switch (dtype) {
      case ffi::F32: return widen_row((const float*)data + row * size, size, out);
      case ffi::BF16: return widen_row((const bf16*)data + row * size, size, out);
      case ffi::F16: return widen_row((const f16*)data + row * size, size, out);
      default: return widen_row((const int8_t*)data + row * size, size, out);
    }
  }
};

// One call. A head is a pair of a row of the batch and a key/value head.
struct Call {
  Rows q, k_prefix, v_prefix, k_new, v_new;
  int64_t batch, length, heads, size, kv_heads, slots, news, first_row, group, rows;
  int64_t width;       // D, rounded up to vectors
  int64_t state_size;  // floats of a row's state: sum [width], weight [W], maximum [W]
  const float *k_scales = nullptr, *v_scales = nullptr;  // null unless the cache is quantized
  int64_t mask_step;                   // 0 if the rows share the mask
  std::vector<int64_t> prefix;         // committed tokens, [B]
  std::vector<int64_t> seen;           // the length of a query's sequence, [B, T]
  std::vector<int64_t> seen_from;      // the first position that a query sees, [B, T], or empty
  std::vector<int64_t> lowest;         // that of all queries of a row, [B]
  std::vector<int32_t> visible;        // new tokens that a query sees, first in a row, [#B, T, N]
  std::vector<int64_t> first_chunk;    // of a head, [B * K + 1]
  std::unique_ptr<float[]> states;     // of the chunks from first_state on, [., R, state_size]
  int64_t first_state = 0;
  std::unique_ptr<std::atomic<int64_t>[]> chunks_left;  // of a head
  void* out;
  ffi::DataType out_dtype;
  float* lse;

  const int32_t* visible_row(int64_t b, int64_t t) const {
    return visible.data() + b * mask_step + t * news;
  }
  const int64_t* from(int64_t b, int64_t t) const {
    return seen_from.empty() ? nullptr : seen_from.data() + b * length + t;
  }
  int64_t skipped(int64_t b) const { return lowest[b] / CHUNK; }  // chunks that no query sees
  float* state(int64_t chunk) const {
    return states.get() + (chunk - first_state) * rows * state_size;
  }
};

// The buffers of a thread.
struct Scratch {
  std::vector<float> floats;
  float *q;             // [R, width], times D**-0.5 * log2(e)
  float *keys;          // [width, KEYS]
  float *values;        // [KEYS, width]
  float *p;             // [PANEL, KEYS]: scores, then weights
  float *tail_k, *tail_v;    // [KEYS, width]
  float *k_scales, *v_scales;  // of the tail, [KEYS]

  void reserve(const Call& call) {
    const int64_t block = KEYS * call.width;
    const int64_t sizes[] = {call.rows * call.width, block, block, PANEL * KEYS, block, block,
                             KEYS,                   KEYS};
    float** buffers[] = {&q, &keys, &values, &p, &tail_k, &tail_v, &k_scales, &v_scales};
    size_t total = 16;
    for (int64_t n : sizes) total += round_up(n, 16);
    if (floats.size() < total) floats.resize(total);
    float* next = (float*)round_up((intptr_t)floats.data(), 64);
    for (int i = 0; i < 8; i++) *buffers[i] = next, next += round_up(sizes[i], 16);
  }
};

// Keys and values of at most KEYS tokens, `step` elements apart.
template <class T>
struct Block {
  const T *k, *v;
  const float *k_scales, *v_scales;
  int live;
  const T *next_k, *next_v;  // of the block to prefetch
  int64_t begin;             // index of the first key in the sequence
};

// Scores of a row -> weights, of which the first `hidden` are 0; updates the row's state.
INLINE void softmax(float* p, int live, int hidden, const float* k_scales, const float* v_scales,
                    float* state, int64_t width) {
  int vectors = (live + W - 1) / W;
  if (__builtin_expect(hidden == live, 0)) {
    for (int i = 0; i < vectors * W; i++) p[i] = 0;
    return;
  }
  if (k_scales)
    for (int i = 0; i < live; i++) p[i] *= k_scales[i];
  for (int i = 0; i < hidden; i++) p[i] = NEVER;
  for (int i = live; i < vectors * W; i++) p[i] = NEVER;
  vec top = load(p);
  for (int i = 1; i < vectors; i++) top = max(top, load(p + i * W));
  float highest = maximum(top);
  vec peak = load(state + width + W), weight = load(state + width);
  if (__builtin_expect(highest > state[width + W] + SLACK, 0)) {
    vec scale = exp2_of(sub(peak, fill(highest)));
    peak = fill(highest);
    weight = mul(weight, scale);
    for (int64_t d = 0; d < width; d += W) store(state + d, mul(load(state + d), scale));
    store(state + width + W, peak);
  }
  for (int i = 0; i < vectors; i++) {
    vec e = exp2_of(sub(load(p + i * W), peak));
    weight = add(weight, e);
    store(p + i * W, e);
  }
  store(state + width, weight);
  if (v_scales)
    for (int i = 0; i < live; i++) p[i] *= v_scales[i];
}

// Adds a block to the states of `rows` queries; `from` is null, or the first positions that they
// see, one for each group of rows.
template <class T>
void attend_block(const Call& call, Scratch& s, const Block<T>& block, const float* q, int rows,
                  const int64_t* from, float* state) {
  constexpr int STEP = sizeof(T) * COLUMNS * W;  // both products together prefetch one block
  const int width = call.width, live = block.live;
  // A vector of values reaches beyond its row unless D is a multiple of W; and widening the values
  // once is faster than in every tile.
  const bool widened = call.size % W || (sizeof(T) < 4 && rows > ROWS);
  transpose_keys(block.k, live, call.size, s.keys);
  for (int first = 0; first < rows; first += PANEL) {
    int count = std::min(PANEL, rows - first), tiles = (count + ROWS - 1) / ROWS;
    for (int r = 0, m; r < count; r += m, tiles--) {
      m = (count - r + tiles - 1) / tiles;
      const float* a = q + (first + r) * width;
      float* c = s.p + r * KEYS;
      if (first + r == 0)
        product<STEP>(m, round_up(live, W), a, width, s.keys, KEYS, call.size, false, c, KEYS,
                      (const char*)block.next_k);
      else
        product<0>(m, round_up(live, W), a, width, s.keys, KEYS, call.size, false, c, KEYS,
                   nullptr);
    }
    for (int r = 0; r < count; r++) {
      float* row = state + (first + r) * call.state_size;
      int hidden = 0;
      if (from) hidden = std::clamp<int64_t>(from[(first + r) / call.group] - block.begin, 0, live);
      if (live == KEYS && !block.k_scales && !hidden)
        softmax(s.p + r * KEYS, KEYS, 0, nullptr, nullptr, row, width);
      else
        softmax(s.p + r * KEYS, live, hidden, block.k_scales, block.v_scales, row, width);
    }
    if (widened && first == 0)
      for (int i = 0; i < live; i++)
        widen_row(block.v + i * call.size, call.size, s.values + i * width);
    tiles = (count + ROWS - 1) / ROWS;
    for (int r = 0, m; r < count; r += m, tiles--) {
      m = (count - r + tiles - 1) / tiles;
      const float* a = s.p + r * KEYS;
      float* c = state + (first + r) * call.state_size;
      const char* next = (const char*)block.next_v;
      if (!widened && first + r == 0)
        product<STEP>(m, width, a, KEYS, block.v, width, live, true, c, call.state_size, next);
      else if (!widened)  // T is float
        product<0>(m, width, a, KEYS, (const float*)block.v, width, live, true, c, call.state_size,
                   next);
      else if (first + r == 0)
        product<STEP>(m, width, a, KEYS, s.values, width, live, true, c, call.state_size, next);
      else
        product<0>(m, width, a, KEYS, s.values, width, live, true, c, call.state_size, next);
    }
  }
}

// The chunk `index` of those of a head that a query sees; `state` is its states [R, state_size].
template <class T>
void attend_chunk(const Call& call, Scratch& s, int64_t head, int64_t index, float* state) {
  const int64_t b = head / call.kv_heads, kv = head % call.kv_heads, size = call.size;
  const int64_t prefix = call.prefix[b], whole = prefix / KEYS * KEYS;
  const int64_t begin = (call.skipped(b) + index) * CHUNK, end = begin + CHUNK;
  const int64_t seen_begin = std::max(begin, call.lowest[b] / KEYS * KEYS);
  for (int64_t r = 0; r < call.rows; r++) {
    float* row = state + r * call.state_size;
    std::fill(row, row + call.width + W, 0.f);
    std::fill(row + call.width + W, row + call.state_size, NEVER);
  }
  const int64_t first = ((call.first_row + b) * call.kv_heads + kv) * call.slots;  // slot 0
  const T* k = (const T*)call.k_prefix.data + first * size;
  const T* v = (const T*)call.v_prefix.data + first * size;
  for (int64_t n = seen_begin; n < std::min(end, whole); n += KEYS) {
    const int64_t slot = n % call.slots;  // in a ring of a multiple of KEYS slots
    int64_t next = slot + KEYS;           // of a full cache the next head follows
    if (n + KEYS >= prefix && prefix < call.slots) next = slot;
    const float* k_scales = call.k_scales ? call.k_scales + first + slot : nullptr;
    const float* v_scales = call.v_scales ? call.v_scales + first + slot : nullptr;
    attend_block<T>(call, s, {k + slot * size, v + slot * size, k_scales, v_scales, KEYS,
                              k + next * size, v + next * size, n},
                    s.q, call.rows, call.from(b, 0), state);
  }

  // The tails, block by block. Queries that see the same keys in a block share it.
  const int64_t rest = prefix - whole, *seen = call.seen.data() + b * call.length;
  bool gathered = false;  // the slots in the first block of every tail
  for (int64_t n = std::max(seen_begin, whole); n < end; n += KEYS) {
    const int64_t slots = n == whole ? rest : 0;
    auto live = [&](int64_t t) { return std::clamp<int64_t>(seen[t] - n, 0, KEYS); };
    auto tokens = [&](int64_t t) { return call.visible_row(b, t) + n + slots - prefix; };
    auto new_row = [&](int64_t n) { return (b * call.news + n) * call.kv_heads + kv; };
    for (int64_t t = 0, next; t < call.length; t = next) {
      const int count = live(t);
      next = t + 1;
      if (!count) continue;
      while (next < call.length && live(next) == count &&
             std::equal(tokens(t), tokens(t) + count - slots, tokens(next)))
        next++;
      for (int i = gathered ? slots : 0; i < count; i++) {
        const bool is_slot = i < slots;
        const int64_t slot = is_slot ? first + n % call.slots + i : 0;
        const int64_t row = is_slot ? slot : new_row(tokens(t)[i - slots]);
        (is_slot ? call.k_prefix : call.k_new).widen(row, s.tail_k + i * size);
        (is_slot ? call.v_prefix : call.v_new).widen(row, s.tail_v + i * size);
        s.k_scales[i] = is_slot && call.k_scales ? call.k_scales[slot] : 1;
        s.v_scales[i] = is_slot && call.v_scales ? call.v_scales[slot] : 1;
      }
      gathered = slots;
      attend_block<float>(call, s, {s.tail_k, s.tail_v, call.k_scales ? s.k_scales : nullptr,
                                    call.v_scales ? s.v_scales : nullptr, count, s.tail_k, s.tail_v,
                                    n},
                          s.q + t * call.group * call.width, (next - t) * call.group,
                          call.from(b, t), state + t * call.group * call.state_size);
    }
  }
}

template <class T>
void write_row(const float* sum, float scale, int64_t size, T* out) {
  for (int64_t d = 0; d < size; d++) narrow(sum[d] * scale, out + d);
}

// Merges the states of the chunks of a head in order, and writes the results of its queries.
// The states of the first chunk become the sums.
void merge_chunks(const Call& call, int64_t head) {
  const int64_t b = head / call.kv_heads, kv = head % call.kv_heads, width = call.width;
  float* base = call.state(call.first_chunk[head]);
  const int64_t step = call.rows * call.state_size;
  for (int64_t r = 0; r < call.rows; r++) {
    const int64_t t = r / call.group, h = kv * call.group + r % call.group;
    const int64_t chunks = round_up(call.seen[b * call.length + t], CHUNK) / CHUNK - call.skipped(b);
    float* sum = base + r * call.state_size;
    float peak = sum[width + W];
    for (int64_t c = 1; c < chunks; c++) peak = std::max(peak, sum[c * step + width + W]);
    for (int64_t c = 0; c < chunks; c++) {
      const float* part = sum + c * step;
      vec scale = exp2_of(sub(load(part + width + W), fill(peak)));
      for (int64_t d = 0; d <= width; d += W)  // the weights follow the sum
        store(sum + d, c ? fma(load(part + d), scale, load(sum + d)) : mul(load(part + d), scale));
    }
    const float weight = chunks > 0 ? ::sum(load(sum + width)) : 0;
    const float inverse = weight ? 1 / weight : 0;  // 0 if the query sees no key
    const int64_t row = (b * call.length + t) * call.heads + h, at = row * call.size;
    call.lse[row] = weight ? (peak + std::log2(double{weight})) * M_LN2 : EMPTY_LSE;
    switch (call.out_dtype) {
      case ffi::F32: write_row(sum, inverse, call.size, (float*)call.out + at); break;
      case ffi::BF16: write_row(sum, inverse, call.size, (bf16*)call.out + at); break;
      default: write_row(sum, inverse, call.size, (f16*)call.out + at);
    }
  }
}

// The queries of a head as rows [R, width]. With this scale, weights are powers of two.
void gather_queries(const Call& call, int64_t head, float* out) {
  const int64_t b = head / call.kv_heads, kv = head % call.kv_heads;
  const vec scale = fill(float(M_LOG2E / std::sqrt(double(call.size))));
  for (int64_t r = 0; r < call.rows; r++, out += call.width) {
    int64_t t = r / call.group, h = kv * call.group + r % call.group;
    call.q.widen((b * call.length + t) * call.heads + h, out);
    for (int64_t d = 0; d < call.width; d += W) store(out + d, mul(load(out + d), scale));
  }
}

template <class T>
void attend(const ffi::ThreadPool& pool, Call& call) {
  const int64_t heads = call.batch * call.kv_heads;
  int64_t keys = 0;
  call.chunks_left.reset(new std::atomic<int64_t>[heads]);
  call.first_chunk.push_back(0);
  for (int64_t head = 0; head < heads; head++) {
    const int64_t b = head / call.kv_heads;
    auto seen = call.seen.begin() + b * call.length;
    int64_t longest = call.length ? *std::max_element(seen, seen + call.length) : 0;
    int64_t chunks = std::max<int64_t>(1, round_up(longest, CHUNK) / CHUNK - call.skipped(b));
    keys += longest - call.lowest[b];
    call.chunks_left[head] = chunks;
    call.first_chunk.push_back(call.first_chunk.back() + chunks);
  }
  // States are large for many queries of a long cache, so there may be several waves of heads.
  int64_t most = 0;
  std::vector<int64_t> waves{0};  // first head of a wave
  for (int64_t head = 0; head < heads; head++) {
    auto bytes = [&](int64_t end) {
      return (call.first_chunk[end] - call.first_chunk[waves.back()]) * call.rows *
             call.state_size * int64_t{sizeof(float)};
    };
    if (head > waves.back() && bytes(head + 1) > WAVE_BYTES) waves.push_back(head);
    most = std::max(most, bytes(head + 1));
  }
  waves.push_back(heads);
  call.states.reset(new float[most / sizeof(float)]);

  for (size_t wave = 0; wave + 1 < waves.size(); wave++) {
    const int64_t begin = call.first_chunk[waves[wave]], end = call.first_chunk[waves[wave + 1]];
    call.first_state = begin;
    // A task is a run of chunks, so that most prefetches are of use to the thread that issues them.
    const int64_t threads = std::max<int64_t>(1, pool.num_threads());
    const int64_t run = std::max<int64_t>(1, (end - begin) / (8 * threads));
    auto task = [&](int64_t i) {
      static thread_local Scratch scratch;
      scratch.reserve(call);
      int64_t last_head = -1;
      for (int64_t chunk = begin + i * run; chunk < std::min(end, begin + (i + 1) * run); chunk++) {
        auto above = std::upper_bound(call.first_chunk.begin(), call.first_chunk.end(), chunk);
        int64_t head = above - call.first_chunk.begin() - 1;
        if (head != last_head) gather_queries(call, head, scratch.q);
        last_head = head;
        attend_chunk<T>(call, scratch, head, chunk - call.first_chunk[head], call.state(chunk));
        if (call.chunks_left[head].fetch_sub(1, std::memory_order_acq_rel) == 1)
          merge_chunks(call, head);
      }
    };
    const int64_t tasks = (end - begin + run - 1) / run;
    if (keys * call.rows * call.size < SMALL)
      for (int64_t i = 0; i < tasks; i++) task(i);
    else
      run_tasks(pool, tasks, task);
  }
}

ffi::Error TreeAttentionImpl(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k_prefix,
                             ffi::AnyBuffer v_prefix, ffi::AnyBuffer k_scales,
                             ffi::AnyBuffer v_scales, ffi::Buffer<ffi::S32> lengths,
                             ffi::BufferR0<ffi::S32> first_row,
                             ffi::BufferR2<ffi::S32> seen_from, ffi::AnyBuffer k_new,
                             ffi::AnyBuffer v_new, ffi::BufferR3<ffi::PRED> mask,
                             ffi::Result<ffi::AnyBuffer> out,
                             ffi::Result<ffi::BufferR3<ffi::F32>> lse) {
  auto floating = [](ffi::DataType dtype) {
    return dtype == ffi::F32 || dtype == ffi::BF16 || dtype == ffi::F16;
  };
  for (const auto& x : {q, k_prefix, v_prefix, k_new, v_new})
    if (x.dimensions().size() != 4)
      return ffi::Error::InvalidArgument("queries, keys and values must have four axes");
  const auto cache = k_prefix.element_type();
  if (!floating(q.element_type()) || !floating(k_new.element_type()) ||
      !floating(v_new.element_type()) || !floating(out->element_type()) ||
      !(floating(cache) || cache == ffi::S8) || v_prefix.element_type() != cache)
    return ffi::Error::InvalidArgument("the kernel does not support these dtypes");

  const auto dims = q.dimensions(), slots = k_prefix.dimensions();
  Call call{Rows(q), Rows(k_prefix), Rows(v_prefix), Rows(k_new), Rows(v_new)};
  call.batch = dims[0], call.length = dims[1], call.heads = dims[2], call.size = dims[3];
  call.kv_heads = slots[1], call.slots = slots[2], call.news = k_new.dimensions()[1];
  call.out = out->untyped_data(), call.out_dtype = out->element_type();
  call.lse = lse->typed_data();
  if (!call.batch || !call.length || !call.heads || !call.size) return ffi::Error::Success();
  call.group = call.heads / call.kv_heads;
  call.rows = call.length * call.group;
  call.width = round_up(call.size, W);
  call.state_size = call.width + 2 * W;
  call.mask_step = mask.dimensions()[0] == 1 ? 0 : call.length * call.news;
  call.first_row = std::clamp<int64_t>(*first_row.typed_data(), 0, slots[0] - call.batch);
  if (cache == ffi::S8) {
    call.k_scales = (const float*)k_scales.untyped_data();
    call.v_scales = (const float*)v_scales.untyped_data();
  }
  const int64_t mask_rows = mask.dimensions()[0] * call.length;
  const int64_t counts_step = call.mask_step ? call.length : 0;
  std::vector<int64_t> counts(mask_rows);
  call.visible.resize(mask_rows * call.news);
  for (int64_t row = 0; row < mask_rows; row++) {
    const bool* sees = mask.typed_data() + row * call.news;
    int32_t* tokens = call.visible.data() + row * call.news;
    for (int64_t n = 0; n < call.news; n++) tokens[counts[row]] = n, counts[row] += sees[n];
  }
  const bool has_windows = seen_from.element_count();
  if (has_windows && call.slots % KEYS)
    return ffi::Error::InvalidArgument("with seen_from, slots must be a multiple of 64");
  for (int64_t b = 0; b < call.batch; b++) {
    const int64_t live = std::max<int64_t>(0, lengths.typed_data()[b]);
    const int64_t prefix = has_windows && call.slots ? live : std::min(live, call.slots);
    call.prefix.push_back(prefix);
    call.lowest.push_back(has_windows ? prefix : 0);
    for (int64_t t = 0; t < call.length; t++) {
      call.seen.push_back(prefix + counts[b * counts_step + t]);
      if (!has_windows) continue;
      const int64_t oldest = std::max<int64_t>(0, prefix - call.slots);
      const int64_t from = seen_from.typed_data()[b * call.length + t];
      call.seen_from.push_back(std::clamp(from, oldest, prefix));
      call.lowest[b] = std::min(call.lowest[b], call.seen_from.back());
    }
  }
  switch (cache) {
    case ffi::F32: attend<float>(pool, call); break;
    case ffi::BF16: attend<bf16>(pool, call); break;
    case ffi::F16: attend<f16>(pool, call); break;
    default: attend<int8_t>(pool, call);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TreeAttention, TreeAttentionImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR3<ffi::PRED>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::BufferR3<ffi::F32>>());
