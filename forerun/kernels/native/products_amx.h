// Products of many rows with matrix instructions (AMX-INT8): up to 16 rows times 16 outputs at once.
//
// The sum of a group is a whole number, the same in whatever order it is added up, and is scaled as in products_wide.h.
// So a row has the same bits in a tile of sixteen rows as without matrix instructions, which take few rows faster.
#pragma once
#include <immintrin.h>

namespace {

constexpr int TILE_ROWS = 16;
// Tiles, by number, which instructions hold: macros, as the compiler's headers paste them.
#define ACTIVATIONS 0
#define LOW_WEIGHTS 1
#define HIGH_WEIGHTS 2
#define LOW_SUMS 3
#define HIGH_SUMS 4

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int rows_, int bytes) { rows[tile] = (uint8_t)rows_, row_bytes[tile] = (uint16_t)bytes; }
};

// Of products of `rows` rows of so many inputs: sums are integers of 4 bytes, and a line of weights has four inputs of 16 outputs.
inline void shape_tiles(int rows, int inputs) {
  TileShapes shapes;
  shapes.set(ACTIVATIONS, rows, inputs);
  for (int tile : {LOW_WEIGHTS, HIGH_WEIGHTS}) shapes.set(tile, inputs / 4, 64);
  for (int tile : {LOW_SUMS, HIGH_SUMS}) shapes.set(tile, rows, 64);
  asm volatile("" : : "r"(&shapes) : "memory");  // GCC only knows of the first bytes that are read
  _tile_loadconfig(&shapes);
}

typedef int32_t Sums[2][TILE_ROWS][W];  // of 16 outputs, twice

// Signed activations, a row each `stride` bytes, times unsigned weights, a line each `line` bytes, of two times 16 outputs.
inline void multiply_tiles(const void *x, int64_t stride, const uint8_t *low, const uint8_t *high, int64_t line, Sums &sums) {
  asm volatile("" : : : "memory");  // what was unpacked before is in memory now
  _tile_loadd(ACTIVATIONS, x, stride);
  _tile_loadd(LOW_WEIGHTS, low, line);
  _tile_loadd(HIGH_WEIGHTS, high, line);
  _tile_zero(LOW_SUMS);
  _tile_zero(HIGH_SUMS);
  _tile_dpbsud(LOW_SUMS, ACTIVATIONS, LOW_WEIGHTS);
  _tile_dpbsud(HIGH_SUMS, ACTIVATIONS, HIGH_WEIGHTS);
  _tile_stored(LOW_SUMS, sums[0], 4 * W);
  _tile_stored(HIGH_SUMS, sums[1], 4 * W);
}

// The distance of rows in bytes, or 0 if it differs.
inline int64_t distance(const Row *rows, int count) {
  const int64_t between = rows[1].base - rows[0].base;
  for (int m = 1; m < count; m++)
    if (rows[m].base - rows[m - 1].base != between) return 0;
  return between;
}

