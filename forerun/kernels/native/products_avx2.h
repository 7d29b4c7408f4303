// Products with sixteen registers of eight lanes.
//
// Tiles are narrow and the inputs are taken in chunks that stay in the first cache while every tile passes over them; each
// pass fetches its part of the next chunk, so that memory never waits for arithmetic.
#pragma once

namespace {

constexpr int CHUNK = 8192;  // bytes of weights
constexpr int LINE = 128;    // bytes of weights for 32 outputs: 1, 2, 4 or 8 inputs
constexpr int STEP = 4;      // lines of one iteration

struct Ahead {  // prefetches `stride` bytes further at each step
  const char *p;
  int stride;
  void step() {
    for (int i = 0; i < stride; i += 64) _mm_prefetch(p + i, _MM_HINT_T0);
    p += stride;
  }
};

inline __m256i four(const void *x) {
  int32_t bits;
  memcpy(&bits, x, 4);
  return _mm256_set1_epi32(bits);
}
inline __m256i eight(const char *line, int c) { return _mm256_loadu_si256((const __m256i *)line + c); }  // of 8 outputs

// Each of these adds inputs from..to-1 to M rows of C * 8 outputs; `w` points at those outputs of input `from`.
template <int M, int C> struct F32Tile {
  static void add(const char *w, const void *, const Row *rows, int from, int to, float (*out)[BLOCK], Ahead ahead) {
    __m256 acc[M][C];
    EACH(m, M, EACH(c, C, acc[m][c] = _mm256_loadu_ps(out[m] + 8 * c);););
    for (int k = from; k < to; k += STEP, w += STEP * LINE) {
      ahead.step();
      EACH(i, STEP,
        __m256 v[C];
        EACH(c, C, v[c] = _mm256_loadu_ps((const float *)(w + i * LINE) + 8 * c););
        EACH(m, M,
          __m256 x = _mm256_broadcast_ss(rows[m].f32() + k + i);
          EACH(c, C, acc[m][c] = _mm256_fmadd_ps(v[c], x, acc[m][c]););););
    }
    EACH(m, M, EACH(c, C, _mm256_storeu_ps(out[m] + 8 * c, acc[m][c]);););
  }
};

template <int M, int C> struct Bf16Tile {
  static void add(const char *w, const void *, const Row *rows, int from, int to, float (*out)[BLOCK], Ahead ahead) {
    const __m256i high = _mm256_set1_epi32((int)0xffff0000u);
    __m256 acc[M][C];
    EACH(m, M, EACH(c, C, acc[m][c] = _mm256_loadu_ps(out[m] + 8 * c);););
    for (int k = from; k < to; k += 2 * STEP, w += STEP * LINE) {
      ahead.step();
      EACH(i, 2 * STEP,  // low halves: even inputs, high halves: odd ones
        const char *line = w + i / 2 * LINE;
        __m256 v[C];
        EACH(c, C,
          __m256i both = eight(line, c);
          v[c] = _mm256_castsi256_ps(i % 2 ? _mm256_and_si256(both, high) : _mm256_slli_epi32(both, 16)););
        EACH(m, M,
          __m256 x = _mm256_broadcast_ss(rows[m].f32() + k + i);
          EACH(c, C, acc[m][c] = _mm256_fmadd_ps(v[c], x, acc[m][c]););););
    }
    EACH(m, M, EACH(c, C, _mm256_storeu_ps(out[m] + 8 * c, acc[m][c]);););
  }
};

// Integer products: `add_int8` of TERMS inputs a lane, whose weights `int8_weights` picks from a line, and `add_int4` of four,
// whose sums `int4_sum` makes whole.
#if defined(__AVXVNNI__)

constexpr int TERMS = 4;
inline __m256i int8_weights(__m256i bytes, int) { return bytes; }
INLINE inline void add_int8(__m256i &acc, __m256i w, __m256i x) { acc = _mm256_dpbusd_avx_epi32(acc, w, x); }
INLINE inline void add_int4(__m256i &acc, __m256i w, __m256i x) { acc = _mm256_dpbusd_avx_epi32(acc, w, x); }
inline __m256i int4_sum(__m256i acc) { return acc; }

#else

constexpr int TERMS = 2;
// Even and odd bytes of the weights are two vectors of 16 bits, and so inputs 0, 2 and 1, 3 of each four meet in a product.
inline __m256i int8_weights(__m256i bytes, int odd) {
  return odd ? _mm256_srli_epi16(bytes, 8) : _mm256_and_si256(bytes, _mm256_set1_epi16(255));
}
inline void to_integers(int16_t *to, vi x) {
  __m256i halves = _mm256_packs_epi32((__m256i)x.p[0], (__m256i)x.p[1]);  // 0 to 3, 8 to 11, 4 to 7, 12 to 15
  halves = _mm256_permute4x64_epi64(halves, _MM_SHUFFLE(3, 1, 2, 0));
  halves = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(halves, _MM_SHUFFLE(3, 1, 2, 0)), _MM_SHUFFLE(3, 1, 2, 0));
  _mm256_storeu_si256((__m256i *)to, halves);
}
// The compiler may add integers in any order, and takes one that needs more registers than there are: it is not asked.
INLINE inline void add_int8(__m256i &acc, __m256i w, __m256i x) {  // of 16 bits, summed in 32
  __m256i product;
  asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(product) : "x"(w), "x"(x));
}
// Unsigned times signed, pairs summed in 16 bits: eight products of at most 15 * 127 * 2, half a group, fit.
INLINE inline void add_int4(__m256i &acc, __m256i w, __m256i x) {
  __m256i product;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(acc), "=&x"(product) : "x"(w), "x"(x));
}
inline __m256i int4_sum(__m256i acc) { return _mm256_madd_epi16(acc, _mm256_set1_epi16(1)); }

