// The one AVX-VNNI intrinsic that the kernels use, emulated on AVX2: included ahead of the sources (`-include`), it lets
// machines without AVX-VNNI test that code.
#pragma once
#include <immintrin.h>

#include <cstdint>

#if !defined(__AVXVNNI__)
#define __AVXVNNI__ 1

namespace emulated {

inline __m256i dpbusd(__m256i acc, __m256i a, __m256i b) {  // a unsigned, b signed
  alignas(32) int32_t r[8];
  alignas(32) uint8_t u[32];
  alignas(32) int8_t s[32];
  _mm256_store_si256((__m256i *)r, acc);
  _mm256_store_si256((__m256i *)u, a);
  _mm256_store_si256((__m256i *)s, b);
  for (int i = 0; i < 32; i++) r[i / 4] += (int32_t)u[i] * s[i];
  return _mm256_load_si256((const __m256i *)r);
}

}  // namespace emulated

#define _mm256_dpbusd_avx_epi32 emulated::dpbusd
#endif
