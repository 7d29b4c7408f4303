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

#if defined(__AVX2__) && !defined(__AVX512F__)

// Sixteen registers of eight lanes. Tiles are narrow and the inputs are taken in chunks that stay in the first cache while
// every tile passes over them; each pass fetches its part of the next chunk, so that memory never waits for arithmetic.
constexpr int CHUNK = 8192;  // bytes of weights
constexpr int LINE = 128;    // bytes of weights a step of any loop below reads: 32 outputs times 1, 2, 4 or 8 inputs

struct Ahead {  // prefetches `stride` bytes further at each step
  const char *p;
  int stride;
  void step() {
    _mm_prefetch(p, _MM_HINT_T0);
    if (stride > 64) _mm_prefetch(p + 64, _MM_HINT_T0);
    p += stride;
  }
};

inline __m256i four(const int8_t *x) {
  int32_t bits;
  memcpy(&bits, x, 4);
  return _mm256_set1_epi32(bits);
}

// Each of these adds inputs from..to-1 to M rows of C * 8 outputs; `w` points at those outputs of input `from`.
template <int M, int C> void add_f32(const char *w, const void *, const Row *rows, int from, int to, float (*out)[BLOCK], Ahead ahead) {
  __m256 acc[M][C];
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) acc[m][c] = _mm256_loadu_ps(out[m] + 8 * c);
  for (int k = from; k < to; k++, w += LINE) {
    ahead.step();
    __m256 v[C];
    for (int c = 0; c < C; c++) v[c] = _mm256_loadu_ps((const float *)w + 8 * c);
    for (int m = 0; m < M; m++) {
      __m256 x = _mm256_broadcast_ss(rows[m].f32() + k);
      for (int c = 0; c < C; c++) acc[m][c] = _mm256_fmadd_ps(v[c], x, acc[m][c]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) _mm256_storeu_ps(out[m] + 8 * c, acc[m][c]);
}

template <int M, int C> void add_bf16(const char *w, const void *, const Row *rows, int from, int to, float (*out)[BLOCK], Ahead ahead) {
  __m256 acc[M][C];
  const __m256i high = _mm256_set1_epi32((int)0xffff0000u);
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) acc[m][c] = _mm256_loadu_ps(out[m] + 8 * c);
  for (int k = from; k < to; k += 2, w += LINE) {
    ahead.step();
    for (int odd = 0; odd < 2; odd++) {  // low halves: input k, high halves: input k + 1
      __m256 v[C];
      for (int c = 0; c < C; c++) {
        __m256i both = _mm256_loadu_si256((const __m256i *)w + c);
        v[c] = _mm256_castsi256_ps(odd ? _mm256_and_si256(both, high) : _mm256_slli_epi32(both, 16));
      }
      for (int m = 0; m < M; m++) {
        __m256 x = _mm256_broadcast_ss(rows[m].f32() + k + odd);
        for (int c = 0; c < C; c++) acc[m][c] = _mm256_fmadd_ps(v[c], x, acc[m][c]);
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) _mm256_storeu_ps(out[m] + 8 * c, acc[m][c]);
}

// vpmaddubsw saturates unless one side is the magnitude of a signed byte: |w| times x with the sign of w.
template <int M, int C> void add_int8(const char *w, const void *, const Row *rows, int from, int to, float (*out)[BLOCK], Ahead ahead) {
  const __m256i ones = _mm256_set1_epi16(1), offset = _mm256_set1_epi8((char)0x80);
  for (int g = from; g < to; g += GROUP8) {
    __m256i acc[M][C];
    for (int m = 0; m < M; m++)
      for (int c = 0; c < C; c++) acc[m][c] = _mm256_setzero_si256();
    for (int k = g; k < g + GROUP8; k += 4, w += LINE) {
      ahead.step();
      for (int c = 0; c < C; c++) {
        __m256i v = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)w + c), offset), size = _mm256_abs_epi8(v);
        for (int m = 0; m < M; m++) {
          __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(four(rows[m].int8() + k), v));
          acc[m][c] = _mm256_add_epi32(acc[m][c], _mm256_madd_epi16(pairs, ones));
        }
      }
    }
    for (int m = 0; m < M; m++) {
      __m256 scale = _mm256_broadcast_ss(rows[m].scales() + g / GROUP8);
      for (int c = 0; c < C; c++)
        _mm256_storeu_ps(out[m] + 8 * c, _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[m][c]), scale, _mm256_loadu_ps(out[m] + 8 * c)));
    }
  }
}

