// Sixteen lanes of float or int32, and the functions on them that every operation is written with.
//
// AVX-512 holds sixteen lanes in one register. Elsewhere they are a struct of narrower vectors: the compiler keeps those
// in registers, whereas a vector type wider than the registers lives in memory.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <utility>

#include "common.h"

namespace {

constexpr int W = 16;
#define INLINE __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))  // one copy for all that call it, so that less code is read

// Calls f with every constant below N. GCC keeps an array in registers only where all its indices are constants before it
// looks at loops; unrolled by itself, every sum was stored at every step, and products in f32 ran at half the speed.
template <typename F, int... I> INLINE inline void call(F f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, typename F> INLINE inline void times(F f) { call(f, std::make_integer_sequence<int, N>{}); }
#define EACH(i, N, ...) times<N>([&](auto i) INLINE { __VA_ARGS__; })

#if defined(__AVX512F__)

constexpr int REGISTER = 64;  // bytes
typedef float vf __attribute__((vector_size(64), aligned(64)));
typedef float vfu __attribute__((vector_size(64), aligned(4)));
typedef int32_t vi __attribute__((vector_size(64), aligned(64)));
typedef uint32_t vu __attribute__((vector_size(64), aligned(64)));

inline vf set1(float x) { return (vf)_mm512_set1_ps(x); }
inline vi set1i(int32_t x) { return vi{} + x; }
inline vf load(const float *p) { return *reinterpret_cast<const vfu *>(p); }
inline void store(float *p, vf v) { *reinterpret_cast<vfu *>(p) = v; }
inline vf as_float(vi x) { return (vf)x; }  // the bits, not the value
inline vi as_int(vf x) { return (vi)x; }
inline vf to_float(vi x) { return __builtin_convertvector(x, vf); }
inline vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline vf largest(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
inline vi nearest(vf a) { return (vi)_mm512_cvtps_epi32((__m512)a); }
inline vf half16(const uint16_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
// not by __builtin_convertvector, which GCC does in halves
inline void to_bytes(int8_t *p, vi v) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)v)); }
inline vf from_bf16(const uint16_t *p) {
  return (vf)((vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)) << 16);
}
inline void to_bf16(uint16_t *p, vf v) {  // round to nearest, ties to even
  vu x = (vu)v;
  x = (x + 0x7fff + ((x >> 16) & 1)) >> 16;
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)x));
}

#else

#if defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif
constexpr int PART = REGISTER / 4, PARTS = W / PART;
typedef float pf __attribute__((vector_size(PART * 4)));
typedef float pfu __attribute__((vector_size(PART * 4), aligned(4)));
typedef int32_t pi __attribute__((vector_size(PART * 4)));
typedef uint32_t pu __attribute__((vector_size(PART * 4)));
typedef uint16_t ph __attribute__((vector_size(PART * 2), aligned(2)));

template <typename P, typename T> struct alignas(64) Lanes {
  P p[PARTS];
  T &operator[](int i) { return reinterpret_cast<T *>(p)[i]; }
  T operator[](int i) const { return reinterpret_cast<const T *>(p)[i]; }
};
typedef Lanes<pf, float> vf;
typedef Lanes<pi, int32_t> vi;

template <typename R, typename F> inline R each(F f) {
  R r;
  for (int i = 0; i < PARTS; i++) r.p[i] = f(i);
  return r;
}
#define BINARY(V, T, op)                                                                            \
  inline V operator op(V a, V b) { return each<V>([&](int i) { return a.p[i] op b.p[i]; }); }       \
  inline V operator op(V a, T b) { return each<V>([&](int i) { return a.p[i] op b; }); }
BINARY(vf, float, +) BINARY(vf, float, -) BINARY(vf, float, *) BINARY(vf, float, /)
BINARY(vi, int32_t, +) BINARY(vi, int32_t, -) BINARY(vi, int32_t, &) BINARY(vi, int32_t, |)
BINARY(vi, int32_t, <<) BINARY(vi, int32_t, >=) BINARY(vi, int32_t, <)
#undef BINARY
#define COMPARE(op)                                                                                 \
  inline vi operator op(vf a, vf b) { return each<vi>([&](int i) { return a.p[i] op b.p[i]; }); }   \
  inline vi operator op(vf a, float b) { return each<vi>([&](int i) { return a.p[i] op (pf{} + b); }); }
COMPARE(<) COMPARE(>) COMPARE(<=)
#undef COMPARE
inline vf operator-(vf a) { return each<vf>([&](int i) { return -a.p[i]; }); }
inline vi operator~(vi a) { return each<vi>([&](int i) { return ~a.p[i]; }); }

