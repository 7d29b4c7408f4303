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
// Scales of a block, for the outputs from `column` on.
struct Column {
  const uint8_t *p;
  int column;
};

inline __m256i eight(const char *line, int c) { return _mm256_loadu_si256((const __m256i *)line + c); }  // of 8 outputs

// Each of these adds inputs from..to-1 to M rows of C * 8 outputs; `w` points at those outputs of input `from`.
inline __m256 floats(const float *p) { return _mm256_loadu_ps(p); }
inline __m256 floats(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }  // of half precision

template <typename T> struct FloatTiles {
  template <int M, int C> struct Tile {
    static void add(const char *w, Column, const Row *rows, int from, int to, float (*out)[BLOCK], Ahead ahead) {
      constexpr int INPUTS = STEP * LINE / BLOCK / sizeof(T);
      __m256 acc[M][C];
      EACH(m, M, EACH(c, C, acc[m][c] = _mm256_loadu_ps(out[m] + 8 * c);););
      for (int k = from; k < to; k += INPUTS, w += STEP * LINE) {
        ahead.step();
        EACH(i, INPUTS,
          __m256 v[C];
          EACH(c, C, v[c] = floats((const T *)w + i * BLOCK + 8 * c););
          EACH(m, M,
            __m256 x = _mm256_broadcast_ss(rows[m].f32() + k + i);
            EACH(c, C, acc[m][c] = _mm256_fmadd_ps(v[c], x, acc[m][c]););););
      }
      EACH(m, M, EACH(c, C, _mm256_storeu_ps(out[m] + 8 * c, acc[m][c]);););
    }
  };
};

template <int M, int C> struct Bf16Tile {
  static void add(const char *w, Column, const Row *rows, int from, int to, float (*out)[BLOCK], Ahead ahead) {
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

// Integer products: `add_int8` of TERMS inputs a lane, whose weights `int8_weights` picks from a line, and `add_small` of four
// inputs with weights of up to six bits, whose sums `to_int32` makes integers of 32 bits.
#if defined(__AVXVNNI__)

constexpr int TERMS = 4;
inline __m256i int8_weights(__m256i bytes, int) { return bytes; }
INLINE inline void add_int8(__m256i &acc, __m256i w, __m256i x) { acc = _mm256_dpbusd_avx_epi32(acc, w, x); }
INLINE inline void add_small(__m256i &acc, __m256i w, __m256i x) { acc = _mm256_dpbusd_avx_epi32(acc, w, x); }
INLINE inline __m256i first_small(__m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), w, x); }
inline __m256i to_int32(__m256i acc) { return acc; }
constexpr int fit(int) { return 8; }

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
// Assembly, since the compiler would choose an order of additions that needs more registers than there are.
INLINE inline void add_int8(__m256i &acc, __m256i w, __m256i x) {  // of 16 bits, summed in 32
  __m256i product;
  asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(product) : "x"(w), "x"(x));
}
// Unsigned times signed, pairs summed in 16 bits.
INLINE inline void add_small(__m256i &acc, __m256i w, __m256i x) {
  __m256i product;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(acc), "=&x"(product) : "x"(w), "x"(x));
}
INLINE inline __m256i first_small(__m256i w, __m256i x) { return _mm256_maddubs_epi16(w, x); }
inline __m256i to_int32(__m256i acc) { return _mm256_madd_epi16(acc, _mm256_set1_epi16(1)); }
// How many of those fit: each is at most two products of 127 with 15, 31 or 63.
constexpr int fit(int bits) { return bits == 4 ? 8 : bits == 5 ? 4 : 2; }

#endif

// The float sums live in `out`: without this the compiler keeps copies of them on the stack.
inline void in_memory() { asm volatile("" ::: "memory"); }

template <int M, int C> struct Int8Tile {
  static void add(const char *w, Column, const Row *rows, int from, int to, float (*out)[BLOCK], Ahead ahead) {
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

// Four inputs, the t-th four of 32, of eight outputs: a byte each, not negative. `w` are the weights of those outputs. t is a
// constant wherever this is inlined.
template <int BITS, bool CODED = false> INLINE inline __m256i weights(const char *w, int t) {
  auto at = [&](int byte) INLINE { return _mm256_loadu_si256((const __m256i *)(w + byte)); };
  auto upper = [&](int byte, int left, int mask) INLINE {  // bits that belong above the lower four
    __m256i v = at(byte);
    return _mm256_and_si256(left < 0 ? _mm256_srli_epi16(v, -left) : _mm256_slli_epi16(v, left), _mm256_set1_epi8((char)mask));
  };
  __m256i v = at(t / 2 * LINE);
  v = _mm256_and_si256(t % 2 ? _mm256_srli_epi16(v, 4) : v, _mm256_set1_epi8(15));
  if (CODED) return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_setr_epi8(MX_VALUES)), v);
  if (BITS == 5) v = _mm256_or_si256(v, upper(4 * LINE, 4 - t, 0x10));
  if (BITS == 6) v = _mm256_or_si256(v, upper((4 + t / 4) * LINE, 4 - t % 4 * 2, 0x30));
  return v;
}