// A group's eight products of at most 15 * 127 * 2 fit a signed 16-bit sum.
template <int M, int C> void add_int4(const char *w, const void *scale, const Row *rows, int from, int to, float (*out)[BLOCK], Ahead ahead) {
  const __m256i ones = _mm256_set1_epi16(1), nibble = _mm256_set1_epi8(15);
  const uint16_t *s = (const uint16_t *)scale;
  for (int g = from; g < to; g += GROUP4, s += BLOCK) {
    __m256i acc[M][C];
    for (int m = 0; m < M; m++)
      for (int c = 0; c < C; c++) acc[m][c] = _mm256_setzero_si256();
    for (int k = g; k < g + GROUP4; k += 8, w += LINE) {
      ahead.step();
      for (int c = 0; c < C; c++) {
        __m256i both = _mm256_loadu_si256((const __m256i *)w + c);
        __m256i low = _mm256_and_si256(both, nibble), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
        for (int m = 0; m < M; m++) {
          acc[m][c] = _mm256_add_epi16(acc[m][c], _mm256_maddubs_epi16(low, four(rows[m].int8() + k)));
          acc[m][c] = _mm256_add_epi16(acc[m][c], _mm256_maddubs_epi16(high, four(rows[m].int8() + k + 4)));
        }
      }
    }
    for (int c = 0; c < C; c++) {
      __m256 column = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(s + 8 * c)));
      for (int m = 0; m < M; m++) {
        __m256i total = _mm256_sub_epi32(_mm256_madd_epi16(acc[m][c], ones), _mm256_set1_epi32(8 * rows[m].sums()[g / GROUP4]));
        __m256 both = _mm256_mul_ps(column, _mm256_broadcast_ss(rows[m].scales() + g / GROUP8));
        _mm256_storeu_ps(out[m] + 8 * c, _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), both, _mm256_loadu_ps(out[m] + 8 * c)));
      }
    }
  }
}

using Add = void (*)(const char *, const void *, const Row *, int, int, float (*)[BLOCK], Ahead);
constexpr int WIDE = 3, NARROW = 6;  // rows of a tile of 32 outputs, and of 16
#define WIDE_TILES(f) {nullptr, f<1, 4>, f<2, 4>, f<3, 4>}
#define NARROW_TILES(f) {nullptr, f<1, 2>, f<2, 2>, f<3, 2>, f<4, 2>, f<5, 2>, f<6, 2>}
const Add wide[4][WIDE + 1] = {WIDE_TILES(add_f32), WIDE_TILES(add_bf16), WIDE_TILES(add_int8), WIDE_TILES(add_int4)};
const Add narrow[4][NARROW + 1] = {NARROW_TILES(add_f32), NARROW_TILES(add_bf16), NARROW_TILES(add_int8), NARROW_TILES(add_int4)};
#undef WIDE_TILES
#undef NARROW_TILES

void products(const Matrix &a, int block, const Row *rows, int count, float (*out)[BLOCK]) {
  const int inputs_a_line[] = {1, 2, 4, 8}, per = inputs_a_line[a.format], chunk = CHUNK / LINE * per;
  const char *weights = (const char *)a.weight + (int64_t)block * a.padded / per * LINE;
  const uint16_t *scales = a.format == INT4 ? (const uint16_t *)a.scale + (int64_t)block * a.padded / GROUP4 * BLOCK : nullptr;
  memset(out, 0, sizeof(out[0]) * count);
  int tiles = count <= WIDE ? 1 : (count + NARROW - 1) / NARROW, passes = count <= WIDE ? 1 : 2 * tiles;
  for (int from = 0; from < a.padded; from += chunk) {
    int to = from + chunk < a.padded ? from + chunk : a.padded;
    const char *w = weights + (int64_t)from / per * LINE, *next = w + (int64_t)(to - from) / per * LINE;
    const uint16_t *s = scales ? scales + (int64_t)from / GROUP4 * BLOCK : nullptr;
    if (passes == 1) {
      wide[a.format][count](w, s, rows, from, to, out, {next, LINE});
      continue;
    }
    int part = (to - from) / per * LINE / passes;
    for (int i = 0; i < passes; i++) {
      Share tile = share(count, i / 2, tiles);
      int column = i % 2 * W;
      float(*to_row)[BLOCK] = (float(*)[BLOCK])(out[tile.from] + column);
      narrow[a.format][tile.to - tile.from](w + column * 4, s ? s + column : nullptr, rows + tile.from, from, to, to_row,
                                            {next + (int64_t)i * part, LINE / passes});
    }
  }
  if (a.format == INT8) scale_outputs(a, block, count, out);
}

