// Products: rows of activations times one block of 32 outputs, in each format, written to `out`.
//
// Each output accumulates over its inputs in one fixed order, whatever the number of rows, so rows may be taken in tiles
// of any height. The weights of a block lie in the order in which they are read.
#pragma once
#include "repack.h"

namespace {

// 64 activations as integers, and behind them what belongs to them: one pointer leads to all of it.
template <typename T> struct Quantised {
  T x[GROUP8];
  float scale;
  union {
    int32_t start[4];  // where the integer sum of each group begins, as weights are stored plus an offset
    float sum[4];      // where groups have minima, the sum of x that those are multiplied with
  };
};
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
typedef Quantised<int16_t> Int8Group;  // without products of bytes that fit
#else
typedef Quantised<int8_t> Int8Group;
#endif
typedef Quantised<int8_t> GroupedRow;

// A row of activations as the product wants it, in scratch.
struct Row {
  char *base;
  int padded;
  float *f32() const { return (float *)base; }
  uint16_t *bf16() const { return (uint16_t *)base; }
  Int8Group *int8() const { return (Int8Group *)base; }
  GroupedRow *grouped() const { return (GroupedRow *)base; }
};

inline int64_t row_bytes(int format, int padded) {
  if (bytes_as_they_are(format)) return padded / GROUP8 * sizeof(Int8Group);
  if (grouped(format)) return padded / GROUP8 * sizeof(GroupedRow);
#if defined(__AVX512BF16__)
  if (format == BF16) return padded * 2;
#endif
  return padded * 4;
}

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
