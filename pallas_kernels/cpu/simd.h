// Vectors of W floats: 16 with AVX-512, 8 with AVX2, 4 with NEON or without any of them.
//
// Every element type is widened to float32 when it is loaded, and sums are float32. The compiler
// must not reassociate (no -ffast-math): the order of sums is part of the kernels' contract.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct int4x2 {  // element 2i in the lower half of byte i, element 2i + 1 in its upper half
  uint8_t bits;
};

INLINE float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
INLINE uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

INLINE float widen(float x) { return x; }
INLINE float widen(bf16 x) { return as_float(uint32_t{x.bits} << 16); }
INLINE float widen(int8_t x) { return x; }
// Rounds to nearest, ties to even; NaN stays NaN.
INLINE void narrow(float x, float* out) { *out = x; }
INLINE void narrow(float x, bf16* out) {
  uint32_t bits = as_bits(x);
  bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  out->bits = is_nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

#if defined(__F16C__)
INLINE float widen(f16 x) { return _cvtsh_ss(x.bits); }
INLINE void narrow(float x, f16* out) { out->bits = _cvtss_sh(x, 0); }
#else
#if defined(__aarch64__)
using Half = __fp16;  // GCC 12 has no _Float16 there
#else
using Half = _Float16;
#endif
INLINE float widen(f16 x) {
  Half half;
  std::memcpy(&half, &x, 2);
  return half;
}
INLINE void narrow(float x, f16* out) {
  Half half = x;
  std::memcpy(out, &half, 2);
}
#endif

#if defined(__AVX512F__)

constexpr int W = 16;
using vec = __m512;
INLINE vec zeros() { return _mm512_setzero_ps(); }
INLINE vec fill(float x) { return _mm512_set1_ps(x); }
INLINE vec load(const float* p) { return _mm512_loadu_ps(p); }
INLINE vec load(const bf16* p) {
  __m256i bits = _mm256_loadu_si256((const __m256i*)p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
INLINE vec load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE vec load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
INLINE void load_pairs(const int4x2* p, vec* even, vec* odd) {
  const vec values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  *even = _mm512_permutexvar_ps(bytes, values);  // the index is the lowest four bits
  *odd = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values);
}
INLINE void store(float* p, vec x) { _mm512_storeu_ps(p, x); }
INLINE vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec max(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec round_even(vec x) { return _mm512_roundscale_ps(x, 0); }
INLINE vec times_power_of_two(vec x, vec n) { return _mm512_scalef_ps(x, n); }
INLINE float sum(vec x) {
  __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x),
                           _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
  __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_add_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}
INLINE float maximum(vec x) { return _mm512_reduce_max_ps(x); }
INLINE void transpose(vec (&rows)[W]) {
  vec pairs[W], quads[W];
#pragma GCC unroll 8
  for (int i = 0; i < W; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < W; i += 4)  // quads[i + c] has columns c, 4 + c, 8 + c and 12 + c of 4 rows
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      __m512d a = _mm512_castps_pd(pairs[i + j]), b = _mm512_castps_pd(pairs[i + 2 + j]);
      quads[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      quads[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    vec a = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0x88);
    vec b = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0xdd);
    vec e = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0x88);
    vec f = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0xdd);
    rows[c] = _mm512_shuffle_f32x4(a, e, 0x88);
    rows[4 + c] = _mm512_shuffle_f32x4(b, f, 0x88);
    rows[8 + c] = _mm512_shuffle_f32x4(a, e, 0xdd);
    rows[12 + c] = _mm512_shuffle_f32x4(b, f, 0xdd);
  }
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