#else

template <int M> struct Tile { vf v[M][2]; };

inline void ahead(const void *p) {  // the weight stream is read once, forwards
  _mm_prefetch((const char *)p + 1024, _MM_HINT_T0);
  _mm_prefetch((const char *)p + 1088, _MM_HINT_T0);
}

template <int M> inline Tile<M> product_f32(const float *w, const Row *rows, int padded) {
  Tile<M> t;
  for (int m = 0; m < M; m++) t.v[m][0] = t.v[m][1] = vf{};
  for (int k = 0; k < padded; k++, w += BLOCK) {
    vf w0 = load(w), w1 = load(w + W);
    ahead(w);
    for (int m = 0; m < M; m++) {
      vf x = set1(rows[m].f32()[k]);
      t.v[m][0] = fma(w0, x, t.v[m][0]);
      t.v[m][1] = fma(w1, x, t.v[m][1]);
    }
  }
  return t;
}

#if defined(__AVX512BF16__)
template <int M> inline Tile<M> product_bf16(const uint16_t *w, const Row *rows, int padded) {
  __m512 acc[M][2];
  for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
  for (int k = 0; k < padded; k += 2, w += 2 * BLOCK) {
    __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + 32);
    ahead(w);
    for (int m = 0; m < M; m++) {
      __m512bh x = (__m512bh)_mm512_set1_epi32(*(const int32_t *)(rows[m].bf16() + k));
      acc[m][0] = _mm512_dpbf16_ps(acc[m][0], w0, x);
      acc[m][1] = _mm512_dpbf16_ps(acc[m][1], w1, x);
    }
  }
  Tile<M> t;
  for (int m = 0; m < M; m++)
    for (int c = 0; c < 2; c++) t.v[m][c] = (vf)acc[m][c];
  return t;
}
#else
template <int M> inline Tile<M> product_bf16(const uint16_t *w, const Row *rows, int padded) {
  Tile<M> t;
  for (int m = 0; m < M; m++) t.v[m][0] = t.v[m][1] = vf{};
  for (int k = 0; k < padded; k += 2, w += 2 * BLOCK)
    for (int c = 0; c < 2; c++) {
      vi pair;  // low half: input k, high half: input k + 1
      memcpy(&pair, w + c * BLOCK, 64);
      vf even = as_float(pair << 16), odd = as_float(pair & (int32_t)0xffff0000u);
      for (int m = 0; m < M; m++)
        t.v[m][c] = fma(odd, set1(rows[m].f32()[k + 1]), fma(even, set1(rows[m].f32()[k]), t.v[m][c]));
    }
  return t;
}
#endif

// acc += four unsigned weights times four signed activations, in each of 16 lanes
inline vi dot4(vi acc, vi weights, const int8_t *x) {
#if defined(__AVX512VNNI__)
  int32_t four;
  memcpy(&four, x, 4);
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)weights, _mm512_set1_epi32(four));
#else
  for (int i = 0; i < W; i++) {
    uint32_t w = (uint32_t)weights[i];
    int32_t total = 0;
    for (int b = 0; b < 4; b++) total += (int32_t)(w >> (8 * b) & 0xff) * x[b];
    acc[i] += total;
  }
  return acc;
#endif
}
inline vi bytes(const void *p) {
  vi v;
  memcpy(&v, p, 64);
  return v;
}
inline vi low_nibbles(vi v) { return v & 0x0f0f0f0f; }
inline vi high_nibbles(vi v) {  // an arithmetic shift brings in sign bits, which the mask takes off
#if defined(__AVX512F__)
  return (v >> 4) & 0x0f0f0f0f;
#else
  return each<vi>([&](int i) { return (v.p[i] >> 4) & 0x0f0f0f0f; });
#endif
}

