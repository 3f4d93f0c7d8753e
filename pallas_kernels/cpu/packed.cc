// Products with matrices in the formats of GGUF files: y[m, n] = sum over k of x[m, k] w[n, k].
//
// Activations are rounded to 8 bits with a scale for each group of 32 inputs, so the products of a
// group are sums of integers, which are exact: a row has the same bits in any number of rows.
// Groups are added in their order, in float32, by fused multiply-adds.
//
// A packed matrix is [outputs / 16, units, bytes of a unit]. A unit has 16 outputs and 256 inputs
// of K formats, whose scales have two levels, or 32 inputs of other formats:
//
//   float16 scales of the 16 outputs, and minima or scales of minima, if the format has them;
//   in K formats, for each group of 16 or 32 inputs, 8-bit scales of the outputs, then 8-bit minima
//   in the same order, and zeros up to a multiple of 64 bytes;
//   for each 32 inputs the values, (value - offset) * scale + minimum: vectors of 64 bytes with
//   inputs 4v to 4v + 3 of each output, v < 8. In up to 6 bits the lower half of a byte has the
//   lowest 4 bits of v < 4, and the upper half those of v + 4. The fifth bits follow in 64 bytes,
//   bit v from vector v. The fifth and sixth follow in 2 x 64 bytes, bits 2v from v and from v + 4.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "lanes.h"
#include "tasks.h"

namespace ffi = xla::ffi;

