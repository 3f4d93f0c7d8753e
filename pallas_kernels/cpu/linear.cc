// Products of rows with matrices: y[m, n] = sum over k of x[m, k] w[n, k].
//
// A matrix is read as it lies, [outputs N, inputs K] in 32, 16, 8 or 4 bits; with few rows, the
// time is that of reading it once. Elements are widened to float32. Threads divide the outputs.
//
// The order of a sum depends on K and the format only, not on M, N, tiles or threads: lane i of a
// vector of W adds k = i, i + W, i + 2W, … by fused multiply-adds, and `sum` adds the lanes. (In 4
// bits, and with instructions for bfloat16, lane i adds k = 2i, 2i + 1, 2W + 2i, ….) So a row has
// the same bits whether it is computed alone or among others. Rows of zeros, such as those of a
// batch's ended texts, are not multiplied: their results are zeros.
#include <algorithm>
#include <vector>

#include "simd.h"
#include "tasks.h"

namespace ffi = xla::ffi;

namespace {

constexpr int OUTPUTS = 64;  // of a task
constexpr int AHEAD = 4096;  // bytes between a read and its prefetch, unless there are panels
constexpr int LINE = 64;     // bytes of a cache line

// A register tile has M <= ROWS rows and tile_outputs(M) outputs: with few rows to hide the latency
// of a multiply-add, and no more than the registers hold.
constexpr int ROWS = 6, PANEL = 12;
constexpr int tile_outputs(int rows) { return W != 8 || rows <= 2 ? 4 : rows <= 4 ? 3 : 2; }

// Rows of x with elements X, zero from the number of inputs up to `stride`, and their numbers among
// all rows. The other rows are zeros, whose numbers are in `empty`.
template <class X>
struct Rows {
  const X* x;
  int64_t count, stride;
  const int64_t* number;
  const std::vector<int64_t>& empty;
};

// A result [rows, outputs] of any float type: the outputs of a matrix from `base` on.
struct Result {
  void* data;
  ffi::DataType type;
  int64_t outputs, base;

  INLINE void put(int64_t row, int64_t output, float value) const {
    int64_t i = row * outputs + output - base;
    if (type == ffi::DataType::F32)
      ((float*)data)[i] = value;
    else if (type == ffi::DataType::BF16)
      narrow(value, (bf16*)data + i);
    else
      narrow(value, (f16*)data + i);
  }
};

// Calls f with count as a constant, which is at most `most`.
template <int most, class F>
INLINE void with_constant(int count, const F& f) {
  if constexpr (most > 0) {
    if (count == most) return f(std::integral_constant<int, most>());
    with_constant<most - 1>(count, f);
  }
}

// Matrices [N, K]. A step multiplies STEP inputs, PARTS vectors Vec of them, with as many elements
// X of a row of x. `scale`, or null, multiplies the sums of the outputs.

// Elements T, widened to float32.
template <class T>
struct Plain {
  using X = float;
  using Vec = vec;
  static constexpr bool IS_INTEGER = std::is_same_v<T, int8_t>;
  static constexpr int STEP = W, PARTS = 1, LINE_INPUTS = LINE / sizeof(T);
  const T* w;
  int64_t inputs, stride;
  const float* scale = nullptr;
  int64_t ahead = AHEAD;

  int64_t groups() const { return 1; }
  static INLINE vec row(const float* x) { return load(x); }
  static INLINE vec multiply_add(vec a, vec b, vec c) { return fma(a, b, c); }

  template <int N>
  struct Reader {
    const T* rows[N];
    INLINE Reader(const Plain& matrix, int64_t first) {
      for (int n = 0; n < N; n++) rows[n] = matrix.w + (first + n) * matrix.stride;
    }
    INLINE void begin_group(int64_t) {}
    INLINE const void* at(int n, int64_t k) const { return rows[n] + k; }
    INLINE void read(int n, int64_t k, vec* out) const { out[0] = load(rows[n] + k); }
    INLINE void read_last(int n, int64_t k, int count, vec* out) const {
      out[0] = load_first(rows[n] + k, count);
    }
  };
};

#if defined(__AVX512BF16__)
// bfloat16 times bfloat16, in pairs.
struct Pairs {
  using X = bf16;
  using Vec = __m512bh;
  static constexpr bool IS_INTEGER = false;
  static constexpr int STEP = 2 * W, PARTS = 1, LINE_INPUTS = STEP;
  const bf16* w;
  int64_t inputs;
  const float* scale = nullptr;
  int64_t ahead = AHEAD;

