// Noise as a function of a stream and a token, as in rng.py.
#pragma once
#include <cmath>
#include <cstdint>

namespace {

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull, FIRST = 0xBF58476D1CE4E5B9ull, SECOND = 0x94D049BB133111EBull;

inline uint64_t mix(uint64_t x) {  // SplitMix64's finaliser, as in rng.py
  x = (x ^ (x >> 30)) * FIRST;
  x = (x ^ (x >> 27)) * SECOND;
  return x ^ (x >> 31);
}
inline double gumbel(uint64_t key, int token) {
  uint64_t bits = mix(key + (uint64_t)(token + 1) * GOLDEN) >> 12;
  return -log(-log(((double)bits + 0.5) * 0x1p-52));
}

}  // namespace