namespace {

constexpr int GROUP = 32;        // inputs with one scale of activations
// Bytes of a matrix in a task: a long stream is read faster, and threads should end together.
constexpr int64_t LEAST_BYTES = 1 << 14, MOST_BYTES = 1 << 19;
constexpr int TASKS = 4;  // of a thread, at least, if they are not smaller
constexpr int PANEL = 128;       // rows that stay in a cache for the blocks of a task
constexpr int AHEAD = 4096;      // bytes between a read and its prefetch

// A format: bits of a value, inputs of a scale, whether scales have two levels, whether those of the
// second are signed, whether there are minima, and log2 of the offset, -1 for none.
template <int bits_, int scaled_, bool is_k_, bool is_signed_, bool has_min_, int log2_offset_>
struct Format {
  static constexpr int bits = bits_, scaled = scaled_, log2_offset = log2_offset_;
  static constexpr bool is_k = is_k_, has_min = has_min_;
  using Scale = std::conditional_t<is_signed_, int8_t, uint8_t>;
  static constexpr int inputs = is_k ? 256 : GROUP, groups = inputs / GROUP;
  static constexpr int parts = GROUP / scaled;  // of a group, each with a scale
  static constexpr int first = 2 * OUTPUTS * (1 + has_min);
  static constexpr int minima = first + OUTPUTS * inputs / scaled;  // of a K format
  static constexpr int head =
      is_k ? (minima + has_min * OUTPUTS * inputs / scaled + 63) / 64 * 64 : first;
  static constexpr int values = bits * VECTOR;  // bytes of a group
  static constexpr int bytes = head + groups * values;
};
using Q4_0 = Format<4, 32, false, false, false, 3>;
using Q4_1 = Format<4, 32, false, false, true, -1>;
using Q5_0 = Format<5, 32, false, false, false, 4>;
using Q5_1 = Format<5, 32, false, false, true, -1>;
using Q8_0 = Format<8, 32, false, false, false, 7>;
using Q2_K = Format<4, 16, true, false, true, -1>;
using Q3_K = Format<4, 16, true, true, false, 2>;
using Q4_K = Format<4, 32, true, false, true, -1>;
using Q5_K = Format<5, 32, true, false, true, -1>;
using Q6_K = Format<6, 16, true, true, false, 5>;

// Calls f with the format of a type of GGUF files, by its number there; false for other types.
template <class F>
bool with_format(int64_t type, const F& f) {
  switch (type) {
    case 2: f(Q4_0()); return true;
    case 3: f(Q4_1()); return true;
    case 6: f(Q5_0()); return true;
    case 7: f(Q5_1()); return true;
    case 8: f(Q8_0()); return true;
    case 10: f(Q2_K()); return true;
    case 11: f(Q3_K()); return true;
    case 12: f(Q4_K()); return true;
    case 13: f(Q5_K()); return true;
    case 14: f(Q6_K()); return true;
    case 20: f(Q8_0()); return true;  // IQ4_NL, whose values are integers of a table
    default: return false;
  }
}

// Scale, scale * sum and sums of the 32 integers of a row in a group, and of their first 16.
struct Factor {
  float scale, scaled_sum;
  int32_t sum;
  int16_t halves[2];
};

// Rows rounded to 8 bits: [groups, count, 32]; rows of zeros are left out.
struct Rounded {
  int64_t count = 0, groups = 0;
  std::vector<int64_t> number, empty;  // among all rows
  std::vector<int8_t> x;
  std::vector<Factor> factors;
};

// Rounds 32 numbers to integers times max|x| / 127.
template <class T>
INLINE void round_group(const T* from, int8_t* to, Factor* factor) {
  float x[GROUP];
  uint32_t most = 0;
  for (int i = 0; i < GROUP; i++) x[i] = widen(from[i]);
  for (int i = 0; i < GROUP; i++) most = std::max(most, as_bits(x[i]) & 0x7fffffff);
  float largest = as_float(most), inverse = most ? 127 / largest : 0;
  int32_t sums[2] = {};
  for (int half = 0; half < 2; half++)
    for (int i = 16 * half; i < 16 * half + 16; i++) {
      // The lowest bits of 1.5 * 2^23 + x are those of x rounded to an integer.
      int32_t rounded = (int32_t)as_bits(x[i] * inverse + 12582912.f) - 0x4b400000;
      to[i] = rounded;
      sums[half] += (int8_t)rounded;
    }
  float scale = largest / 127;
  int32_t sum = sums[0] + sums[1];
  *factor = {scale, scale * sum, sum, {(int16_t)sums[0], (int16_t)sums[1]}};
}

// Whether all numbers are 0 or -0: eight bytes at a time, without their signs.
template <class T>
bool is_zero(const T* row, int64_t inputs) {
  constexpr uint64_t bits = sizeof(T) == 4 ? 0x7fffffff7fffffffull : 0x7fff7fff7fff7fffull;
  constexpr int64_t step = 64 / sizeof(T);  // divides the inputs
  for (int64_t i = 0; i < inputs; i += step) {
    uint64_t words[8], any = 0;
    std::memcpy(words, row + i, sizeof words);
    for (uint64_t word : words) any |= word;
    if (any & bits) return false;
  }
  return true;
}

template <class T>
void round_rows(const ffi::ThreadPool& pool, const T* x, int64_t rows, int64_t inputs, Rounded* out) {
  for (int64_t m = 0; m < rows; m++) {
    const T* row = x + m * inputs;
    (is_zero(row, inputs) ? out->empty : out->number).push_back(m);
  }
  int64_t count = out->count = out->number.size(), groups = out->groups = inputs / GROUP;
  out->x.resize(count * inputs);
  out->factors.resize(count * groups);
  int64_t size = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, count));  // groups of a task
  run_tasks(pool, (groups + size - 1) / size, [&](int64_t task) {
    for (int64_t g = task * size; g < std::min(groups, (task + 1) * size); g++)
      for (int64_t m = 0; m < count; m++) {
        int64_t i = g * count + m;
        round_group(x + out->number[m] * inputs + g * GROUP, &out->x[i * GROUP], &out->factors[i]);
      }
  });
}

// The values of vector v < 8 of a group.
template <class F>
INLINE Bytes vector_of(const uint8_t* values, int v) {
  if constexpr (F::bits == 8) return load_bytes(values + v * VECTOR);
  int low = v & 3, high = v >> 2;
  Bytes raw = load_bytes(values + low * VECTOR);
  Bytes four = (high ? raw >> 4 : raw) & 15;
  if constexpr (F::bits == 5) {
    Bytes fifth = load_bytes(values + 4 * VECTOR);
    return four | ((v < 4 ? fifth << (4 - v) : fifth >> (v - 4)) & 16);
  }
  if constexpr (F::bits == 6) {
    Bytes two = load_bytes(values + (4 + high) * VECTOR);
    return four | ((low < 2 ? two << (4 - 2 * low) : two >> (2 * low - 4)) & 48);
  }
  return four;
}