  int64_t groups() const { return 1; }
  static INLINE Vec row(const bf16* x) { return (Vec)_mm512_loadu_si512(x); }
  static INLINE vec multiply_add(Vec a, Vec b, vec c) { return _mm512_dpbf16_ps(c, a, b); }

  template <int N>
  struct Reader {
    const bf16* rows[N];
    INLINE Reader(const Pairs& matrix, int64_t first) {
      for (int n = 0; n < N; n++) rows[n] = matrix.w + (first + n) * matrix.inputs;
    }
    INLINE void begin_group(int64_t) {}
    INLINE const void* at(int n, int64_t k) const { return rows[n] + k; }
    INLINE void read(int n, int64_t k, Vec* out) const { out[0] = row(rows[n] + k); }
    INLINE void read_last(int n, int64_t k, int count, Vec* out) const {
      bf16 buffer[STEP] = {};
      std::memcpy(buffer, rows[n] + k, count * sizeof(bf16));
      out[0] = row(buffer);
    }
  };
};
#endif

// Integers with scales for groups of inputs, and zero points or none: (value - zero) * scale.
template <class T>
struct Grouped {
  using X = float;
  using Vec = vec;
  static constexpr bool IS_INTEGER = true;
  static constexpr int PARTS = std::is_same_v<T, int4x2> ? 2 : 1;
  static constexpr int STEP = W * PARTS, LINE_INPUTS = LINE * PARTS;
  const T* w;
  int64_t inputs, outputs, group;  // a group is a multiple of a step
  const float *scales, *zeros;     // [groups, outputs]
  const float* scale = nullptr;
  int64_t ahead = AHEAD;

  int64_t groups() const { return inputs / group; }
  static INLINE vec row(const float* x) { return load(x); }
  static INLINE vec multiply_add(vec a, vec b, vec c) { return fma(a, b, c); }

  template <int N>
  struct Reader {
    const Grouped& matrix;
    int64_t first;
    const T* rows[N];
    vec factor[N], offset[N];
    INLINE Reader(const Grouped& matrix, int64_t first) : matrix(matrix), first(first) {
      for (int n = 0; n < N; n++) rows[n] = matrix.w + (first + n) * matrix.inputs / PARTS;
    }
    INLINE void begin_group(int64_t g) {
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) {
        int64_t i = g * matrix.outputs + first + n;
        factor[n] = fill(matrix.scales[i]);
        offset[n] = fill(matrix.zeros ? -matrix.zeros[i] * matrix.scales[i] : 0.f);
      }
    }
    INLINE const void* at(int n, int64_t k) const { return rows[n] + k / PARTS; }
    INLINE void read(int n, int64_t k, vec* out) const {
      if constexpr (PARTS == 2)
        load_pairs(rows[n] + k / 2, &out[0], &out[1]);
      else
        out[0] = load(rows[n] + k);
      for (int i = 0; i < PARTS; i++) out[i] = fma(out[i], factor[n], offset[n]);
    }
    INLINE void read_last(int, int64_t, int, vec*) const {}
  };
};

// Calls step(k, read) for all inputs of N outputs, where read(n, out) reads the vectors of a step.
template <int N, class Matrix, class Step>
INLINE void for_steps(const Matrix& matrix, int64_t first, const Step& step) {
  using Vec = typename Matrix::Vec;
  constexpr int STEP = Matrix::STEP, STEPS = Matrix::LINE_INPUTS / STEP;
  typename Matrix::template Reader<N> reader(matrix, first);
  auto prefetch_rows = [&](int64_t k) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) prefetch((const char*)reader.at(n, k) + matrix.ahead);
  };
  auto one = [&](int64_t k) __attribute__((always_inline)) {
    step(k, [&](int n, Vec* out) __attribute__((always_inline)) { reader.read(n, k, out); });
  };
  int64_t size = matrix.inputs / matrix.groups(), k = 0;
  for (int64_t g = 0; g < matrix.groups(); g++) {
    reader.begin_group(g);
    int64_t end = (g + 1) * size;
    for (; k + Matrix::LINE_INPUTS <= end; k += Matrix::LINE_INPUTS) {
      prefetch_rows(k);
#pragma GCC unroll 8
      for (int i = 0; i < STEPS; i++) one(k + i * STEP);
    }
    if (k < end) prefetch_rows(k);
    for (; k + STEP <= end; k += STEP) one(k);
    if (k < end) {
      int count = end - k;
      step(k, [&](int n, Vec* out) { reader.read_last(n, k, count, out); });
      k = end;
    }
  }
}