// Of up to 16 rows that lie `between` bytes apart.
template <int F> void product_tiles(const Matrix &a, int block, const Row *rows, int64_t between, int count, Ahead ahead, float (*out)[BLOCK]) {
  constexpr Layout L = layout(F);
  constexpr int INPUTS = L.group ? L.group : GROUP8, GROUPS = L.group ? 32 / L.group : 1, HALVES = L.group ? 2 : 1;
  const uint8_t *w = (const uint8_t *)a.weight + block * block_bytes(a);
  Scales<F, 2> scales{(const uint8_t *)a.scale + (int64_t)block * scale_bytes(F, a.padded), nullptr, 0, scale_bytes(F, a.padded), {}, {}};
  vf pair[TILE_ROWS][2];  // sums under one scale of the activations
  alignas(64) Sums sums[GROUPS];
  alignas(64) uint8_t unpacked[2][8][64];
  memset(out, 0, sizeof(*out) * count);
  shape_tiles(count, INPUTS);
  for (int g = 0; g < a.padded / GROUP8; g++) {
    for (int half_ = 0; half_ < HALVES; half_++, w += chunk_bytes(F) * 2 / HALVES) {
      for (int i = 0; i < L.bits * 2 / HALVES; i++) ahead.step();  // once for each line
      if constexpr (L.bits != 8)
        for (int c = 0; c < 2; c++) {
#pragma GCC unroll 8
          for (int t = 0; t < 8; t++) {
            const vi v = weights<L.bits, L.coded>(w + 64 * c, t);
            memcpy(unpacked[c][t], &v, 64);
          }
        }
      for (int i = 0; i < GROUPS; i++) {
        const auto *x = grouped_row<F>(*rows)[g].x + half_ * 32 + i * INPUTS;
        const int first = i * INPUTS / 4;  // line
        if constexpr (L.bits == 8) multiply_tiles(x, between, w + first * 128, w + first * 128 + 64, 128, sums[i]);
        else multiply_tiles(x, between, unpacked[0][first], unpacked[1][first], 64, sums[i]);
      }
      if constexpr (L.group != 0) scales.read(2 * g + half_);
      for (int m = 0; m < count; m++) {
        const auto &own = grouped_row<F>(rows[m])[g];
        for (int c = 0; c < 2; c++) {
          for (int i = 0; i < GROUPS; i++) {
            const int which = half_ * GROUPS + i;  // of the groups under one scale of activations
            const vi sum = bytes(sums[i][c][m]);
            const vf x = to_float(L.minimum ? sum : sum + set1i(own.start[which]));
            if constexpr (L.group == 0) pair[m][c] = x;
            else pair[m][c] = which ? fma(x, scales.scale[i][c], pair[m][c]) : x * scales.scale[i][c];
          }
          if constexpr (L.minimum) pair[m][c] = fma(set1(own.sum[half_]), scales.minimum[c], pair[m][c]);
          if (half_ == HALVES - 1) store(out[m] + c * W, fma(pair[m][c], set1(own.scale), load(out[m] + c * W)));
        }
      }
    }
  }
  _tile_release();  // a thread that goes to sleep has no tiles to be saved
  if (F == INT8) scale_outputs(a, block, count, out);
}

using ProductTiles = void (*)(const Matrix &, int, const Row *, int64_t, int, Ahead, float (*)[BLOCK]);
const ProductTiles tiles_of_many[FORMATS] = {
    nullptr, nullptr, product_tiles<INT8>, product_tiles<INT4>, nullptr, product_tiles<Q8_0>, product_tiles<Q4_1>,
    product_tiles<Q5_0>, product_tiles<Q5_1>, product_tiles<Q4_K>, product_tiles<Q5_K>, product_tiles<Q6_K>, product_tiles<MXFP4>};

// As `products`, for more rows than one of its tiles takes; false, with nothing done, if the rows are few or lie at different
// distances, as those of experts may, or if the weights are no integers.
bool products_of_many(const Matrix &a, int block, const Row *rows, int count, float (*out)[BLOCK]) {
  if (count <= TALLEST || !tiles_of_many[a.format]) return false;
  const int64_t between = distance(rows, count);
  if (!between) return false;
  const int tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
  const int64_t size = block_bytes(a);
  const char *first = (const char *)a.weight + (block + 1) * size;
  for (int i = 0; i < tiles; i++) {
    Share tile = share(count, i, tiles);
    tiles_of_many[a.format](a, block, rows + tile.from, between, tile.to - tile.from, Ahead{first + size * i / tiles, 128 / tiles}, out + tile.from);
  }
  return true;
}

// Whether matrix instructions do here what their description says: this path was only run on emulated ones.
bool tiles_work() {
  alignas(64) int8_t x[TILE_ROWS][64];
  alignas(64) uint8_t w[2][16][64];
  alignas(64) Sums sums;
  for (int i = 0; i < 1024; i++) x[i / 64][i % 64] = (int8_t)(i * 37 + i / 5), w[0][i / 64][i % 64] = (uint8_t)(i * 101 + i / 3), w[1][i / 64][i % 64] = (uint8_t)(255 - i / 7);
  for (int rows : {9, TILE_ROWS})
    for (int inputs : {16, 32, 64}) {
      shape_tiles(rows, inputs);
      multiply_tiles(x, 64, w[0][0], w[1][0], 64, sums);
      _tile_release();
      for (int c = 0; c < 2; c++)
        for (int m = 0; m < rows; m++)
          for (int o = 0; o < W; o++) {
            int32_t expected = 0;
            for (int k = 0; k < inputs; k++) expected += (int32_t)x[m][k] * w[c][k / 4][o * 4 + k % 4];
            if (sums[c][m][o] != expected) return false;
          }
    }
  return true;
}

}  // namespace