#endif

// The float sums live in `out`: without this the compiler keeps copies of them on the stack.
inline void in_memory() { asm volatile("" ::: "memory"); }

template <int M, int C> struct Int8Tile {
  static void add(const char *w, const void *, const Row *rows, int from, int to, float (*out)[BLOCK], Ahead ahead) {
    const Int8Group *group[M];
    EACH(m, M, group[m] = rows[m].int8() + from / GROUP8;);
    for (int g = from / GROUP8; g < to / GROUP8; g++) {
      __m256i acc[M][C];
      EACH(m, M, EACH(c, C, acc[m][c] = four(group[m]->start);););
      for (int64_t k = 0; k < GROUP8; k += 4 * STEP, w += STEP * LINE) {
        ahead.step();
        EACH(i, 4 * STEP / TERMS,
          const char *line = w + i * TERMS / 4 * LINE;
          __m256i v[C];
          EACH(c, C, v[c] = int8_weights(eight(line, c), i % 2););
          EACH(m, M,
            __m256i x = four(group[m]->x + k + TERMS * i);
            EACH(c, C, add_int8(acc[m][c], v[c], x););););
      }
      EACH(m, M,
        __m256 scale = _mm256_broadcast_ss(&group[m]->scale);
        EACH(c, C,
          __m256 total = _mm256_cvtepi32_ps(acc[m][c]);
          _mm256_storeu_ps(out[m] + 8 * c, _mm256_fmadd_ps(total, scale, _mm256_loadu_ps(out[m] + 8 * c)));););
      EACH(m, M, group[m]++;);
      in_memory();
    }
  }
};

template <int M, int C> struct Int4Tile {
  static void add(const char *w, const void *scale, const Row *rows, int from, int to, float (*out)[BLOCK], Ahead ahead) {
    static_assert(8 * STEP == GROUP4, "one iteration is half a group");
    const __m256i nibble = _mm256_set1_epi8(15);
    const uint16_t *s = (const uint16_t *)scale;
    const Int4Group *group[M];
    EACH(m, M, group[m] = rows[m].int4() + from / GROUP8;);
    for (int g = from / GROUP8; g < to / GROUP8; g++) {
      for (int64_t half_ = 0; half_ < 2; half_++, s += BLOCK, w += STEP * LINE) {
        __m256i acc[M][C];
        EACH(m, M, EACH(c, C, acc[m][c] = _mm256_setzero_si256();););
        ahead.step();
        EACH(i, 2 * STEP,
          const char *line = w + i / 2 * LINE;
          __m256i v[C];
          EACH(c, C,
            __m256i both = eight(line, c);
            v[c] = _mm256_and_si256(i % 2 ? _mm256_srli_epi16(both, 4) : both, nibble););
          EACH(m, M,
            __m256i x = four(group[m]->x + half_ * GROUP4 + 4 * i);
            EACH(c, C, add_int4(acc[m][c], v[c], x););););
        __m256 column[C];
        EACH(c, C, column[c] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(s + 8 * c))););
        EACH(m, M,
          __m256i start = four(group[m]->start + half_);
          __m256 scale_ = _mm256_broadcast_ss(&group[m]->scale);
          EACH(c, C,
            __m256 total = _mm256_cvtepi32_ps(_mm256_add_epi32(int4_sum(acc[m][c]), start));
            __m256 both = _mm256_mul_ps(column[c], scale_);
            _mm256_storeu_ps(out[m] + 8 * c, _mm256_fmadd_ps(total, both, _mm256_loadu_ps(out[m] + 8 * c)));););
        in_memory();
      }
      EACH(m, M, group[m]++;);
    }
  }
};

using Add = void (*)(const char *, const void *, const Row *, int, int, float (*)[BLOCK], Ahead);
constexpr int WIDE = 2, NARROW = 6;  // rows of a tile of 32 outputs, and of 16
#define WIDE_TILES(T) {nullptr, T<1, 4>::add, T<2, 4>::add}
#define NARROW_TILES(T) {nullptr, T<1, 2>::add, T<2, 2>::add, T<3, 2>::add, T<4, 2>::add, T<5, 2>::add, T<6, 2>::add}
const Add wide[4][WIDE + 1] = {WIDE_TILES(F32Tile), WIDE_TILES(Bf16Tile), WIDE_TILES(Int8Tile), WIDE_TILES(Int4Tile)};
const Add narrow[4][NARROW + 1] = {NARROW_TILES(F32Tile), NARROW_TILES(Bf16Tile), NARROW_TILES(Int8Tile), NARROW_TILES(Int4Tile)};
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
      wide[a.format][count](w, s, rows, from, to, out, {next, STEP * LINE});
      continue;
    }
    int part = (to - from) / per * LINE / passes;
    for (int i = 0; i < passes; i++) {
      Share tile = share(count, i / 2, tiles);
      int column = i % 2 * W;
      float(*to_row)[BLOCK] = (float(*)[BLOCK])(out[tile.from] + column);
      narrow[a.format][tile.to - tile.from](w + column * 4, s ? s + column : nullptr, rows + tile.from, from, to, to_row,
                                            {next + (int64_t)i * part, STEP * LINE / passes});
    }
  }
  if (a.format == INT8) scale_outputs(a, block, count, out);
}

}  // namespace
