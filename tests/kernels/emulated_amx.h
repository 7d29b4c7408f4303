// The matrix instructions that the kernels use, emulated: included ahead of the sources (`-include`), it lets machines
// without AMX test that code. A tile's unused bytes are zeros, and rows that were not configured may not be used.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if !defined(__AMX_INT8__)
#define __AMX_INT8__ 1

namespace emulated {

struct Tiles {
  struct { uint8_t palette, start_row, reserved[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } shape;
  uint8_t data[8][16][64];
};
inline thread_local Tiles tiles;

inline void check(bool right) {
  if (!right) abort();
}
inline void load_config(const void *from) {
  memset(&tiles, 0, sizeof tiles);
  memcpy(&tiles.shape, from, 64);
  check(tiles.shape.palette == 1);
  for (int i = 0; i < 8; i++) check(tiles.shape.rows[i] <= 16 && tiles.shape.row_bytes[i] <= 64);
}
inline void release() { memset(&tiles, 0, sizeof tiles); }
inline void zero(int tile) {
  check(tiles.shape.rows[tile]);
  memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
}
inline void load(int tile, const void *from, int64_t stride) {
  zero(tile);
  for (int r = 0; r < tiles.shape.rows[tile]; r++)
    memcpy(tiles.data[tile][r], (const char *)from + r * stride, tiles.shape.row_bytes[tile]);
}
inline void store(int tile, void *to, int64_t stride) {
  check(tiles.shape.rows[tile]);
  for (int r = 0; r < tiles.shape.rows[tile]; r++) memcpy((char *)to + r * stride, tiles.data[tile][r], tiles.shape.row_bytes[tile]);
}
inline void dpbsud(int sums, int a, int b) {  // a signed, b unsigned: four bytes of a row times four of a line
  const auto &s = tiles.shape;
  check(s.rows[sums] == s.rows[a] && s.row_bytes[a] == 4 * s.rows[b] && s.row_bytes[b] == s.row_bytes[sums]);
  for (int m = 0; m < s.rows[a]; m++)
    for (int k = 0; k < s.rows[b]; k++)
      for (int n = 0; n < s.row_bytes[b] / 4; n++) {
        int32_t sum;
        memcpy(&sum, tiles.data[sums][m] + 4 * n, 4);
        for (int i = 0; i < 4; i++) sum += (int32_t)(int8_t)tiles.data[a][m][4 * k + i] * tiles.data[b][k][4 * n + i];
        memcpy(tiles.data[sums][m] + 4 * n, &sum, 4);
      }
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbsud emulated::dpbsud
#endif