template <int N, int M, class Matrix>
INLINE void dot_tile(const Matrix& matrix, int64_t first, const typename Matrix::X* x,
                     int64_t stride, float* sums /* [M][N] */) {
  using Vec = typename Matrix::Vec;
  vec acc[N][M];
#pragma GCC unroll 8
  for (int n = 0; n < N; n++)
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) acc[n][m] = zeros();
  for_steps<N>(matrix, first, [&](int64_t k, auto read) __attribute__((always_inline)) {
    // The smaller side stays in registers.
    constexpr int P = Matrix::PARTS;
    if constexpr (M < N) {
      Vec row[M][P];
#pragma GCC unroll 8
      for (int m = 0; m < M; m++)
        for (int i = 0; i < P; i++) {
          row[m][i] = Matrix::row(x + m * stride + k + i * W);
          keep(row[m][i]);
        }
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) {
        Vec value[P];
        read(n, value);
        for (int i = 0; i < P; i++) keep(value[i]);
        for (int i = 0; i < P; i++)
#pragma GCC unroll 8
          for (int m = 0; m < M; m++)
            acc[n][m] = Matrix::multiply_add(value[i], row[m][i], acc[n][m]);
      }
    } else {
      Vec value[N][P];
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) {
        read(n, value[n]);
        for (int i = 0; i < P; i++) keep(value[n][i]);
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; m++)
        for (int i = 0; i < P; i++) {
          Vec row = Matrix::row(x + m * stride + k + i * W);
          keep(row);
#pragma GCC unroll 8
          for (int n = 0; n < N; n++)
            acc[n][m] = Matrix::multiply_add(value[n][i], row, acc[n][m]);
        }
    }
  });
#pragma GCC unroll 8
  for (int n = 0; n < N; n++)
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) sums[m * N + n] = sum(acc[n][m]);
}

// Outputs [begin, end) of a matrix for all rows, in tiles of rows of similar size. The results are
// written to outputs from `y_begin` on.
template <class Matrix>
void all_rows(const Rows<typename Matrix::X>& rows, const Matrix& matrix, const float* scale,
              int64_t begin, int64_t end, int64_t y_begin, const Result& y) {
  int64_t tiles = (rows.count + ROWS - 1) / ROWS;
  for (int64_t t = 0, m0 = 0; t < tiles; t++) {
    int size = (rows.count - m0 + tiles - t - 1) / (tiles - t);
    with_constant<ROWS>(size, [&](auto constant) {
      constexpr int M = constant(), N = tile_outputs(M);
      auto tile = [&](int64_t first, auto outputs) {
        constexpr int C = outputs();
        float sums[M * C];
        dot_tile<C, M>(matrix, first, rows.x + m0 * rows.stride, rows.stride, sums);
        for (int m = 0; m < M; m++)
          for (int n = 0; n < C; n++) {
            int64_t output = y_begin + first - begin + n;
            float value = sums[m * C + n];
            y.put(rows.number[m0 + m], output, scale ? value * scale[output] : value);
          }
      };
      int64_t n = begin;
      for (; n + N <= end; n += N) tile(n, std::integral_constant<int, N>());
      for (; n < end; n++) tile(n, std::integral_constant<int, 1>());
    });
    m0 += size;
  }
}

template <class Matrix>
void outputs(const Rows<typename Matrix::X>& rows, Matrix matrix, int64_t begin, int64_t end,
             const Result& y) {
  for (int64_t m : rows.empty)
    for (int64_t n = begin; n < end; n++) y.put(m, n, 0);
  if (rows.count <= ROWS) return all_rows(rows, matrix, matrix.scale, begin, end, begin, y);
  // A panel of outputs stays in the caches for all tiles of rows, during which the next panel is
  // prefetched. Integers are widened once.
  matrix.ahead = PANEL * matrix.inputs * LINE / Matrix::LINE_INPUTS;
  static thread_local std::vector<float> wide;
  for (int64_t first = begin; first < end; first += PANEL) {
    int64_t count = std::min<int64_t>(PANEL, end - first);
    if constexpr (!Matrix::IS_INTEGER) {
      all_rows(rows, matrix, nullptr, first, first + count, first, y);
    } else {
      wide.resize(PANEL * rows.stride);
      for (int64_t n = 0; n < count; n++)
        for_steps<1>(matrix, first + n, [&](int64_t k, auto read) {
          vec values[Matrix::PARTS];
          read(0, values);
          for (int i = 0; i < Matrix::PARTS; i++)
            store(&wide[n * rows.stride + k + i * W], values[i]);
        });
      Plain<float> panel{wide.data(), matrix.inputs, rows.stride, nullptr, 0};
      all_rows(rows, panel, matrix.scale, 0, count, first, y);
    }
  }
}