inline vf set1(float x) {  // adding to zero would be an addition
#if defined(__AVX2__)
  return each<vf>([&](int) { return (pf)_mm256_set1_ps(x); });
#else
  return each<vf>([&](int) { return (pf)_mm_set1_ps(x); });
#endif
}
inline vi set1i(int32_t x) { return each<vi>([&](int) { return pi{} + x; }); }
inline vf load(const float *p) { return each<vf>([&](int i) { return (pf)(*(const pfu *)(p + i * PART)); }); }
inline void store(float *p, vf v) {
  for (int i = 0; i < PARTS; i++) *(pfu *)(p + i * PART) = v.p[i];
}
inline vf as_float(vi x) { return each<vf>([&](int i) { return (pf)x.p[i]; }); }  // the bits, not the value
inline vi as_int(vf x) { return each<vi>([&](int i) { return (pi)x.p[i]; }); }
inline vf to_float(vi x) { return each<vf>([&](int i) { return __builtin_convertvector(x.p[i], pf); }); }
inline vf from_bf16(const uint16_t *p) {
#if defined(__AVX2__)
  return each<vf>([&](int i) { return (pf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + i * PART))), 16); });
#else
  return each<vf>([&](int i) { return (pf)(__builtin_convertvector(*(const ph *)(p + i * PART), pu) << 16); });
#endif
}

#if defined(__AVX2__)
inline void to_bytes(int8_t *p, vi v) {
  __m256i halves = _mm256_packs_epi32((__m256i)v.p[0], (__m256i)v.p[1]);
  halves = _mm256_permute4x64_epi64(halves, _MM_SHUFFLE(3, 1, 2, 0));
  _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}
inline vf fma(vf a, vf b, vf c) {
  return each<vf>([&](int i) { return (pf)_mm256_fmadd_ps((__m256)a.p[i], (__m256)b.p[i], (__m256)c.p[i]); });
}
inline vf largest(vf a, vf b) {
  return each<vf>([&](int i) { return (pf)_mm256_max_ps((__m256)a.p[i], (__m256)b.p[i]); });
}
inline vi nearest(vf a) { return each<vi>([&](int i) { return (pi)_mm256_cvtps_epi32((__m256)a.p[i]); }); }
inline vf half16(const uint16_t *p) {
  return each<vf>([&](int i) { return (pf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + i * PART))); });
}
#else
inline void to_bytes(int8_t *p, vi v) {
  for (int i = 0; i < W; i++) p[i] = (int8_t)v[i];
}
inline vf fma(vf a, vf b, vf c) { return a * b + c; }
inline vf largest(vf a, vf b) { return each<vf>([&](int i) { return (pf)_mm_max_ps((__m128)a.p[i], (__m128)b.p[i]); }); }
inline vi nearest(vf a) { return each<vi>([&](int i) { return (pi)_mm_cvtps_epi32((__m128)a.p[i]); }); }
inline float half(uint16_t h);
inline vf half16(const uint16_t *p) {
  vf r;
  for (int i = 0; i < W; i++) r[i] = half(p[i]);
  return r;
}
#endif

#endif

// The first n lanes; the others are zeros, or stay as they are.
inline vf load_some(const float *p, int n) {
  if (n >= W) return load(p);
  vf v{};
  for (int i = 0; i < n; i++) v[i] = p[i];
  return v;
}
inline void store_some(float *p, vf v, int n) {
  if (n >= W) return store(p, v);
  for (int i = 0; i < n; i++) p[i] = v[i];
}

// Sixteen bytes as lanes of 32 bits.
inline vi from_uint8(const uint8_t *p) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
  return each<vi>([&](int i) { return (pi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + i * PART))); });
#else
  vi r;
  for (int i = 0; i < W; i++) r[i] = p[i];
  return r;
#endif
}
inline vi from_int8(const int8_t *p) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
  return each<vi>([&](int i) { return (pi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + i * PART))); });
#else
  vi r;
  for (int i = 0; i < W; i++) r[i] = p[i];
  return r;
#endif
}

inline bool any(vi mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX2__)
  __m256i both = (__m256i)(mask.p[0] | mask.p[1]);
  return !_mm256_testz_si256(both, both);
#else
  int32_t all = 0;
  for (int i = 0; i < W; i++) all |= mask[i];
  return all;
#endif
}
inline vf pick(vi mask, vf a, vf b) { return as_float((mask & as_int(a)) | (~mask & as_int(b))); }

