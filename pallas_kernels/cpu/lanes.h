// Sixteen outputs at once: bytes of 16 outputs x 4 inputs, sums of integers, and floats.
//
// `Dots` adds products of unsigned bytes (weights) and signed bytes (rounded activations, -127 to
// 127). Sums of integers are exact, so all instruction sets give the same sums.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

constexpr int OUTPUTS = 16;  // of a block
constexpr int VECTOR = 64;   // bytes of 16 outputs x 4 inputs

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)

constexpr int MOST_ROWS = 8;  // of a register tile
constexpr int UNROLL = 8;
struct Bytes {
  __m512i v;
};
INLINE Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
INLINE Bytes operator&(Bytes a, uint8_t mask) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi8(mask))};
}
INLINE Bytes operator|(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
// Shifts move bits between adjacent bytes, which a mask removes.
INLINE Bytes operator>>(Bytes a, int n) { return {_mm512_srli_epi16(a.v, n)}; }
INLINE Bytes operator<<(Bytes a, int n) { return {_mm512_slli_epi16(a.v, n)}; }

struct Floats {
  __m512 v;
};
INLINE Floats fill_floats(float x) { return {_mm512_set1_ps(x)}; }
INLINE Floats load_halves(const uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
INLINE Floats load_floats(const uint8_t* p, uint8_t) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
INLINE Floats load_floats(const uint8_t* p, int8_t) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
INLINE Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
INLINE void store_floats(float* p, Floats x) { _mm512_storeu_ps(p, x.v); }

template <int bits>
struct Dots {
  __m512i v = _mm512_setzero_si512();
  INLINE void add(Bytes w, const int8_t* x) {
    int32_t word;
    std::memcpy(&word, x, 4);
    v = _mm512_dpbusd_epi32(v, w.v, _mm512_set1_epi32(word));
  }
  INLINE void widen() {}
  // The sums minus offset, a power of two, times x.
  INLINE Floats minus(int log2_offset, int32_t x) const {
    __m512i shift = _mm512_slli_epi32(_mm512_set1_epi32(x), log2_offset);
    return {_mm512_cvtepi32_ps(_mm512_sub_epi32(v, shift))};
  }
  INLINE Floats floats() const { return {_mm512_cvtepi32_ps(v)}; }
};

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

constexpr int MOST_ROWS = 5;
constexpr int UNROLL = 8;
struct Bytes {
  __m256i v[2];
};
INLINE Bytes load_bytes(const uint8_t* p) {
  return {{_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)}};
}
INLINE Bytes operator&(Bytes a, uint8_t mask) {
  __m256i m = _mm256_set1_epi8(mask);
  return {{_mm256_and_si256(a.v[0], m), _mm256_and_si256(a.v[1], m)}};
}
INLINE Bytes operator|(Bytes a, Bytes b) {
  return {{_mm256_or_si256(a.v[0], b.v[0]), _mm256_or_si256(a.v[1], b.v[1])}};
}
INLINE Bytes operator>>(Bytes a, int n) {
  return {{_mm256_srli_epi16(a.v[0], n), _mm256_srli_epi16(a.v[1], n)}};
}
INLINE Bytes operator<<(Bytes a, int n) {
  return {{_mm256_slli_epi16(a.v[0], n), _mm256_slli_epi16(a.v[1], n)}};
}

struct Floats {
  __m256 v[2];
};
INLINE Floats fill_floats(float x) { return {{_mm256_set1_ps(x), _mm256_set1_ps(x)}}; }
INLINE Floats load_halves(const uint8_t* p) {
  return {{_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
           _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))}};
}
INLINE Floats load_floats(const uint8_t* p, uint8_t) {
  return {{_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))),
           _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))}};
}
INLINE Floats load_floats(const uint8_t* p, int8_t) {
  return {{_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
           _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))}};
}
INLINE Floats operator*(Floats a, Floats b) {
  return {{_mm256_mul_ps(a.v[0], b.v[0]), _mm256_mul_ps(a.v[1], b.v[1])}};
}
INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return {{_mm256_fmadd_ps(a.v[0], b.v[0], c.v[0]), _mm256_fmadd_ps(a.v[1], b.v[1], c.v[1])}};
}
INLINE void store_floats(float* p, Floats x) {
  _mm256_storeu_ps(p, x.v[0]);
  _mm256_storeu_ps(p + 8, x.v[1]);
}

#if defined(__AVXVNNI__)
#define MULTIPLY_BYTES _mm256_dpbusd_avx_epi32
#elif defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define MULTIPLY_BYTES _mm256_dpbusd_epi32
#endif

