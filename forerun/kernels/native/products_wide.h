// Products with registers of 512 bits, and the same in plain C++ for processors that have neither those nor AVX2.
#pragma once

namespace {

template <int M> struct Tile { vf v[M][2]; };

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

template <int M> inline Tile<M> product_f32(const float *w, const Row *rows, int padded, Ahead ahead) {
  Tile<M> t;
  for (int m = 0; m < M; m++) t.v[m][0] = t.v[m][1] = vf{};
  for (int k = 0; k < padded; k++, w += BLOCK) {
    vf w0 = load(w), w1 = load(w + W);
    ahead.step();
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
inline vi low_nibbles(vi v) { return v & 0x0f0f0f0f; }
inline vi high_nibbles(vi v) {  // an arithmetic shift brings in sign bits, which the mask takes off
#if defined(__AVX512F__)
  return (v >> 4) & 0x0f0f0f0f;
#else
  return each<vi>([&](int i) { return (v.p[i] >> 4) & 0x0f0f0f0f; });
#endif
}

// INT8 weights are stored plus 128, INT4 plus 8: the sum of the activations takes that off again, exactly.
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

// Two groups of weights, each with its scales, then the scale of the activations that both were multiplied by.
template <int M> inline Tile<M> product_int4(const uint8_t *w, const uint16_t *scale, const Row *rows, int padded, Ahead ahead) {
  const Int4Group *group[M];
  Tile<M> t;
  for (int m = 0; m < M; m++) {
    group[m] = rows[m].int4();
    t.v[m][0] = t.v[m][1] = vf{};
  }
  for (int g = 0; g < padded / GROUP8; g++) {
    Tile<M> pair;
    for (int half_ = 0; half_ < 2; half_++, scale += BLOCK) {
      _mm_prefetch(scale + padded, _MM_HINT_T1);  // of the next block
      vi acc[M][2];
      for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = set1i(group[m][g].start[half_]);
      for (int k = half_ * GROUP4, end = k + GROUP4; k < end; k += 8, w += 4 * BLOCK) {
        ahead.step();
        for (int c = 0; c < 2; c++) {
          vi both = bytes(w + 64 * c), low = low_nibbles(both), high = high_nibbles(both);
          for (int m = 0; m < M; m++) {
            acc[m][c] = dot4(acc[m][c], low, group[m][g].x + k);
            acc[m][c] = dot4(acc[m][c], high, group[m][g].x + k + 4);
          }
        }
      }
      vf s[2] = {half16(scale), half16(scale + W)};
      for (int m = 0; m < M; m++)
        for (int c = 0; c < 2; c++) {
          vf x = to_float(acc[m][c]);
          pair.v[m][c] = half_ ? fma(x, s[c], pair.v[m][c]) : x * s[c];
        }
    }
    for (int m = 0; m < M; m++)
      for (int c = 0; c < 2; c++) t.v[m][c] = fma(pair.v[m][c], set1(group[m][g].scale), t.v[m][c]);
  }
  return t;
}

template <int M> void product(const Matrix &a, int block, const Row *rows, Ahead ahead, float (*out)[BLOCK]) {
  const char *w = (const char *)a.weight + block * block_bytes(a);
  const uint16_t *scale = (const uint16_t *)a.scale + (int64_t)block * (a.padded / GROUP4) * BLOCK;  // of INT4
  Tile<M> t = a.format == INT4   ? product_int4<M>((const uint8_t *)w, scale, rows, a.padded, ahead)
              : a.format == INT8 ? product_int8<M>((const uint8_t *)w, rows, a.padded, ahead)
              : a.format == BF16 ? product_bf16<M>((const uint16_t *)w, rows, a.padded, ahead)
                                 : product_f32<M>((const float *)w, rows, a.padded, ahead);
  for (int m = 0; m < M; m++)
    for (int c = 0; c < 2; c++) store(out[m] + c * W, t.v[m][c]);
  if (a.format == INT8) scale_outputs(a, block, M, out);
}

using Product = void (*)(const Matrix &, int, const Row *, Ahead, float (*)[BLOCK]);
constexpr int TALLEST = 8, TALLEST4 = 5;  // rows whose sums fit into registers
constexpr int FEW = 5;                    // rows from which the processor does not look far enough ahead
constexpr int NEAR = 8192;                // bytes ahead, enough for one tile
const Product tiles_of[TALLEST + 1] = {nullptr,    product<1>, product<2>, product<3>, product<4>,
                                       product<5>, product<6>, product<7>, product<8>};

void products(const Matrix &a, int block, const Row *rows, int count, float (*out)[BLOCK]) {
  int tallest = a.format == INT4 ? TALLEST4 : TALLEST, tiles = (count + tallest - 1) / tallest;
  int64_t size = block_bytes(a);
  const char *first = (const char *)a.weight + block * size + (tiles == 1 ? NEAR : size);
  bool few = count < FEW && a.format != INT4;
  for (int i = 0; i < tiles; i++) {
    Share tile = share(count, i, tiles);
    Ahead ahead = few ? Ahead{(const char *)rows, 0} : Ahead{first + size * i / tiles, 128 / tiles};
    tiles_of[tile.to - tile.from](a, block, rows + tile.from, ahead, out + tile.from);
  }
}

}  // namespace