// Adds to the sums the vectors from `begin` on of a group of M rows.
template <class F, int M>
INLINE void add_vectors(const uint8_t* values, const int8_t* x, int begin, Dots<F::bits>* sums) {
#pragma GCC unroll UNROLL
  for (int i = 0; i < 8 / F::parts; i++) {
    // Both halves of a byte are read at once, unless they have different scales.
    int v = F::parts == 2 ? begin + i : i / 2 + i % 2 * 4;
    Bytes w = vector_of<F>(values, v);
#pragma GCC unroll UNROLL
    for (int m = 0; m < M; m++) sums[m].add(w, x + m * GROUP + 4 * v);
    constexpr int most = F::bits == 4 ? 8 : F::bits == 5 ? 4 : 2;
    if ((i + 1) % most == 0 || i + 1 == 8 / F::parts)
#pragma GCC unroll UNROLL
      for (int m = 0; m < M; m++) sums[m].widen();
  }
}

// The products of M rows from `first` on with a block of 16 outputs: y [M, 16].
template <class F, int M>
__attribute__((noinline)) void tile(const uint8_t* unit, const Rounded& rows, int64_t first, float* y) {
  Floats out[M];
  for (int m = 0; m < M; m++) out[m] = fill_floats(0);
  const int8_t* x = &rows.x[first * GROUP];
  const Factor* factors = &rows.factors[first];
  for (int64_t done = 0; done < rows.groups; done += F::groups, unit += F::bytes) {
    if constexpr (F::is_k)
      for (int i = 0; i < F::head; i += 64) __builtin_prefetch(unit + AHEAD + i);
    Floats scale = load_halves(unit), minimum = fill_floats(0);
    if constexpr (F::has_min) minimum = load_halves(unit + 2 * OUTPUTS);
    if constexpr (F::has_min && F::is_k) minimum = minimum * fill_floats(-1);
    const uint8_t* values = unit + F::head;
    for (int g = 0; g < F::groups; g++, values += F::values) {
      for (int i = 0; i < F::values; i += 64) __builtin_prefetch(values + AHEAD + i);
#pragma GCC unroll UNROLL
      for (int part = 0; part < F::parts; part++) {
        Dots<F::bits> sums[M];
        add_vectors<F, M>(values, x, 4 * part, sums);
        Floats own = scale, least = minimum;
        if constexpr (F::is_k) {
          const uint8_t* second = unit + F::first + (g * F::parts + part) * OUTPUTS;
          own = own * load_floats(second, typename F::Scale());
          if constexpr (F::has_min)
            least = least * load_floats(second + (F::minima - F::first), uint8_t());
        }
#pragma GCC unroll UNROLL
        for (int m = 0; m < M; m++) {
          const Factor& factor = factors[m];
          int32_t sum = F::parts == 1 ? factor.sum : factor.halves[part];
          Floats total = F::log2_offset < 0 ? sums[m].floats() : sums[m].minus(F::log2_offset, sum);
          out[m] = multiply_add(total, own * fill_floats(factor.scale), out[m]);
          if constexpr (F::has_min) {
            float scaled = F::parts == 1 ? factor.scaled_sum : factor.scale * sum;
            out[m] = multiply_add(least, fill_floats(scaled), out[m]);
          }
        }
      }
      x += rows.count * GROUP;
      factors += rows.count;
    }
  }
  for (int m = 0; m < M; m++) store_floats(y + m * OUTPUTS, out[m]);
}

template <class F, int M = MOST_ROWS>
void rows_tile(int count, const uint8_t* unit, const Rounded& rows, int64_t first, float* y) {
  if constexpr (M > 0) {
    if (count == M) return tile<F, M>(unit, rows, first, y);
    rows_tile<F, M - 1>(count, unit, rows, first, y);
  }
}

using Type = ffi::DataType;

// Writes 16 outputs from element i on.
INLINE void put(void* data, Type type, int64_t i, const float* values) {
  if (type == Type::F32)
    std::memcpy((float*)data + i, values, OUTPUTS * sizeof(float));
  else if (type == Type::BF16)
    for (int o = 0; o < OUTPUTS; o++) narrow(values[o], (bf16*)data + i + o);
  else
    for (int o = 0; o < OUTPUTS; o++) narrow(values[o], (f16*)data + i + o);
}