#ifdef MULTIPLY_BYTES
template <int bits>
struct Dots {
  __m256i v[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  INLINE void add(Bytes w, const int8_t* x) {
    int32_t word;
    std::memcpy(&word, x, 4);
    __m256i four = _mm256_set1_epi32(word);
    v[0] = MULTIPLY_BYTES(v[0], w.v[0], four);
    v[1] = MULTIPLY_BYTES(v[1], w.v[1], four);
  }
  INLINE void widen() {}
  INLINE Floats minus(int log2_offset, int32_t x) const {
    __m256i shift = _mm256_slli_epi32(_mm256_set1_epi32(x), log2_offset);
    return {{_mm256_cvtepi32_ps(_mm256_sub_epi32(v[0], shift)),
             _mm256_cvtepi32_ps(_mm256_sub_epi32(v[1], shift))}};
  }
  INLINE Floats floats() const {
    return {{_mm256_cvtepi32_ps(v[0]), _mm256_cvtepi32_ps(v[1])}};
  }
};
#undef MULTIPLY_BYTES
#else
// Pairs of products are 16-bit sums, which `widen` adds to 32-bit sums before they overflow: 8
// vectors of 4 bits, 4 of 5 bits, 2 of 6 bits, 1 of 8 bits. Those of 8 bits are made signed by
// their offset of 128, and the products have the weight's magnitude and the activation's sign.
template <int bits>
struct Dots {
  static constexpr bool is_wide = bits == 8;
  __m256i v[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  __m256i pairs[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  INLINE void add(Bytes w, const int8_t* x) {
    int32_t word;
    std::memcpy(&word, x, 4);
    __m256i four = _mm256_set1_epi32(word);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      if constexpr (is_wide) {
        __m256i value = _mm256_xor_si256(w.v[i], _mm256_set1_epi8(-128));
        __m256i sum = _mm256_maddubs_epi16(_mm256_abs_epi8(value), _mm256_sign_epi8(four, value));
        v[i] = _mm256_add_epi32(v[i], _mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
      } else {
        pairs[i] = _mm256_add_epi16(pairs[i], _mm256_maddubs_epi16(w.v[i], four));
        // Keeps the order: a compiler would gather all products first, and spill registers.
        __asm__("" : "+x"(pairs[i]));
      }
    }
  }
  INLINE void widen() {
    if constexpr (!is_wide)
      for (int i = 0; i < 2; i++) {
        v[i] = _mm256_add_epi32(v[i], _mm256_madd_epi16(pairs[i], _mm256_set1_epi16(1)));
        pairs[i] = _mm256_setzero_si256();
      }
  }
  INLINE Floats minus(int log2_offset, int32_t x) const {
    if constexpr (is_wide) return floats();
    __m256i shift = _mm256_slli_epi32(_mm256_set1_epi32(x), log2_offset);
    return {{_mm256_cvtepi32_ps(_mm256_sub_epi32(v[0], shift)),
             _mm256_cvtepi32_ps(_mm256_sub_epi32(v[1], shift))}};
  }
  INLINE Floats floats() const {
    return {{_mm256_cvtepi32_ps(v[0]), _mm256_cvtepi32_ps(v[1])}};
  }
};
#endif

#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)

constexpr int MOST_ROWS = 4;
constexpr int UNROLL = 4;
#define EACH(type, expression)                       \
  type out;                                          \
  for (int i = 0; i < 4; i++) out.v[i] = expression; \
  return out;
struct Bytes {
  uint8x16_t v[4];
};
INLINE Bytes load_bytes(const uint8_t* p) { EACH(Bytes, vld1q_u8(p + 16 * i)) }
INLINE Bytes operator&(Bytes a, uint8_t mask) { EACH(Bytes, vandq_u8(a.v[i], vdupq_n_u8(mask))) }
INLINE Bytes operator|(Bytes a, Bytes b) { EACH(Bytes, vorrq_u8(a.v[i], b.v[i])) }
INLINE Bytes operator>>(Bytes a, int n) { EACH(Bytes, vshlq_u8(a.v[i], vdupq_n_s8(-n))) }
INLINE Bytes operator<<(Bytes a, int n) { EACH(Bytes, vshlq_u8(a.v[i], vdupq_n_s8(n))) }

struct Floats {
  float32x4_t v[4];
};
INLINE Floats fill_floats(float x) { EACH(Floats, vdupq_n_f32(x)) }
INLINE Floats load_halves(const uint8_t* p) {
  EACH(Floats, vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i))))
}
INLINE Floats load_floats(const uint8_t* p, uint8_t) {
  uint8x16_t all = vld1q_u8(p);
  uint16x8_t low = vmovl_u8(vget_low_u8(all)), high = vmovl_u8(vget_high_u8(all));
  uint16x4_t fours[4] = {vget_low_u16(low), vget_high_u16(low), vget_low_u16(high),
                         vget_high_u16(high)};
  EACH(Floats, vcvtq_f32_u32(vmovl_u16(fours[i])))
}
INLINE Floats load_floats(const uint8_t* p, int8_t) {
  int8x16_t all = vld1q_s8((const int8_t*)p);
  int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_s8(vget_high_s8(all));
  int16x4_t fours[4] = {vget_low_s16(low), vget_high_s16(low), vget_low_s16(high),
                        vget_high_s16(high)};
  EACH(Floats, vcvtq_f32_s32(vmovl_s16(fours[i])))
}
INLINE Floats operator*(Floats a, Floats b) { EACH(Floats, vmulq_f32(a.v[i], b.v[i])) }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  EACH(Floats, vfmaq_f32(c.v[i], a.v[i], b.v[i]))
}
INLINE void store_floats(float* p, Floats x) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.v[i]);
}