#if defined(__AVX2__)
#if defined(__AVX512F__)
inline __m256 half_of(vf v, int i) { return i ? _mm512_extractf32x8_ps((__m512)v, 1) : _mm512_castps512_ps256((__m512)v); }
inline __m256i half_of(vi v, int i) { return _mm256_castps_si256(half_of(as_float(v), i)); }
#else
inline __m256 half_of(vf v, int i) { return (__m256)v.p[i]; }
inline __m256i half_of(vi v, int i) { return (__m256i)v.p[i]; }
#endif
inline float sum(vf v) {  // in the order of the other
  __m256 a = _mm256_add_ps(half_of(v, 0), half_of(v, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
inline float top(vf v) {
  __m256 a = _mm256_max_ps(half_of(v, 0), half_of(v, 1));
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}
inline int32_t sum(vi v) {
  __m256i a = _mm256_add_epi32(half_of(v, 0), half_of(v, 1));
  __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
#else
inline float sum(vf v) {  // in one fixed order
  alignas(64) float a[W];
  store(a, v);
  for (int s = W / 2; s; s /= 2)
    for (int i = 0; i < s; i++) a[i] = a[i] + a[i + s];
  return a[0];
}
inline float top(vf v) {
  alignas(64) float a[W];
  store(a, v);
  for (int s = W / 2; s; s /= 2)
    for (int i = 0; i < s; i++) a[i] = a[i] > a[i + s] ? a[i] : a[i + s];
  return a[0];
}
inline int32_t sum(vi v) {
  int32_t all = 0;
  for (int i = 0; i < W; i++) all += v[i];
  return all;
}
#endif

inline float half(uint16_t h) {  // IEEE half, finite
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
  float f;
  uint32_t bits = rest << 13;
  memcpy(&f, &bits, 4);
  f = f * 0x1p112f;
  memcpy(&bits, &f, 4);
  bits |= sign;
  memcpy(&f, &bits, 4);
  return f;
}
inline uint16_t to_half(float f) {
  uint32_t x;
  memcpy(&x, &f, 4);
  uint32_t sign = (x >> 16) & 0x8000, rest = x & 0x7fffffff;
  float scaled;
  memcpy(&scaled, &rest, 4);
  scaled = scaled * 0x1p-112f;
  memcpy(&rest, &scaled, 4);
  rest = (rest + 0xfff + ((rest >> 13) & 1)) >> 13;
  return (uint16_t)(sign | (rest > 0x7bff ? 0x7bff : rest));
}

inline float from_bf16(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
inline uint16_t to_bf16(float f) {  // to nearest, ties to even
  uint32_t x;
  memcpy(&x, &f, 4);
  return (uint16_t)((x + 0x7fff + ((x >> 16) & 1)) >> 16);
}

// exp on 16 lanes: x = n ln 2 + r, a polynomial of degree 6 on r; relative error below 2e-7. Arguments are from -87 to 88.
INLINE inline vf exp_within(vf x) {
  vi n = nearest(x * 1.44269504f);
  vf f = to_float(n);
  vf r = fma(f, set1(-0.693145752f), x);
  r = fma(f, set1(-1.42860677e-6f), r);
  vf p = set1(1.0f / 720);
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return p * as_float((n + 127) << 23);
}
INLINE inline vf vexp(vf x) {  // arguments are clamped
  x = pick(x < -87.0f, set1(-87.0f), x);
  x = pick(x > 88.0f, set1(88.0f), x);
  return exp_within(x);
}
inline vf vtanh(vf x) {
  vf e = vexp(x * 2.0f);
  return (e - 1.0f) / (e + 1.0f);
}
inline vf activate(vf x, int kind) {
  if (kind == SILU) return x / (vexp(-x) + 1.0f);
  if (kind == GELU_TANH) return x * 0.5f * (vtanh((x + x * x * x * 0.044715f) * 0.797884561f) + 1.0f);
  if (kind == TANH) return vtanh(x);
  if (kind == SIGMOID) return set1(1.0f) / (vexp(-x) + 1.0f);
  if (kind == RELU2) return pick(x > 0.0f, x * x, set1(0));
  if (kind == GELU)
    for (int i = 0; i < W; i++) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.707106781f));
  return x;
}
// xIELU (2411.13010). p: the factors of the curves above and below 0, the slope at 0, the bound of the exponent.
inline vf xielu(vf x, const float *p) {
  vf low = pick(x < p[3], x, set1(p[3])), slope = x * p[2];
  return pick(x > 0.0f, x * x * p[0] + slope, (vexp(low) - 1.0f - x) * p[1] + slope);
}

}  // namespace