// The rows of x that have a value other than zero, converted and padded; pairs of vectors are
// deinterleaved for 4 bits.
template <class X>
class PaddedRows {
 public:
  template <class T>
  PaddedRows(const T* x, int64_t count, int64_t inputs, bool deinterleave)
      : stride((inputs + 2 * W - 1) / (2 * W) * (2 * W)) {
    for (int64_t m = 0; m < count; m++) {
      const T* row = x + m * inputs;
      bool is_empty = std::all_of(row, row + inputs, [](T v) { return convert<float>(v) == 0; });
      (is_empty ? empty : number).push_back(m);
    }
    data.resize(number.size() * stride);
    for (int64_t m = 0; m < (int64_t)number.size(); m++) {
      const T* from = x + number[m] * inputs;
      X* to = &data[m * stride];
      if (deinterleave)
        for (int64_t k = 0; k < inputs; k += 2 * W)
          for (int i = 0; i < 2 * W; i++) to[k + i % 2 * W + i / 2] = convert<X>(from[k + i]);
      else
        for (int64_t k = 0; k < inputs; k++) to[k] = convert<X>(from[k]);
    }
  }
  operator Rows<X>() const {
    return {data.data(), (int64_t)number.size(), stride, number.data(), empty};
  }

 private:
  template <class To, class From>
  static INLINE To convert(From value) {
    if constexpr (std::is_same_v<To, From>)
      return value;
    else
      return widen(value);
  }
  int64_t stride;
  std::vector<int64_t> number, empty;
  std::vector<X> data;
};

struct Task {
  int matrix;
  int64_t begin, end;
};

using Type = ffi::DataType;

template <class F>
bool with_float_type(Type type, const F& f) {
  switch (type) {
    case Type::F32: f(float()); return true;
    case Type::BF16: f(bf16()); return true;
    case Type::F16: f(f16()); return true;
    default: return false;
  }
}

// The arguments of a call.
struct Call {
  const ffi::ThreadPool& pool;
  ffi::AnyBuffer x;
  ffi::RemainingArgs& parts;
  ffi::RemainingRets& results;
  int64_t inputs, count, expert;

  int64_t per_matrix() const { return parts.size() / results.size(); }
  ffi::AnyBuffer part(int64_t i, int64_t which) const {
    return *parts.get<ffi::AnyBuffer>(i * per_matrix() + which);
  }
  int64_t outputs_of(int64_t i) const { return part(i, 0).element_count() / inputs; }
  // The outputs that are computed: all, or those of one expert.
  int64_t result_outputs(int64_t i) const {
    return (**results.get<ffi::AnyBuffer>(i)).element_count() / count;
  }
  // Why the arrays of matrix i cannot be multiplied, or null.
  const char* problem(int64_t i) const {
    auto dtype = part(i, 0).element_type();
    bool is_integer = dtype == Type::S4 || dtype == Type::S8;
    int64_t own = result_outputs(i), experts = own ? outputs_of(i) / own : 1;
    if (own * experts != outputs_of(i) || expert < 0 || expert >= experts)
      return "linear: a result does not fit its matrix, or there is no such expert";
    if (dtype != part(0, 0).element_type()) return "linear: the matrices have several dtypes";
    if (is_integer != (per_matrix() == 3)) return "linear: integers need scales and zero points";
    if (!with_float_type((**results.get<ffi::AnyBuffer>(i)).element_type(), [](auto) {}))
      return "linear: a result is not floating-point";
    if (!is_integer) return nullptr;
    int64_t scales = part(i, 1).element_count(), zeros = part(i, 2).element_count();
    if (part(i, 1).element_type() != Type::F32 || part(i, 2).element_type() != Type::F32)
      return "linear: scales and zero points are not float32";
    int64_t all = outputs_of(i), step = dtype == Type::S4 ? 2 * W : W;
    if (all == 0) return nullptr;
    int64_t groups = scales / all;
    bool is_channel = dtype == Type::S8 && groups == 1 && !zeros;
    if (groups == 0 || groups * all != scales || (zeros && zeros != scales) ||
        (!is_channel && inputs % (groups * step)))
      return "linear: groups are not multiples of a step";
    return nullptr;
  }
  Result result(int64_t i) const {
    auto out = **results.get<ffi::AnyBuffer>(i);
    return {out.untyped_data(), out.element_type(), result_outputs(i), expert * result_outputs(i)};
  }
};