INLINE inline __m256 halves(const uint8_t *p, int i) {  // the i-th eight
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 16 * i)));
}
INLINE inline __m256 bf16s(const uint8_t *p, int i) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 16 * i))), 16));
}
template <typename T> INLINE inline __m256 integers(const uint8_t *p, int i) {
  __m128i v = _mm_loadl_epi64((const __m128i *)(p + 8 * i));
  return _mm256_cvtepi32_ps(std::is_signed_v<T> ? _mm256_cvtepi8_epi32(v) : _mm256_cvtepu8_epi32(v));
}

template <int F> INLINE inline auto grouped_row(const Row &row) {
  if constexpr (bytes_as_they_are(F)) return row.int8();
  else return row.grouped();
}

template <int F> struct GroupTiles {
  static constexpr Layout L = layout(F);
  static constexpr int GROUPS = 32 / (L.group ? L.group : 32), FOURS = 8 / GROUPS;

  template <int M, int C> struct Tile {
    using Group = decltype(grouped_row<F>(std::declval<Row>()));

    // acc += the products of group I among 32 inputs
    template <int I> INLINE static void multiply(const char *w, const Group *group, int half_, __m256i (&acc)[M][C]) {
      if constexpr (L.bits == 8) {
        EACH(i, 32 / TERMS,
          const char *line = w + i * TERMS / 4 * LINE;
          __m256i v[C];
          EACH(c, C, v[c] = int8_weights(eight(line, c), i % 2););
          EACH(m, M,
            __m256i x = four(group[m]->x + half_ * 32 + TERMS * i);
            EACH(c, C, add_int8(acc[m][c], v[c], x););););
      } else {
        constexpr int BITS = L.coded ? 5 : L.bits, FIT = fit(BITS) < FOURS ? fit(BITS) : FOURS;  // coded values go up to 24
#pragma GCC unroll 4
        for (int first = 0; first < FOURS; first += FIT) {
          __m256i small[M][C];
#pragma GCC unroll 8
          for (int j = 0; j < FIT; j++) {
            int t = I * FOURS + first + j;
            __m256i v[C];
            EACH(c, C, v[c] = weights<L.bits, L.coded>(w + 32 * c, t););
            EACH(m, M,
              __m256i x = four(group[m]->x + half_ * 32 + 4 * t);
              EACH(c, C,
                if (j == 0) small[m][c] = first_small(v[c], x);
                else add_small(small[m][c], v[c], x);););
          }
          EACH(m, M, EACH(c, C, acc[m][c] = _mm256_add_epi32(acc[m][c], to_int32(small[m][c]));););
        }
      }
    }

    static void add(const char *w, Column scales, const Row *rows, int from, int to, float (*out)[BLOCK], Ahead ahead) {
      const uint8_t *s = scales.p, *header = s;
      const int o = scales.column;
      Group group[M];
      EACH(m, M, group[m] = grouped_row<F>(rows[m]) + from / GROUP8;);
      for (int g = from / GROUP8; g < to / GROUP8; g++) {
        for (int64_t half_ = 0; half_ < 2; half_++, w += chunk_bytes(F)) {
          ahead.step();
          if (L.two_level && (2 * g + half_) % (SUPER / 32) == 0) header = s, s += header_bytes(F);
          EACH(i, GROUPS,
            __m256i acc[M][C];
            EACH(m, M, EACH(c, C, acc[m][c] = L.minimum ? _mm256_setzero_si256() : four(group[m]->start + half_ * GROUPS + i);););
            multiply<decltype(i)::value>(w, group, half_, acc);
            __m256 column[C], least[C];
            EACH(c, C,
              if constexpr (L.coded) column[c] = bf16s(s + 2 * o, c);
              else if constexpr (!L.two_level) column[c] = halves(s + 2 * o, c);
              else if constexpr (L.group == 16) column[c] = _mm256_mul_ps(integers<int8_t>(s + i * BLOCK + o, c), halves(header + 2 * o, c));
              else column[c] = _mm256_mul_ps(integers<uint8_t>(s + o, c), halves(header + 2 * o, c));
              if constexpr (L.minimum && !L.two_level) least[c] = halves(s + LEVEL + 2 * o, c);
              else if constexpr (L.minimum) least[c] = _mm256_mul_ps(integers<uint8_t>(s + BLOCK + o, c), halves(header + LEVEL + 2 * o, c)););
            EACH(m, M,
              __m256 scale = _mm256_broadcast_ss(&group[m]->scale);
              EACH(c, C,
                __m256 total = _mm256_mul_ps(_mm256_cvtepi32_ps(acc[m][c]), column[c]);
                if constexpr (L.minimum) total = _mm256_fmadd_ps(least[c], _mm256_broadcast_ss(group[m]->sum + half_), total);
                _mm256_storeu_ps(out[m] + 8 * c, _mm256_fmadd_ps(total, scale, _mm256_loadu_ps(out[m] + 8 * c)));););
            in_memory(););
          s += L.two_level ? 2 * BLOCK : header_bytes(F);
        }
        EACH(m, M, group[m]++;);
      }
    }
  };
};