constexpr int W = 8;
using vec = __m256;
INLINE vec zeros() { return _mm256_setzero_ps(); }
INLINE vec fill(float x) { return _mm256_set1_ps(x); }
INLINE vec load(const float* p) { return _mm256_loadu_ps(p); }
INLINE vec load(const bf16* p) {
  __m128i bits = _mm_loadu_si128((const __m128i*)p);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
INLINE vec load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE vec load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
INLINE void load_pairs(const int4x2* p, vec* even, vec* odd) {
  __m256i bytes = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
  *even = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(bytes, 28), 28));
  *odd = _mm256_cvtepi32_ps(_mm256_srai_epi32(bytes, 4));  // the byte's sign is the odd one's
}
INLINE void store(float* p, vec x) { _mm256_storeu_ps(p, x); }
INLINE vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
INLINE vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
INLINE vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
INLINE vec max(vec a, vec b) { return _mm256_max_ps(a, b); }
INLINE vec round_even(vec x) { return _mm256_round_ps(x, 8); }
INLINE vec times_power_of_two(vec x, vec n) {  // n an integer; 0 below -126
  n = _mm256_max_ps(n, _mm256_set1_ps(-127));
  __m256i exponent = _mm256_slli_epi32(
      _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}
INLINE float sum(vec x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
INLINE float maximum(vec x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
INLINE void transpose(vec (&rows)[W]) {
  vec pairs[W], quads[W];
#pragma GCC unroll 4
  for (int i = 0; i < W; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < W; i += 4)  // quads[i + c] has columns c and 4 + c of 4 rows
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      __m256d a = _mm256_castps_pd(pairs[i + j]), b = _mm256_castps_pd(pairs[i + 2 + j]);
      quads[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
      quads[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
    }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    rows[c] = _mm256_permute2f128_ps(quads[c], quads[4 + c], 0x20);
    rows[4 + c] = _mm256_permute2f128_ps(quads[c], quads[4 + c], 0x31);
  }
}

#else

constexpr int W = 4;
#if defined(__ARM_NEON) && defined(__aarch64__)
using vec = float32x4_t;
INLINE vec zeros() { return vdupq_n_f32(0); }
INLINE vec fill(float x) { return vdupq_n_f32(x); }
INLINE vec load(const float* p) { return vld1q_f32(p); }
INLINE vec load(const bf16* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t*)p), 16));
}
INLINE vec fma(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
INLINE vec max(vec a, vec b) { return vmaxq_f32(a, b); }
INLINE vec round_even(vec x) { return vrndnq_f32(x); }
INLINE void store(float* p, vec x) { vst1q_f32(p, x); }
#else
using vec = float __attribute__((vector_size(16)));
INLINE vec zeros() { return vec{}; }
INLINE vec fill(float x) { return vec{x, x, x, x}; }
INLINE vec load(const float* p) {
  vec x;
  std::memcpy(&x, p, 16);
  return x;
}
INLINE vec load(const bf16* p) { return vec{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}; }
INLINE vec fma(vec a, vec b, vec c) { return a * b + c; }
INLINE vec max(vec a, vec b) { return a > b ? a : b; }
INLINE vec round_even(vec x) {
  for (int i = 0; i < 4; i++) x[i] = __builtin_nearbyintf(x[i]);
  return x;
}
INLINE void store(float* p, vec x) { std::memcpy(p, &x, 16); }
#endif
INLINE vec load(const f16* p) { return vec{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}; }
INLINE vec load(const int8_t* p) { return vec{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
INLINE void load_pairs(const int4x2* p, vec* even, vec* odd) {
  int8_t low[4], high[4];
  for (int i = 0; i < 4; i++) {
    low[i] = int8_t(p[i].bits << 4) >> 4;
    high[i] = int8_t(p[i].bits) >> 4;
  }
  *even = load(low), *odd = load(high);
}
INLINE vec add(vec a, vec b) { return a + b; }
INLINE vec sub(vec a, vec b) { return a - b; }
INLINE vec mul(vec a, vec b) { return a * b; }
INLINE vec times_power_of_two(vec x, vec n) {
  for (int i = 0; i < 4; i++) x[i] *= as_float(uint32_t((n[i] < -127 ? -127 : n[i]) + 127) << 23);
  return x;
}
INLINE float sum(vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
INLINE float maximum(vec x) {
  float low = x[0] > x[2] ? x[0] : x[2], high = x[1] > x[3] ? x[1] : x[3];
  return low > high ? low : high;
}
INLINE void transpose(vec (&rows)[W]) {
  for (int i = 0; i < W; i++)
    for (int j = 0; j < i; j++) {
      float x = rows[i][j];
      rows[i][j] = rows[j][i], rows[j][i] = x;
    }
}

#endif

// Loads the first n < W elements; the others are 0.
template <class T>
INLINE vec load_first(const T* p, int n) {
  T buffer[W] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}

// Each 32-bit element of x holds two bf16; `even` becomes the lower ones.
INLINE void split_pairs(vec x, vec* even, vec* odd) {
  using words = uint32_t __attribute__((vector_size(4 * W)));
  *even = (vec)((words)x << 16), *odd = (vec)((words)x & 0xffff0000u);
}

// Keeps x in a register. Without it GCC repeats the load in every instruction that uses x.
template <class V>
INLINE void keep(V& x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#else
  (void)x;
#endif
}

INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
