// The few AVX-512 intrinsics that the kernels use, emulated on AVX2: included ahead of the sources (`-include`), it lets
// machines without AVX-512 test that code. The compiler supports the vector types on any machine.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#if !defined(__AVX512F__)
#define __AVX512F__ 1
#define __AVX512VNNI__ 1
#if !defined(WITHOUT_BF16)
#define __AVX512BF16__ 1
#endif

namespace emulated {

typedef int32_t ints __attribute__((vector_size(64)));
typedef float floats __attribute__((vector_size(64)));

template <typename To, typename From> inline To bits(const From &from) {
  static_assert(sizeof(To) == sizeof(From), "the types have different sizes");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
template <typename F> inline __m512 lanes(F f) {
  floats r;
  for (int i = 0; i < 16; i++) r[i] = f(i);
  return (__m512)r;
}
inline __m512 fmadd(__m512 a, __m512 b, __m512 c) {
  return lanes([&](int i) { return fmaf(a[i], b[i], c[i]); });
}
inline __m512 max(__m512 a, __m512 b) {  // the second value if one is nan
  return lanes([&](int i) { return a[i] > b[i] ? a[i] : b[i]; });
}
inline __m512i nearest(__m512 a) {
  __m256i half[2];
  for (int h = 0; h < 2; h++) half[h] = _mm256_cvtps_epi32(_mm256_loadu_ps((const float *)&a + 8 * h));
  return bits<__m512i>(half);
}
inline __m512 from_half(__m256i a) {
  __m256 half[2];
  for (int h = 0; h < 2; h++) half[h] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)&a + h));
  return bits<__m512>(half);
}
inline uint16_t nonzero(__m512i a, __m512i b) {
  ints both = (ints)(a & b);
  uint16_t mask = 0;
  for (int i = 0; i < 16; i++) mask |= (uint16_t)((both[i] != 0) << i);
  return mask;
}
inline __m512i load(const void *p) {
  __m512i r;
  memcpy(&r, p, 64);
  return r;
}
inline __m256 half(__m512 a, int i) { return _mm256_loadu_ps((const float *)&a + 8 * i); }
inline __m512i from_16(__m256i a) {
  __m256i half[2];
  for (int h = 0; h < 2; h++) half[h] = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)&a + h));
  return bits<__m512i>(half);
}
template <typename To, typename T> inline To narrow(__m512i a) {
  T low[16];
  for (int i = 0; i < 16; i++) low[i] = (T)((ints)a)[i];
  return bits<To>(low);
}
inline __m512i fill(int32_t x) { return (__m512i)(ints{} + x); }
inline __m512 fill_floats(float x) { return (__m512)fill(bits<int32_t>(x)); }
inline __m512i dpbusd(__m512i acc, __m512i a, __m512i b) {  // a unsigned, b signed
  ints r = (ints)acc, u = (ints)a, s = (ints)b;
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < 4; k++) r[i] += (int32_t)((uint32_t)u[i] >> 8 * k & 0xff) * (int8_t)((uint32_t)s[i] >> 8 * k & 0xff);
  return (__m512i)r;
}
inline __m512 dpbf16(__m512 acc, __m512bh a, __m512bh b) {  // the odd product first, as processors do
  ints x = bits<ints>(a), y = bits<ints>(b);
  auto value = [](int32_t pair, int odd) { return bits<float>((int32_t)(odd ? (uint32_t)pair & 0xffff0000u : (uint32_t)pair << 16)); };
  return lanes([&](int i) {
    float odd = fmaf(value(x[i], 1), value(y[i], 1), acc[i]);
    return fmaf(value(x[i], 0), value(y[i], 0), odd);
  });
}

inline __m512i repeated(__m128i a) {
  __m128i four[4] = {a, a, a, a};
  return bits<__m512i>(four);
}
inline __m512i shuffle(__m512i table, __m512i places) {  // within 16 bytes
  __m128i t[4], p[4];
  memcpy(t, &table, 64), memcpy(p, &places, 64);
  for (int i = 0; i < 4; i++) t[i] = _mm_shuffle_epi8(t[i], p[i]);
  return bits<__m512i>(t);
}

template <class Byte>
inline __m512i from_8(__m128i a) {
  typedef Byte bytes __attribute__((vector_size(16)));
  typedef int lanes __attribute__((vector_size(64)));
  return (__m512i) __builtin_convertvector((bytes)a, lanes);
}

}  // namespace emulated

#define _mm512_fmadd_ps emulated::fmadd
#define _mm512_max_ps emulated::max
#define _mm512_cvtps_epi32 emulated::nearest
#define _mm512_cvtph_ps emulated::from_half
#define _mm512_extractf32x8_ps emulated::half
#define _mm512_castps512_ps256(a) emulated::half(a, 0)
#define _mm512_cvtepu16_epi32 emulated::from_16
#define _mm512_cvtepu8_epi32 emulated::from_8<uint8_t>
#define _mm512_cvtepi8_epi32 emulated::from_8<int8_t>
#define _mm512_cvtepi32_epi16(a) emulated::narrow<__m256i, int16_t>(a)
#define _mm512_cvtepi32_epi8(a) emulated::narrow<__m128i, int8_t>(a)
#define _mm512_test_epi32_mask emulated::nonzero
#define _mm512_loadu_si512 emulated::load
#define _mm512_set1_epi32 emulated::fill
#define _mm512_set1_ps emulated::fill_floats
#define _mm512_setzero_ps() ((__m512)emulated::fill(0))
#define _mm512_dpbusd_epi32 emulated::dpbusd
#define _mm512_dpbf16_ps emulated::dpbf16
#define _mm512_broadcast_i32x4 emulated::repeated
#define _mm512_shuffle_epi8 emulated::shuffle
#endif