// Calls compute(i, begin, end) for tasks that cover the outputs of every matrix i.
template <class F>
void for_outputs(const Call& call, const F& compute) {
  std::vector<Task> tasks;
  for (int i = 0; i < (int)call.results.size(); i++)
    for (int64_t own = call.result_outputs(i), n = own * call.expert, end = n + own; n < end;
         n += OUTPUTS)
      tasks.push_back({i, n, std::min(n + OUTPUTS, end)});
  run_tasks(call.pool, tasks.size(),
            [&](int64_t t) { compute(tasks[t].matrix, tasks[t].begin, tasks[t].end); });
}

template <class T>
void floating_products(const Call& call) {
#if defined(__AVX512BF16__)
  if (std::is_same_v<T, bf16> && call.x.element_type() == Type::BF16) {
    PaddedRows<bf16> x((const bf16*)call.x.untyped_data(), call.count, call.inputs, false);
    return for_outputs(call, [&](int i, int64_t begin, int64_t end) {
      Pairs matrix{(const bf16*)call.part(i, 0).untyped_data(), call.inputs};
      outputs(x, matrix, begin, end, call.result(i));
    });
  }
#endif
  with_float_type(call.x.element_type(), [&](auto type) {
    PaddedRows<float> x((decltype(type)*)call.x.untyped_data(), call.count, call.inputs, false);
    for_outputs(call, [&](int i, int64_t begin, int64_t end) {
      Plain<T> matrix{(const T*)call.part(i, 0).untyped_data(), call.inputs, call.inputs};
      outputs(x, matrix, begin, end, call.result(i));
    });
  });
}

template <class T>
void integer_products(const Call& call) {
  with_float_type(call.x.element_type(), [&](auto type) {
    PaddedRows<float> x((decltype(type)*)call.x.untyped_data(), call.count, call.inputs,
                        std::is_same_v<T, int4x2>);
    for_outputs(call, [&](int i, int64_t begin, int64_t end) {
      int64_t inputs = call.inputs, all = call.outputs_of(i);
      auto w = (const T*)call.part(i, 0).untyped_data();
      auto scales = (const float*)call.part(i, 1).untyped_data();
      bool has_zeros = call.part(i, 2).element_count();
      auto zeros = has_zeros ? (const float*)call.part(i, 2).untyped_data() : nullptr;
      int64_t group = inputs * all / call.part(i, 1).element_count();
      if constexpr (std::is_same_v<T, int8_t>)
        if (group == inputs && !zeros)
          return outputs(x, Plain<T>{w, inputs, inputs, scales}, begin, end, call.result(i));
      outputs(x, Grouped<T>{w, inputs, all, group, scales, zeros}, begin, end, call.result(i));
    });
  });
}

// x [..., K], and for each result its matrix, or its matrix, scales [G, N] and zero points [G, N]
// (no elements: none). The matrices have one dtype, and scales are float32. A result with 1/X of the
// outputs of its matrix has those of `expert`, one of X.
ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::BufferR0<ffi::S32> expert,
                  ffi::RemainingArgs parts, ffi::RemainingRets results, int64_t inputs) {
  if (inputs <= 0 || results.size() == 0 || parts.size() % results.size())
    return ffi::Error::InvalidArgument("linear: inconsistent arguments");
  int64_t count = (int64_t)x.element_count() / inputs;
  if (!count) return ffi::Error::Success();
  Call call{pool, x, parts, results, inputs, count, *expert.typed_data()};
  if (!with_float_type(x.element_type(), [](auto) {}))
    return ffi::Error::InvalidArgument("linear: x is not floating-point");
  for (int i = 0; i < (int)results.size(); i++)
    if (const char* problem = call.problem(i)) return ffi::Error::InvalidArgument(problem);
  switch (call.part(0, 0).element_type()) {
    case Type::S4: integer_products<int4x2>(call); break;
    case Type::S8: integer_products<int8_t>(call); break;
    case Type::F32: floating_products<float>(call); break;
    case Type::BF16: floating_products<bf16>(call); break;
    case Type::F16: floating_products<f16>(call); break;
    default: return ffi::Error::InvalidArgument("linear: unsupported dtype");
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Linear, linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("inputs"));
extern "C" int magicjax_vector_width() { return W; }