using Add = void (*)(const char *, Column, const Row *, int, int, float (*)[BLOCK], Ahead);
constexpr int WIDE = 2, NARROW = 6;  // rows of a tile of 32 outputs, and of 16
#define WIDE_TILES(T) {nullptr, T<1, 4>::add, T<2, 4>::add}
#define NARROW_TILES(T) {nullptr, T<1, 2>::add, T<2, 2>::add, T<3, 2>::add, T<4, 2>::add, T<5, 2>::add, T<6, 2>::add}
#define FORMS(TILES)                                                                                                \
  TILES(FloatTiles<float>::Tile), TILES(Bf16Tile), TILES(Int8Tile), TILES(GroupTiles<INT4>::Tile),                  \
      TILES(FloatTiles<uint16_t>::Tile), TILES(GroupTiles<Q8_0>::Tile), TILES(GroupTiles<Q4_1>::Tile),              \
      TILES(GroupTiles<Q5_0>::Tile), TILES(GroupTiles<Q5_1>::Tile), TILES(GroupTiles<Q4_K>::Tile),                  \
      TILES(GroupTiles<Q5_K>::Tile), TILES(GroupTiles<Q6_K>::Tile), TILES(GroupTiles<MXFP4>::Tile)
const Add wide[FORMATS][WIDE + 1] = {FORMS(WIDE_TILES)};
const Add narrow[FORMATS][NARROW + 1] = {FORMS(NARROW_TILES)};
#undef WIDE_TILES
#undef NARROW_TILES
#undef FORMS

// Inputs whose weights are about CHUNK bytes; where scales have two levels, whole groups of the upper one.
constexpr int chunk_inputs(int format) {
  int inputs = CHUNK * 8 / BLOCK / layout(format).bits;
  return grouped(format) ? inputs / SUPER * SUPER : inputs;
}

void products(const Matrix &a, int block, const Row *rows, int count, float (*out)[BLOCK]) {
  const int bits = layout(a.format).bits, chunk = chunk_inputs(a.format), stride = grouped(a.format) ? chunk_bytes(a.format) : STEP * LINE;
  const char *weights = (const char *)a.weight + block * block_bytes(a);
  const uint8_t *scales = (const uint8_t *)a.scale + (int64_t)block * scale_bytes(a.format, a.padded);
  auto bytes = [&](int inputs) { return (int64_t)inputs * BLOCK * bits / 8; };
  memset(out, 0, sizeof(out[0]) * count);
  int tiles = count <= WIDE ? 1 : (count + NARROW - 1) / NARROW, passes = count <= WIDE ? 1 : 2 * tiles;
  for (int from = 0; from < a.padded; from += chunk) {
    int to = from + chunk < a.padded ? from + chunk : a.padded;
    const char *w = weights + bytes(from), *next = w + bytes(to - from);
    const uint8_t *s = scales + scale_bytes(a.format, from);
    if (passes == 1) {
      wide[a.format][count](w, {s, 0}, rows, from, to, out, {next, stride});
      continue;
    }
    int64_t part = bytes(to - from) / passes;
    for (int i = 0; i < passes; i++) {
      Share tile = share(count, i / 2, tiles);
      int column = i % 2 * W;
      float(*to_row)[BLOCK] = (float(*)[BLOCK])(out[tile.from] + column);
      narrow[a.format][tile.to - tile.from](w + column * (a.format == F16 ? 2 : 4), {s, column}, rows + tile.from, from, to, to_row,
                                            {next + i * part, stride / passes});
    }
  }
  if (a.format == INT8) scale_outputs(a, block, count, out);
}

}  // namespace