// Writes blocks [begin, end) of 16 outputs of all rows.
template <class F>
void products(const uint8_t* matrix, const Rounded& rows, int64_t begin, int64_t end,
              int64_t outputs, void* y, Type type) {
  int64_t stride = rows.groups / F::groups * F::bytes;
  float block[MOST_ROWS * OUTPUTS];
  for (int64_t panel = 0; panel < rows.count; panel += PANEL) {
    int64_t count = std::min<int64_t>(PANEL, rows.count - panel);
    int64_t tiles = (count + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t b = begin; b < end; b++)
      for (int64_t t = 0; t < tiles; t++) {
        int64_t first = panel + t * count / tiles, last = panel + (t + 1) * count / tiles;
        rows_tile<F>(last - first, matrix + b * stride, rows, first, block);
        for (int64_t m = first; m < last; m++)
          put(y, type, rows.number[m] * outputs + b * OUTPUTS, block + (m - first) * OUTPUTS);
      }
  }
  std::fill(block, block + OUTPUTS, 0.f);
  for (int64_t m : rows.empty)
    for (int64_t b = begin; b < end; b++) put(y, type, m * outputs + b * OUTPUTS, block);
}

bool is_float(Type type) { return type == Type::F32 || type == Type::BF16 || type == Type::F16; }

// x [..., inputs] and for each result [..., outputs] its packed matrix and the number of its type.
ffi::Error packed_linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs matrices,
                         ffi::RemainingRets results, int64_t inputs,
                         ffi::Span<const int64_t> types) {
  if (inputs <= 0 || inputs % GROUP || matrices.size() != results.size() ||
      types.size() != results.size() || !is_float(x.element_type()))
    return ffi::Error::InvalidArgument("packed: inconsistent arguments");
  int64_t rows = (int64_t)x.element_count() / inputs;
  if (!rows) return ffi::Error::Success();
  struct Task {
    int matrix;
    int64_t begin, end;
  };
  std::vector<Task> tasks;
  int64_t bytes = 0;
  for (int i = 0; i < (int)results.size(); i++)
    bytes += matrices.get<ffi::AnyBuffer>(i)->size_bytes();
  bytes = std::clamp(bytes / (TASKS * pool.num_threads()), LEAST_BYTES, MOST_BYTES);
  for (int i = 0; i < (int)results.size(); i++) {
    auto result = **results.get<ffi::AnyBuffer>(i);
    int64_t size = matrices.get<ffi::AnyBuffer>(i)->size_bytes();
    int64_t outputs = (int64_t)result.element_count() / rows, stride = 0;
    bool known = with_format(types[i], [&](auto format) {
      if (inputs % format.inputs == 0) stride = inputs / format.inputs * format.bytes;
    });
    if (!known || !stride || outputs % OUTPUTS || outputs / OUTPUTS * stride != size ||
        !is_float(result.element_type()))
      return ffi::Error::InvalidArgument("packed: a result does not fit its matrix");
    int64_t blocks = outputs / OUTPUTS, most = std::max<int64_t>(1, bytes / stride);
    for (int64_t b = 0; b < blocks; b += most)
      tasks.push_back({i, b, std::min(blocks, b + most)});
  }
  Rounded rounded;
  if (x.element_type() == Type::F32)
    round_rows(pool, (const float*)x.untyped_data(), rows, inputs, &rounded);
  else if (x.element_type() == Type::BF16)
    round_rows(pool, (const bf16*)x.untyped_data(), rows, inputs, &rounded);
  else
    round_rows(pool, (const f16*)x.untyped_data(), rows, inputs, &rounded);
  run_tasks(pool, tasks.size(), [&](int64_t t) {
    auto [i, begin, end] = tasks[t];
    auto result = **results.get<ffi::AnyBuffer>(i);
    auto matrix = (const uint8_t*)matrices.get<ffi::AnyBuffer>(i)->untyped_data();
    with_format(types[i], [&](auto format) {
      products<decltype(format)>(matrix, rounded, begin, end, result.element_count() / rows,
                                 result.untyped_data(), result.element_type());
    });
  });
  return ffi::Error::Success();
}

// One value of a vector: that of output o < 16 and input k < 32.
template <class F>
INLINE int value_of(const uint8_t* values, int o, int k) {
  int v = k / 4, low = v & 3, high = v >> 2, at = 4 * o + k % 4;
  if constexpr (F::bits == 8) return values[v * VECTOR + at];
  int value = values[low * VECTOR + at] >> (4 * high) & 15;
  if constexpr (F::bits == 5) value |= (values[4 * VECTOR + at] >> v & 1) << 4;
  if constexpr (F::bits == 6) value |= (values[(4 + high) * VECTOR + at] >> (2 * low) & 3) << 4;
  return value;
}