// Both factors are signed: values of 8 bits are made so by their offset of 128.
template <int bits>
struct Dots {
  static constexpr bool is_wide = bits == 8;
  int32x4_t v[4] = {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)};
  INLINE void add(Bytes w, const int8_t* x) {
    int32_t word;
    std::memcpy(&word, x, 4);
    int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(word));
    for (int i = 0; i < 4; i++) {
      uint8x16_t value = is_wide ? veorq_u8(w.v[i], vdupq_n_u8(128)) : w.v[i];
      v[i] = vdotq_s32(v[i], vreinterpretq_s8_u8(value), four);
    }
  }
  INLINE void widen() {}
  INLINE Floats minus(int log2_offset, int32_t x) const {
    int32x4_t shift = vdupq_n_s32(is_wide ? 0 : x * (1 << log2_offset));
    EACH(Floats, vcvtq_f32_s32(vsubq_s32(v[i], shift)))
  }
  INLINE Floats floats() const { EACH(Floats, vcvtq_f32_s32(v[i])) }
};
#undef EACH

#else  // loops that a compiler vectorizes

constexpr int MOST_ROWS = 4;
constexpr int UNROLL = 1;
struct Bytes {
  uint8_t v[VECTOR];
};
INLINE Bytes load_bytes(const uint8_t* p) {
  Bytes out;
  std::memcpy(out.v, p, VECTOR);
  return out;
}
#define EACH_BYTE(expression)                       \
  Bytes out;                                        \
  for (int i = 0; i < VECTOR; i++) out.v[i] = expression; \
  return out;
INLINE Bytes operator&(Bytes a, uint8_t mask) { EACH_BYTE(a.v[i] & mask) }
INLINE Bytes operator|(Bytes a, Bytes b) { EACH_BYTE(a.v[i] | b.v[i]) }
INLINE Bytes operator>>(Bytes a, int n) { EACH_BYTE(a.v[i] >> n) }
INLINE Bytes operator<<(Bytes a, int n) { EACH_BYTE(a.v[i] << n) }
#undef EACH_BYTE

struct Floats {
  float v[OUTPUTS];
};
#define EACH_FLOAT(expression)                       \
  Floats out;                                        \
  for (int i = 0; i < OUTPUTS; i++) out.v[i] = expression; \
  return out;
INLINE Floats fill_floats(float x) { EACH_FLOAT(x) }
INLINE Floats load_halves(const uint8_t* p) {
  f16 halves[OUTPUTS];
  std::memcpy(halves, p, sizeof halves);
  EACH_FLOAT(::widen(halves[i]))
}
INLINE Floats load_floats(const uint8_t* p, uint8_t) { EACH_FLOAT(p[i]) }
INLINE Floats load_floats(const uint8_t* p, int8_t) { EACH_FLOAT((int8_t)p[i]) }
INLINE Floats operator*(Floats a, Floats b) { EACH_FLOAT(a.v[i] * b.v[i]) }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  EACH_FLOAT(__builtin_fmaf(a.v[i], b.v[i], c.v[i]))
}
#undef EACH_FLOAT
INLINE void store_floats(float* p, Floats x) { std::memcpy(p, x.v, sizeof x.v); }

template <int bits>
struct Dots {
  int32_t v[OUTPUTS] = {};
  INLINE void add(Bytes w, const int8_t* x) {
    for (int i = 0; i < OUTPUTS; i++)
      for (int k = 0; k < 4; k++) v[i] += w.v[4 * i + k] * x[k];
  }
  INLINE void widen() {}
  INLINE Floats minus(int log2_offset, int32_t x) const {
    Floats out;
    for (int i = 0; i < OUTPUTS; i++) out.v[i] = v[i] - x * (1 << log2_offset);
    return out;
  }
  INLINE Floats floats() const { return minus(0, 0); }
};

#endif
