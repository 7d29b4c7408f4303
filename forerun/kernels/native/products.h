// Products: rows of activations times one block of 32 outputs, in each format, written to `out`.
//
// Each output accumulates over its inputs in one fixed order, whatever the number of rows, so rows may be taken in tiles
// of any height. The weights of a block lie in the order in which they are read.
#pragma once
#include "vector.h"

namespace {

// A row of activations as the product wants it, in scratch: values, then scales [P/64], then sums [P/32].
struct Row {
  char *base;
  int padded;
  float *f32() const { return (float *)base; }
  uint16_t *bf16() const { return (uint16_t *)base; }
  int8_t *int8() const { return (int8_t *)base; }
  int16_t *int16() const { return (int16_t *)base; }
  float *scales() const { return (float *)(base + (int64_t)padded * 4); }
  int32_t *sums() const { return (int32_t *)(base + (int64_t)padded * 4) + padded / GROUP8; }
};

constexpr int MOST = 48;  // rows of one call

inline void scale_outputs(const Matrix &a, int block, int count, float (*out)[BLOCK]) {  // INT8: one scale an output
  for (int c = 0; c < BLOCK; c += W) {
    vf scale = load((const float *)a.scale + block * BLOCK + c);
    for (int m = 0; m < count; m++) store(out[m] + c, load(out[m] + c) * scale);
  }
}

}  // namespace

#if defined(__AVX2__) && !defined(__AVX512F__)
#include "products_avx2.h"
#else
#include "products_wide.h"
#endif