INLINE float half_at(const uint8_t* p) {
  f16 half;
  std::memcpy(&half, p, 2);
  return widen(half);
}

// Dequantizes an output of a matrix: y [inputs].
template <class F>
void dequantize(const uint8_t* matrix, int64_t inputs, int64_t output, float* y) {
  int o = output % OUTPUTS;
  const uint8_t* unit = matrix + output / OUTPUTS * (inputs / F::inputs) * F::bytes;
  for (int64_t k = 0; k < inputs; unit += F::bytes)
    for (int g = 0; g < F::groups; g++)
      for (int i = 0; i < GROUP; i++, k++) {
        float scale = half_at(unit + 2 * o), minimum = 0;
        if constexpr (F::has_min) minimum = half_at(unit + 2 * (OUTPUTS + o));
        if constexpr (F::is_k) {
          const uint8_t* second = unit + F::first + (g * F::parts + i / F::scaled) * OUTPUTS + o;
          scale *= (typename F::Scale)*second;
          if constexpr (F::has_min) minimum *= -(float)second[F::minima - F::first];
        }
        int offset = F::log2_offset < 0 ? 0 : 1 << (F::log2_offset & 31);
        int value = value_of<F>(unit + F::head + g * F::values, o, i) - offset;
        y[k] = value * scale + minimum;
      }
}

// Rows of a packed matrix: float32 [..., inputs], zeros for numbers that it does not have.
ffi::Error packed_rows(ffi::AnyBuffer matrix, ffi::Buffer<ffi::S32> numbers,
                       ffi::ResultBuffer<ffi::F32> result, int64_t type) {
  int64_t count = numbers.element_count(), bytes = matrix.size_bytes();
  if (!count) return ffi::Error::Success();
  int64_t inputs = (int64_t)result->element_count() / count;
  bool fits = false;
  with_format(type, [&](auto format) {
    int64_t stride = inputs / format.inputs * format.bytes;
    fits = stride && inputs % format.inputs == 0 && bytes % stride == 0;
    if (!fits) return;
    int64_t outputs = bytes / stride * OUTPUTS;
    for (int64_t i = 0; i < count; i++) {
      int64_t row = numbers.typed_data()[i];
      float* to = result->typed_data() + i * inputs;
      if (row >= 0 && row < outputs)
        dequantize<decltype(format)>((const uint8_t*)matrix.untyped_data(), inputs, row, to);
      else
        std::fill(to, to + inputs, 0.f);
    }
  });
  return fits ? ffi::Error::Success()
              : ffi::Error::InvalidArgument("packed: the rows do not fit the matrix");
}

// Values, scales and minima of one row in a unit, as GGUF files have them (ggml's block formats).
struct Row {
  uint8_t values[256];
  uint8_t scale[2], minimum[2];  // float16
  uint8_t scales[16], minima[16];
};

const int8_t IQ4_NL_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                  1,    13,   25,  38,  53,  69,  89,  113};

void copy_halves(Row* row, const uint8_t* scale, const uint8_t* minimum) {
  std::memcpy(row->scale, scale, 2);
  if (minimum) std::memcpy(row->minimum, minimum, 2);
}

// 6-bit scales and minima of 8 groups, in 12 bytes.
void read_scales(const uint8_t* p, Row* row) {
  for (int i = 0; i < 4; i++) {
    row->scales[i] = p[i] & 63;
    row->minima[i] = p[4 + i] & 63;
    row->scales[4 + i] = (p[8 + i] & 15) | p[i] >> 6 << 4;
    row->minima[4 + i] = p[8 + i] >> 4 | p[4 + i] >> 6 << 4;
  }
}

