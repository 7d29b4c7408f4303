// Products with registers of 512 bits, and the same in plain C++ for processors that have neither those nor AVX2.
#pragma once

namespace {

template <int M> struct Tile { vf v[M][2]; };
constexpr int WIDE_ROWS = 5;  // of formats in groups: rows that take all 32 outputs at once

// The next block of weights comes into the second cache while this one is multiplied: each tile of rows fetches its
// share. Left to itself the processor looks ahead too little once rows keep it busy, and prefetching into the first cache,
// or less far, brings little (Zen 4). Few rows read as fast as memory gives without.
struct Ahead {
  const char *p;
  int stride;  // bytes, while 128 are multiplied
  void step() {
    _mm_prefetch(p, _MM_HINT_T1);
    if (stride > 64) _mm_prefetch(p + 64, _MM_HINT_T1);
    p += stride;
    asm volatile("" : "+r"(p));  // one at a time: GCC would compute the addresses of a whole group and fetch it in one burst
  }
};

inline vf wide(const float *p) { return load(p); }
inline vf wide(const uint16_t *p) { return half16(p); }

template <int M, typename T> inline Tile<M> product_floats(const T *w, const Row *rows, int padded, Ahead ahead) {  // or halves
  Tile<M> t;
  for (int m = 0; m < M; m++) t.v[m][0] = t.v[m][1] = vf{};
  for (int k = 0; k < padded; k++, w += BLOCK) {
    vf w0 = wide(w), w1 = wide(w + W);
    if (sizeof(T) == 4 || k % 2 == 0) ahead.step();
    for (int m = 0; m < M; m++) {
      vf x = set1(rows[m].f32()[k]);
      t.v[m][0] = fma(w0, x, t.v[m][0]);
      t.v[m][1] = fma(w1, x, t.v[m][1]);
    }
  }
  return t;
}

#if defined(__AVX512BF16__)
template <int M> inline Tile<M> product_bf16(const uint16_t *w, const Row *rows, int padded, Ahead ahead) {
  __m512 acc[M][2];
  for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
  for (int k = 0; k < padded; k += 2, w += 2 * BLOCK) {
    __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + 32);
    ahead.step();
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
template <int M> inline Tile<M> product_bf16(const uint16_t *w, const Row *rows, int padded, Ahead ahead) {
  Tile<M> t;
  for (int m = 0; m < M; m++) t.v[m][0] = t.v[m][1] = vf{};
  for (int k = 0; k < padded; k += 2, w += 2 * BLOCK) {
    ahead.step();
    for (int c = 0; c < 2; c++) {
      vi pair;  // low half: input k, high half: input k + 1
      memcpy(&pair, w + c * BLOCK, 64);
      vf even = as_float(pair << 16), odd = as_float(pair & (int32_t)0xffff0000u);
      for (int m = 0; m < M; m++)
        t.v[m][c] = fma(odd, set1(rows[m].f32()[k + 1]), fma(even, set1(rows[m].f32()[k]), t.v[m][c]));
    }
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
// Shifts of bytes by way of whole lanes: the caller masks off what comes in from neighbours.
inline vi shifted(vi v, int n) {  // to the left, or right where n is negative
#if defined(__AVX512F__)
  return n >= 0 ? v << (n & 31) : v >> (-n & 31);
#else
  return each<vi>([&](int i) { return n >= 0 ? v.p[i] << (n & 31) : v.p[i] >> (-n & 31); });
#endif
}

// Places in the table of MXFP4 to values.
inline vi decoded(vi places) {
#if defined(__AVX512F__)
  const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(MX_VALUES));
  return (vi)_mm512_shuffle_epi8(table, (__m512i)places);
#else
  uint8_t b[64];
  memcpy(b, &places, 64);
  for (int i = 0; i < 64; i++) b[i] = mx_values[b[i]];
  return bytes(b);
#endif
}

// Four inputs, the t-th four of 32, of 16 outputs: a byte each, not negative. `w` are the weights of those outputs. t is a
// constant wherever this is inlined.
template <int BITS, bool CODED = false> INLINE inline vi weights(const uint8_t *w, int t) {
  if (BITS == 8) return bytes(w + t * 128);
  vi v = bytes(w + t / 2 * 128);
  v = (t % 2 ? shifted(v, -4) : v) & 0x0f0f0f0f;
  if (CODED) return decoded(v);
  if (BITS == 5) v = v | (shifted(bytes(w + 512), 4 - t) & 0x10101010);
  if (BITS == 6) v = v | (shifted(bytes(w + 512 + t / 4 * 128), 4 - t % 4 * 2) & 0x30303030);
  return v;
}

// Weights are stored plus an offset that makes them unsigned: the sum of the activations takes that off again, exactly.
template <int M> inline Tile<M> product_int8(const uint8_t *w, const Row *rows, int padded, Ahead ahead) {
  const Int8Group *group[M];
  Tile<M> t;
  for (int m = 0; m < M; m++) {
    group[m] = rows[m].int8();
    t.v[m][0] = t.v[m][1] = vf{};
  }
  for (int g = 0; g < padded / GROUP8; g++) {
    vi acc[M][2];
    for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = set1i(group[m][g].start[0]);
    for (int k = 0; k < GROUP8; k += 4, w += 4 * BLOCK) {
      vi w0 = bytes(w), w1 = bytes(w + 64);
      ahead.step();
      for (int m = 0; m < M; m++) {
        acc[m][0] = dot4(acc[m][0], w0, group[m][g].x + k);
        acc[m][1] = dot4(acc[m][1], w1, group[m][g].x + k);
      }
    }
    for (int m = 0; m < M; m++) {
      vf scale = set1(group[m][g].scale);
      for (int c = 0; c < 2; c++) t.v[m][c] = fma(to_float(acc[m][c]), scale, t.v[m][c]);
    }
  }
  return t;
}

// Scales and minima of the groups among 32 inputs of a block, of C times 16 outputs from half `from` on.
template <int F, int C> struct Scales {
  static constexpr Layout L = layout(F);
  static constexpr int GROUPS = 32 / (L.group ? L.group : 32);
  const uint8_t *p, *header = nullptr;
  int from, next;  // bytes to the next block, whose scales are fetched on the way
  vf scale[GROUPS][C], minimum[C];

  INLINE void read(int g) {  // of the g-th 32 inputs
    if (L.two_level && g % (SUPER / 32) == 0) header = forward(header_bytes(F));
    const uint8_t *own = forward(L.two_level ? 2 * BLOCK : header_bytes(F));
    for (int i = 0; i < C; i++) {
      const int at = (from + i) * W;
      if constexpr (L.two_level) {
        vf upper = half16((const uint16_t *)header + at);
        if constexpr (L.group == 16) {
          for (int j = 0; j < 2; j++) scale[j][i] = to_float(from_int8((const int8_t *)own + j * BLOCK + at)) * upper;
        } else {
          scale[0][i] = to_float(from_uint8(own + at)) * upper;
          minimum[i] = to_float(from_uint8(own + BLOCK + at)) * half16((const uint16_t *)(header + LEVEL) + at);
        }
      } else {
        scale[0][i] = L.coded ? from_bf16((const uint16_t *)own + at) : half16((const uint16_t *)own + at);
        if constexpr (L.minimum) minimum[i] = half16((const uint16_t *)(own + LEVEL) + at);
      }
    }
  }
  INLINE const uint8_t *forward(int count) {
    for (int i = 0; i < count; i += 64) _mm_prefetch(p + next + i, _MM_HINT_T1);
    p += count;
    return p - count;
  }
};

template <int F> INLINE inline auto grouped_row(const Row &row) {
  if constexpr (bytes_as_they_are(F)) return row.int8();
  else return row.grouped();
}

// C times 16 outputs from half `from` on. Two times 32 inputs, each with its scales, then the scale of the activations that
// both were multiplied by.
template <int M, int F, int C>
INLINE inline void sum_groups(const uint8_t *w, const uint8_t *scale, const Row *rows, int padded, int from, Ahead &ahead, Tile<M> &tile) {
  constexpr Layout L = layout(F);
  constexpr int FOURS = L.group / 4;  // of inputs in a group
  decltype(grouped_row<F>(*rows)) group[M];
  vf t[M][C];
  for (int m = 0; m < M; m++) {
    group[m] = grouped_row<F>(rows[m]);
    for (int c = 0; c < C; c++) t[m][c] = vf{};
  }
  Scales<F, C> scales{scale, nullptr, from, scale_bytes(F, padded), {}, {}};
  w += 64 * from;
  for (int g = 0; g < padded / GROUP8; g++) {
    vf pair[M][C];
#pragma GCC unroll 2
    for (int half_ = 0; half_ < 2; half_++, w += chunk_bytes(F)) {
      vi acc[M][C];
#pragma GCC unroll 2
      for (int i = 0; i < 32 / L.group; i++) {
        int which = half_ * (32 / L.group) + i;  // of the groups under one scale of activations
        for (int m = 0; m < M; m++)
          for (int c = 0; c < C; c++) acc[m][c] = L.minimum ? vi{} : set1i(group[m][g].start[which]);
#pragma GCC unroll 8
        for (int t_ = i * FOURS; t_ < (i + 1) * FOURS; t_++) {
          if (L.bits == 8 || t_ % 2 == 0 || t_ / 2 < L.bits - 4) ahead.step();  // once for each line
          for (int c = 0; c < C; c++) {
            vi v = weights<L.bits, L.coded>(w + 64 * c, t_);
            for (int m = 0; m < M; m++) acc[m][c] = dot4(acc[m][c], v, group[m][g].x + half_ * 32 + 4 * t_);
          }
        }
        if (i == 0) scales.read(2 * g + half_);
        for (int m = 0; m < M; m++)
          for (int c = 0; c < C; c++) {
            vf x = to_float(acc[m][c]);
            pair[m][c] = which ? fma(x, scales.scale[i][c], pair[m][c]) : x * scales.scale[i][c];
          }
      }
      if (L.minimum)
        for (int m = 0; m < M; m++)
          for (int c = 0; c < C; c++) pair[m][c] = fma(set1(group[m][g].sum[half_]), scales.minimum[c], pair[m][c]);
    }
    for (int m = 0; m < M; m++)
      for (int c = 0; c < C; c++) t[m][c] = fma(pair[m][c], set1(group[m][g].scale), t[m][c]);
  }
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) tile.v[m][from + c] = t[m][c];
}

// The sums of a few rows fit into registers for all 32 outputs, those of more for 16: these read a block's even lines first,
// which brings the odd ones into the second cache.
template <int M, int F> inline Tile<M> product_groups(const uint8_t *w, const uint8_t *scale, const Row *rows, int padded, Ahead ahead) {
  Tile<M> tile;
  if constexpr (M <= WIDE_ROWS) {
    sum_groups<M, F, 2>(w, scale, rows, padded, 0, ahead, tile);
  } else {
    ahead.stride /= 2;
    for (int from = 0; from < 2; from++) sum_groups<M, F, 1>(w, scale, rows, padded, from, ahead, tile);
  }
  return tile;
}

template <int M, int F> void product(const Matrix &a, int block, const Row *rows, Ahead ahead, float (*out)[BLOCK]) {
  const void *w = (const char *)a.weight + block * block_bytes(a);
  const uint8_t *scale = (const uint8_t *)a.scale + (int64_t)block * scale_bytes(F, a.padded);  // of formats in groups
  Tile<M> t;
  if constexpr (F == F32) t = product_floats<M>((const float *)w, rows, a.padded, ahead);
  else if constexpr (F == F16) t = product_floats<M>((const uint16_t *)w, rows, a.padded, ahead);
  else if constexpr (F == BF16) t = product_bf16<M>((const uint16_t *)w, rows, a.padded, ahead);
  else if constexpr (F == INT8) t = product_int8<M>((const uint8_t *)w, rows, a.padded, ahead);
  else t = product_groups<M, F>((const uint8_t *)w, scale, rows, a.padded, ahead);
  for (int m = 0; m < M; m++)
    for (int c = 0; c < 2; c++) store(out[m] + c * W, t.v[m][c]);
  if (F == INT8) scale_outputs(a, block, M, out);
}

using Product = void (*)(const Matrix &, int, const Row *, Ahead, float (*)[BLOCK]);
constexpr int TALLEST = 8;  // rows whose sums fit into registers
#if defined(__AVX512F__)
constexpr int TALLEST_GROUPED = 8;
#define GROUPED(F) TALL(F)
#else
constexpr int TALLEST_GROUPED = 1;  // in plain C++ taller ones bring little, and take the compiler a minute
#define GROUPED(F) {nullptr, product<1, F>}
#endif
constexpr int FEW = 5;      // rows from which the processor does not look far enough ahead
constexpr int NEAR = 8192;  // bytes ahead, enough for one tile
#define TALL(F)                                                                                                     \
  {nullptr, product<1, F>, product<2, F>, product<3, F>, product<4, F>, product<5, F>, product<6, F>, product<7, F>, product<8, F>}
const Product tiles_of[FORMATS][TALLEST + 1] = {
    TALL(F32), TALL(BF16), TALL(INT8), GROUPED(INT4), TALL(F16), GROUPED(Q8_0), GROUPED(Q4_1), GROUPED(Q5_0), GROUPED(Q5_1),
    GROUPED(Q4_K), GROUPED(Q5_K), GROUPED(Q6_K), GROUPED(MXFP4)};
#undef GROUPED
#undef TALL

}  // namespace

#if defined(__AMX_INT8__)
#include "products_amx.h"
#endif

namespace {

void products(const Matrix &a, int block, const Row *rows, int count, float (*out)[BLOCK]) {
#if defined(__AMX_INT8__)
  if (products_of_many(a, block, rows, count, out)) return;
#endif
  int tallest = grouped(a.format) ? TALLEST_GROUPED : TALLEST, tiles = (count + tallest - 1) / tallest;
  int64_t size = block_bytes(a);
  const bool once = tiles == 1 && (count <= WIDE_ROWS || !grouped(a.format));  // the block's lines are read one after the other
  const char *first = (const char *)a.weight + block * size + (once ? NEAR : size);
  bool few = count < FEW && !grouped(a.format);
  for (int i = 0; i < tiles; i++) {
    Share tile = share(count, i, tiles);
    Ahead ahead = few ? Ahead{(const char *)rows, 0} : Ahead{first + size * i / tiles, 128 / tiles};
    tiles_of[a.format][tile.to - tile.from](a, block, rows + tile.from, ahead, out + tile.from);
  }
}

}  // namespace