// INT8 weights are stored plus 128, INT4 plus 8: the sum of the activations takes that off again, exactly. The float sums
// live in `out`: the integer ones need the registers, and a group is long enough to pay for the way to memory.
template <int M> inline void product_int8(const uint8_t *w, const Row *rows, int padded, float (*out)[BLOCK]) {
  const int8_t *x[M];
  for (int m = 0; m < M; m++) {
    x[m] = rows[m].int8();
    store(out[m], vf{});
    store(out[m] + W, vf{});
  }
  for (int g = 0; g < padded / GROUP8; g++) {
    vi acc[M][2];
    for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = set1i(-128 * (rows[m].sums()[2 * g] + rows[m].sums()[2 * g + 1]));
    for (int k = g * GROUP8; k < (g + 1) * GROUP8; k += 4, w += 4 * BLOCK) {
      vi w0 = bytes(w), w1 = bytes(w + 64);
      ahead(w);
      for (int m = 0; m < M; m++) {
        acc[m][0] = dot4(acc[m][0], w0, x[m] + k);
        acc[m][1] = dot4(acc[m][1], w1, x[m] + k);
      }
    }
    for (int m = 0; m < M; m++) {
      vf scale = set1(rows[m].scales()[g]);
      for (int c = 0; c < 2; c++) store(out[m] + c * W, fma(to_float(acc[m][c]), scale, load(out[m] + c * W)));
    }
  }
}

template <int M>
inline void product_int4(const uint8_t *w, const uint16_t *scale, const Row *rows, int padded, float (*out)[BLOCK]) {
  const int8_t *x[M];
  for (int m = 0; m < M; m++) {
    x[m] = rows[m].int8();
    store(out[m], vf{});
    store(out[m] + W, vf{});
  }
  for (int g = 0; g < padded / GROUP4; g++, scale += BLOCK) {
    vi acc[M][2];
    for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = set1i(-8 * rows[m].sums()[g]);
    for (int k = g * GROUP4; k < (g + 1) * GROUP4; k += 8, w += 4 * BLOCK) {
      ahead(w);
      for (int c = 0; c < 2; c++) {
        vi both = bytes(w + 64 * c), low = low_nibbles(both), high = high_nibbles(both);
        for (int m = 0; m < M; m++) {
          acc[m][c] = dot4(acc[m][c], low, x[m] + k);
          acc[m][c] = dot4(acc[m][c], high, x[m] + k + 4);
        }
      }
    }
    vf s[2] = {half16(scale), half16(scale + W)};
    for (int m = 0; m < M; m++)
      for (int c = 0; c < 2; c++)
        store(out[m] + c * W, fma(to_float(acc[m][c]), s[c] * rows[m].scales()[g / 2], load(out[m] + c * W)));
  }
}

template <int M> void product(const Matrix &a, int block, const Row *rows, float (*out)[BLOCK]) {
  int64_t at = (int64_t)block * BLOCK * a.padded;
  if (a.format == INT4)
    return product_int4<M>((const uint8_t *)a.weight + at / 2, (const uint16_t *)a.scale + at / GROUP4, rows, a.padded, out);
  if (a.format == INT8) {
    product_int8<M>((const uint8_t *)a.weight + at, rows, a.padded, out);
    return scale_outputs(a, block, M, out);
  }
  Tile<M> t = a.format == F32 ? product_f32<M>((const float *)a.weight + at, rows, a.padded)
                              : product_bf16<M>((const uint16_t *)a.weight + at, rows, a.padded);
  for (int m = 0; m < M; m++)
    for (int c = 0; c < 2; c++) store(out[m] + c * W, t.v[m][c]);
}

using Product = void (*)(const Matrix &, int, const Row *, float (*)[BLOCK]);
constexpr int TALLEST = 12;
const Product tiles_of[TALLEST + 1] = {nullptr,     product<1>, product<2>, product<3>,  product<4>,  product<5>, product<6>,
                                       product<7>,  product<8>, product<9>, product<10>, product<11>, product<12>};

void products(const Matrix &a, int block, const Row *rows, int count, float (*out)[BLOCK]) {
  int tallest = a.format == INT8 || a.format == INT4 ? 8 : TALLEST, tiles = (count + tallest - 1) / tallest;
  for (int i = 0; i < tiles; i++) {
    Share tile = share(count, i, tiles);
    tiles_of[tile.to - tile.from](a, block, rows + tile.from, out + tile.from);
  }
}

#endif

}  // namespace