// Reads a unit of a row; returns the bytes it has in the file.
int read_unit(int64_t type, const uint8_t* p, Row* row) {
  uint8_t* q = row->values;
  uint32_t fifth = 0;
  switch (type) {
    case 2: case 3: case 6: case 7: {  // Q4_0, Q4_1, Q5_0, Q5_1
      bool has_min = type & 1;
      copy_halves(row, p, has_min ? p + 2 : nullptr);
      const uint8_t* v = p + 2 + 2 * has_min;
      if (type >= 6) {
        std::memcpy(&fifth, v, 4);
        v += 4;
      }
      for (int i = 0; i < 16; i++) {
        q[i] = (v[i] & 15) | (fifth >> i & 1) << 4;
        q[16 + i] = v[i] >> 4 | (fifth >> (16 + i) & 1) << 4;
      }
      return v + 16 - p;
    }
    case 8:  // Q8_0
      copy_halves(row, p, nullptr);
      for (int i = 0; i < 32; i++) q[i] = p[2 + i] ^ 128;
      return 34;
    case 20:  // IQ4_NL
      copy_halves(row, p, nullptr);
      for (int i = 0; i < 16; i++) {
        q[i] = 128 + IQ4_NL_VALUES[p[2 + i] & 15];
        q[16 + i] = 128 + IQ4_NL_VALUES[p[2 + i] >> 4];
      }
      return 18;
    case 10:  // Q2_K
      copy_halves(row, p + 80, p + 82);
      for (int i = 0; i < 16; i++) {
        row->scales[i] = p[i] & 15;
        row->minima[i] = p[i] >> 4;
      }
      for (int i = 0; i < 256; i++)
        q[i] = p[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
      return 84;
    case 11:  // Q3_K
      copy_halves(row, p + 108, nullptr);
      for (int i = 0; i < 16; i++) {
        const uint8_t* s = p + 96;
        int low = i < 8 ? s[i] & 15 : s[i - 8] >> 4, high = s[8 + i % 4] >> (i / 4 * 2) & 3;
        row->scales[i] = (low | high << 4) - 32;
      }
      for (int i = 0; i < 256; i++)
        q[i] = (p[32 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) |
               (p[i % 32] >> (i / 32) & 1) << 2;
      return 110;
    case 12: case 13: {  // Q4_K, Q5_K
      copy_halves(row, p, p + 2);
      read_scales(p + 4, row);
      const uint8_t *high = p + 16, *v = p + (type == 13 ? 48 : 16);
      for (int pair = 0; pair < 4; pair++, v += 32)
        for (int i = 0; i < 32; i++) {
          int bits = type == 13 ? high[i] >> (2 * pair) : 0;
          q[64 * pair + i] = (v[i] & 15) | (bits & 1) << 4;
          q[64 * pair + 32 + i] = v[i] >> 4 | (bits >> 1 & 1) << 4;
        }
      return type == 13 ? 176 : 144;
    }
    default: {  // Q6_K
      copy_halves(row, p + 208, nullptr);
      std::memcpy(row->scales, p + 192, 16);
      for (int half = 0; half < 2; half++) {
        const uint8_t *low = p + 64 * half, *high = p + 128 + 32 * half;
        for (int i = 0; i < 32; i++) {
          uint8_t* to = q + 128 * half + i;
          to[0] = (low[i] & 15) | (high[i] & 3) << 4;
          to[32] = (low[32 + i] & 15) | (high[i] >> 2 & 3) << 4;
          to[64] = low[i] >> 4 | (high[i] >> 4 & 3) << 4;
          to[96] = low[32 + i] >> 4 | high[i] >> 6 << 4;
        }
      }
      return 210;
    }
  }
}

// Writes a row of a file in float32.
void widen_row(int64_t type, const uint8_t* p, int64_t inputs, float* to) {
  if (type == 0) {
    std::memcpy(to, p, inputs * sizeof(float));
    return;
  }
  with_format(type, [&](auto format) {
    using F = decltype(format);
    Row row;
    for (int64_t done = 0; done < inputs; done += F::inputs) {
      p += read_unit(type, p, &row);
      float scale = half_at(row.scale), minimum = F::has_min ? half_at(row.minimum) : 0;
      for (int k = 0; k < F::inputs; k++) {
        int part = k / F::scaled;
        float own = scale, least = minimum;
        if constexpr (F::is_k) {
          own = scale * (typename F::Scale)row.scales[part];
          if constexpr (F::has_min) least = -minimum * row.minima[part];
        }
        int offset = F::log2_offset < 0 ? 0 : 1 << F::log2_offset;
        to[done + k] = (row.values[k] - offset) * own + least;
      }
    }
  });
}

// Rounds 32 numbers to Q4_0, whose element with the largest magnitude becomes -8, or to Q8_0.
void round_unit(int64_t type, const float* x, Row* row) {
  float extreme = 0;
  for (int k = 0; k < GROUP; k++)
    if (std::abs(x[k]) > std::abs(extreme)) extreme = x[k];
  bool is_4 = type == 2;
  float scale = is_4 ? extreme / -8 : std::abs(extreme) / 127, inverse = scale ? 1 / scale : 0;
  f16 half;
  narrow(scale, &half);
  std::memcpy(row->scale, &half, 2);
  for (int k = 0; k < GROUP; k++)
    row->values[k] = is_4 ? std::clamp((int)std::floor(x[k] * inverse + 8.5f), 0, 15)
                          : 128 + (int)std::round(x[k] * inverse);
}

// Writes a unit of 16 outputs.
template <class F>
void write_unit(const Row* rows, uint8_t* unit) {
  std::memset(unit, 0, F::head);
  for (int o = 0; o < OUTPUTS; o++) {
    std::memcpy(unit + 2 * o, rows[o].scale, 2);
    if constexpr (F::has_min) std::memcpy(unit + 2 * (OUTPUTS + o), rows[o].minimum, 2);
    if constexpr (F::is_k)
      for (int s = 0; s < F::inputs / F::scaled; s++) {
        unit[F::first + s * OUTPUTS + o] = rows[o].scales[s];
        if constexpr (F::has_min) unit[F::minima + s * OUTPUTS + o] = rows[o].minima[s];
      }
  }
  uint8_t* to = unit + F::head;
  for (int g = 0; g < F::groups; g++, to += F::values)
    for (int o = 0; o < OUTPUTS; o++) {
      const uint8_t* q = rows[o].values + g * GROUP;
      for (int k = 0; k < 4; k++)
        for (int v = 0; v < 4; v++) {
          int at = 4 * o + k, low = q[4 * v + k], high = q[16 + 4 * v + k];
          if constexpr (F::bits == 8) {
            to[v * VECTOR + at] = low;
            to[(4 + v) * VECTOR + at] = high;
          } else {
            to[v * VECTOR + at] = (low & 15) | high << 4;
            uint8_t* more = to + 4 * VECTOR + at;
            if constexpr (F::bits == 5)
              *more = (v ? *more : 0) | low >> 4 << v | high >> 4 << (4 + v);
            if constexpr (F::bits == 6) {
              *more = (v ? *more : 0) | low >> 4 << 2 * v;
              more[VECTOR] = (v ? more[VECTOR] : 0) | high >> 4 << 2 * v;
            }
          }
        }
    }
}

}  // namespace

// Returns the bytes of a unit of 16 outputs, 0 for another type.
extern "C" int magicjax_packed_bytes(int64_t type) {
  int bytes = 0;
  with_format(type, [&](auto format) { bytes = format.bytes; });
  return bytes;
}

// Packs rows of a GGUF file, each `row_bytes` long; row i of the matrix is row order[i] of the file.
// If `to` is not their `type`, which may be 0 for float32, they are rounded to Q4_0 or Q8_0.
extern "C" void magicjax_pack(int64_t type, int64_t to, const uint8_t* from, const int32_t* order,
                              int64_t outputs, int64_t inputs, int64_t row_bytes, uint8_t* packed,
                              int threads) {
  std::atomic<int64_t> next{0};
  auto work = [&] {
    Row rows[OUTPUTS];
    std::vector<float> wide(type == to ? 0 : OUTPUTS * inputs);
    for (int64_t b; (b = next++) < outputs / OUTPUTS;)
      with_format(to, [&](auto format) {
        const uint8_t* at[OUTPUTS];
        for (int o = 0; o < OUTPUTS; o++) {
          at[o] = from + order[b * OUTPUTS + o] * row_bytes;
          if (type != to) widen_row(type, at[o], inputs, &wide[o * inputs]);
        }
        int64_t units = inputs / format.inputs;
        for (int64_t u = 0; u < units; u++) {
          for (int o = 0; o < OUTPUTS; o++)
            if (type == to)
              at[o] += read_unit(type, at[o], &rows[o]);
            else
              round_unit(to, &wide[o * inputs + u * GROUP], &rows[o]);
          write_unit<decltype(format)>(rows, packed + (b * units + u) * format.bytes);
        }
      });
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; i++) others.emplace_back(work);
  work();
  for (auto& thread : others) thread.join();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(PackedLinear, packed_linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("inputs")
                                  .Attr<ffi::Span<const int64_t>>("types"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(PackedRows, packed_rows,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("type"));
